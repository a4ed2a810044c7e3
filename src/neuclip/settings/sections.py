"""The settings of a run: one frozen dataclass per section.

The defaults come from the paper or from open_clip; `recipes/tiny.yaml` has values for a laptop. `neuclip train --help`
prints the help text of every option.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from neuclip.settings.objectives import NeuCLIPSettings, ObjectiveSettings
from neuclip.settings.options import OptionError, Section, option


@dataclass(frozen=True, kw_only=True)
class RunSettings(Section):
    """The run's folder, seed and hardware."""

    prefix = "run."

    name: str = option("", "name of the run's folder; default: date, objective and model")
    folder: str = option("runs", "folder in which run folders are created")
    seed: int = option(0, "seed of the data order, the augmentation and the initial weights")
    device: Literal["auto", "cuda", "mps", "cpu"] = option(
        "auto", "auto: cuda, mps or cpu, in this order", may_change=True
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = option(
        "auto", "autocast of the encoders; auto: bf16 on GPUs that support it, otherwise fp32"
    )
    threads: int = option(
        0, "CPU threads per rank; 0: PyTorch's choice, or an equal share of the cores", at_least=0, may_change=True
    )


@dataclass(frozen=True, kw_only=True)
class DataSettings(Section):
    """Training data: where it is and how it is read."""

    prefix = "data."

    train: str = option(
        "",
        "tar shards (folder, file, URL or pattern such as 'shards/{00000..00019}.tar'), a CSV, TSV, JSONL or Parquet "
        "file, COCO captions, a folder of images, a saved Hugging Face data set, or icons-30k, the demo's data. "
        "Separate several with commas and give weights after a colon: a.csv:2,shards",
        may_change=True,  # the data may have moved; once opened, they are checked to be the same
    )
    image_column: str = option("", "tables: column of images or image paths; default: detected by name")
    caption_column: str = option("", "tables: caption columns, separated by commas; default: detected by name")
    caption_key: str = option("", "shards: key of the caption in json members; default: txt, or caption")
    hold_out: int = option(
        0, "number of samples, chosen by run.seed, that are kept out of training and used for recall@k", at_least=0
    )
    workers: int = option(
        4, "processes per rank that read and transform samples; 0: the training process", at_least=0, may_change=True
    )
    crop_scale: tuple[float, float] = option(
        (0.9, 1.0),
        "range of the random crop, as share of the image's area; 1,1: no random crop, images are prepared as in "
        "evaluation",
        above=0,
        at_most=1,
    )
    stored_features: Literal["auto", "off"] = option(
        "auto",
        "auto: the output of a locked tower is computed once per sample and stored in the cache folder; for images "
        "this needs data.crop_scale 1,1; off: it is computed each time",
        may_change=True,
    )
    pixels: Literal["exact", "fast"] = option(
        "exact",
        "exact: the same pixels as open_clip, bit for bit; fast: about twice as fast, some training pixels differ by "
        "1 of 255, rarely by 3, and by more where a large JPEG is decoded at a reduced size",
    )
    max_bad_share: float = option(
        0.05, "stop if more than this share of the samples cannot be used", at_least=0, at_most=1, may_change=True
    )
    cache_size: int = option(
        64_000_000_000, "remote shards: bytes of disk for local copies (64G: 64 GB)", at_least=1, may_change=True
    )
    remote_timeout: float = option(
        60.0, "remote shards: seconds without data before a download is retried", above=0, may_change=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.crop_scale[0] > self.crop_scale[1]:
            raise OptionError(f"data.crop_scale is {self.crop_scale}; give the smaller share first", "crop_scale")
        if self.pixels == "fast" and not self.augments:
            raise OptionError(
                "data.crop_scale 1,1 prepares images as in evaluation, which fast pixels do not support; "
                "give --data.pixels exact",
                *("crop_scale", "pixels"),
            )

    @property
    def augments(self) -> bool:
        """Whether images are randomly cropped."""
        return self.crop_scale != (1.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Section):
    """Model architecture and initial weights."""

    prefix = "model."

    name: str = option(
        "ViT-B-32",
        "tiny, small, lite0-minilm (pretrained towers; needs the extra pretrained), any open_clip model, "
        "local-dir:FOLDER, hf-hub:NAME, or the path of a model config (.json); empty: the model of the run or folder "
        "in model.pretrained",
    )
    pretrained: str = option(
        "",
        "initial weights: an open_clip tag, a weights file, a run, a checkpoint of a run, or the folder of a saved "
        "model; for an image tower of timm also image=FILE, with the weights of only that tower",
    )
    image_size: int = option(0, "image height and width in pixels; 0: the model's own", at_least=0)
    context_length: int = option(0, "tokens of a caption; 0: the model's own; positions are resized", at_least=0)
    bias_initial: float = option(
        -10.0,
        "initial logit bias if the objective uses one (siglip); -ln(batch - 1) matches the share of positive pairs",
    )
    image_tower: Literal["train", "locked", "lora"] = option(
        "train",
        "which weights of the image tower train: all; locked: only the projection to the embedding; lora: the "
        "projection, and low-rank matrices added to the weights of attention and MLPs",
    )
    text_tower: Literal["train", "locked", "lora"] = option("train", "the same for the text tower")
    image_unlocked_layers: int = option(0, "locked: train this many of the image tower's last layers too", at_least=0)
    text_unlocked_layers: int = option(0, "locked: train this many of the text tower's last layers too", at_least=0)
    batch_norm: Literal["train", "frozen"] = option(
        "train",
        "train: BatchNorm updates its statistics with the training images; frozen: it keeps those of the initial "
        "weights, and only its scale and shift train",
    )
    lora_rank: int = option(8, "lora: rank of the added matrices; 2 to 16 are usual", at_least=1)
    lora_alpha: float = option(16.0, "lora: their product is multiplied by lora_alpha / lora_rank", above=0)
    gradient_checkpointing: bool = option(False, "recompute activations in backward: less memory, more time")


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings(Section):
    """AdamW, which trains the encoders."""

    prefix = "optimizer."

    learning_rate: float = option(1e-3, "peak learning rate", above=0)
    weight_decay: float = option(0.1, "weight decay of matrices; vectors and scalars have none", at_least=0)
    beta1: float = option(0.9, "AdamW's first beta", at_least=0, below=1)
    beta2: float = option(0.98, "AdamW's second beta", at_least=0, below=1)
    eps: float = option(1e-6, "AdamW's epsilon; 1e-8 for ResNets", above=0)
    warmup: float = option(0.05, "linear warm-up: below 1 a share of the run, otherwise a number of steps", at_least=0)
    clip_gradient_norm: float = option(
        0.0,
        "clip the towers' gradient to this norm, and separately the temperature's gradient; 0: no clipping",
        at_least=0,
    )
    layer_decay: float = option(
        1.0,
        "learning rate of each layer of a tower, as a share of the rate of the layer above it, from the projection "
        "down; 1: the same rate for all layers; 0.75 is usual for fine-tuning",
        above=0,
        at_most=1,
    )


@dataclass(frozen=True, kw_only=True)
class TemperatureSettings(Section):
    """The softmax temperature tau, learned as ln(1/tau) with its own learning rate."""

    prefix = "temperature."

    initial: float = option(0.07, "initial tau")
    minimum: float = option(0.01, "lower bound of tau (tau_0 in the paper)", at_least=0.005)
    maximum: float = option(1.0, "upper bound of tau", at_most=1)
    learning_rate: float = option(1.25e-4, "learning rate of ln(1/tau); 0: tau stays constant", at_least=0)
    schedule: Literal["constant", "cosine", "step_threshold"] = option(
        "constant",
        "cosine: warm-up and decay as in optimizer; step_threshold: one third of the rate while tau <= 0.03",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.minimum <= self.initial <= self.maximum:
            raise OptionError(
                f"temperature.minimum, initial, maximum are {self.minimum}, {self.initial}, {self.maximum}; "
                "give minimum <= initial <= maximum",
                *("initial", "minimum", "maximum"),
            )


@dataclass(frozen=True, kw_only=True)
class TrainSettings(Section):
    """Training budget and batch sizes."""

    prefix = "train."

    batch_size: int = option(1024, "pairs per step over all ranks: the contrastive batch", at_least=1)
    micro_batch_size: int = option(
        0,
        "pairs per rank and forward pass; fewer need less memory but a second forward pass, with the same gradient "
        "except with BatchNorm; 0: all pairs at once",
        at_least=0,
        may_change=True,
    )
    samples: int = option(100_000_000, "training budget in samples; the run has samples // batch_size steps")
    epochs: int = option(
        0, "at most this many passes over the data, even if train.samples allows more; 0: no limit", at_least=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples < self.batch_size:
            raise OptionError(
                f"train.samples {self.samples} is below train.batch_size {self.batch_size}; "
                f"give --train.samples {self.batch_size} or more",
                *("samples", "batch_size"),
            )


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings(Section):
    """Held-out data, and how often the model is evaluated on it."""

    prefix = "evaluation."
    may_change = True

    retrieval: tuple[str, ...] = option(
        ("auto",),
        "held-out data for recall@k, given like data.train; NAME=DATA shows it as NAME in the results; auto: the "
        "held-out parts of data.train, if any, and the samples that data.hold_out keeps",
    )
    zero_shot: tuple[str, ...] = option(
        ("auto",),
        "folders with one folder of images per class, or with classnames.txt and test/*.tar, or parts such as "
        "icons-30k/zero-shot/names; NAME=FOLDER shows it as NAME; auto: the held-out parts of data.train, if any",
    )
    image_column: str = option("", "like data.image_column, for retrieval; default: the value of data.image_column")
    caption_column: str = option("", "like data.caption_column, for retrieval; default: that of data.caption_column")
    caption_key: str = option("", "like data.caption_key, for retrieval; default: the value of data.caption_key")
    every: int = option(0, "samples between evaluations; 0: only at the end", at_least=0)
    at_start: bool = option(False, "also evaluate before the first step, to see what the model knew beforehand")
    batch_size: int = option(256, "images per forward pass", at_least=1)
    error_anchors: int = option(
        0, "anchors for the normalizer error, measured at every evaluation; 0: none (see `neuclip error`)", at_least=0
    )
    gallery: int = option(12, "example queries per direction in the report", at_least=0)


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings(Section):
    """How often the run is saved; it is always saved at the end and on Ctrl-C or SIGTERM."""

    prefix = "checkpoint."
    may_change = True

    every_samples: int = option(0, "samples between checkpoints; 0: by time only", at_least=0)
    every_minutes: float = option(15.0, "minutes between checkpoints; 0: by samples only", at_least=0)
    keep: int = option(2, "checkpoints to keep; the oldest is removed once a newer one is written", at_least=1)
    milestones: int = option(
        0,
        "further checkpoints, evenly spaced over train.samples and never removed, for `neuclip error` (the paper uses "
        "5); 0: none",
        at_least=0,
    )

    @property
    def most(self) -> int:
        """The largest number of checkpoints on disk at a time: a new one is written before the oldest is removed."""
        return self.keep + 1 + self.milestones


@dataclass(frozen=True, kw_only=True)
class LogSettings(Section):
    """Logging."""

    prefix = "log."
    may_change = True

    every: int = option(50, "steps between lines in records.jsonl", at_least=1)
    tensorboard: bool = option(False, "also write TensorBoard events (needs the extra tensorboard)")
    wandb: bool = option(False, "also write Weights & Biases files, offline (needs the extra wandb)")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of a run. They are stored in its folder and are enough to repeat it."""

    objective_name: str = "neuclip"
    run: RunSettings = field(default_factory=RunSettings)
    data: DataSettings = field(default_factory=DataSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    objective: ObjectiveSettings = field(default_factory=NeuCLIPSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    temperature: TemperatureSettings = field(default_factory=TemperatureSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    log: LogSettings = field(default_factory=LogSettings)
