"""The settings of a run: one frozen dataclass per section.

Defaults are those of the paper or of open_clip; `recipes/tiny.yaml` has values for a laptop. `neuclip train --help`
prints the help text of every field.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from neuclip.errors import UserError
from neuclip.settings.fields import check_at_least, check_positive, described
from neuclip.settings.objectives import NeuCLIPSettings, ObjectiveSettings


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The run's folder, seed and hardware."""

    name: str = described("", "name of the run's folder; default: date, objective and model")
    folder: str = described("runs", "folder in which run folders are created")
    seed: int = described(0, "seed of the data order, the augmentation and the initial weights")
    device: Literal["auto", "cuda", "mps", "cpu"] = described("auto", "auto: cuda, mps or cpu, in this order")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = described(
        "auto", "autocast of the encoders; auto: bf16 on GPUs that support it, otherwise fp32"
    )
    threads: int = described(0, "CPU threads per rank; 0: PyTorch's choice, or an equal share of the cores per rank")

    def __post_init__(self) -> None:
        check_at_least("run.threads", self.threads, 0, "0: chosen by PyTorch")


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Training data: where it is and how it is read."""

    train: str = described(
        "",
        "tar shards (folder, file, URL or pattern such as 'shards/{00000..00019}.tar'), a CSV, TSV, JSONL or Parquet "
        "file, COCO captions, a folder of images, a saved Hugging Face data set, or the name of a data set (`neuclip "
        "data list`). Separate several with commas and give weights after a colon: a.csv:2,shards:0.5",
    )
    image_column: str = described("", "tables: column of images or image paths; default: detected by name")
    caption_column: str = described("", "tables: caption columns, separated by commas; default: detected by name")
    caption_key: str = described("", "shards: key of the caption in json members; default: txt, or caption")
    hold_out: int = described(
        0, "keep so many samples, chosen by run.seed, out of training: recall@k is measured on them; 0: none"
    )
    workers: int = described(4, "processes per rank that read and transform samples; 0: the training process does it")
    crop_scale: tuple[float, float] = described(
        (0.9, 1.0),
        "range of the random crop, as share of the image's area; 1,1: no random crop, images are prepared as in "
        "evaluation",
    )
    stored_features: Literal["auto", "off"] = described(
        "auto",
        "auto: what a locked tower makes of a sample is computed once and stored in the cache folder, the same to the "
        "bit on a CPU; for images this needs data.crop_scale 1,1; off: it is computed whenever the sample comes",
    )
    pixels: Literal["exact", "fast"] = described(
        "exact",
        "exact: the same pixels as open_clip, bit for bit; fast: about twice as fast, some training pixels differ by "
        "1 of 255, rarely by 3, and by more where a large JPEG is decoded at a reduced size",
    )
    max_bad_share: float = described(0.05, "stop if more than this share of the samples cannot be used")
    cache_size: int = described(64_000_000_000, "remote shards: disk space for local copies, in bytes (64G: 64 GB)")
    remote_timeout: float = described(60.0, "remote shards: seconds without data before a download is retried")

    def __post_init__(self) -> None:
        check_at_least("data.hold_out", self.hold_out, 0, "0: none")
        check_at_least("data.workers", self.workers, 0, "0: the training process reads")
        check_at_least("data.cache_size", self.cache_size, 1, "in bytes; 64G means 64 GB")
        check_positive("data.remote_timeout", self.remote_timeout, "in seconds")
        if not 0 <= self.max_bad_share <= 1:
            raise UserError(f"data.max_bad_share is {self.max_bad_share}; give a share from 0 to 1")
        low, high = self.crop_scale
        if not 0 < low <= high <= 1:
            raise UserError(f"data.crop_scale is {low}, {high}; give two shares with 0 < first <= second <= 1")
        if self.pixels == "fast" and not self.augments:
            raise UserError(
                "data.crop_scale 1,1 prepares images as in evaluation, for which there are no fast pixels; "
                "give --data.pixels exact"
            )

    @property
    def augments(self) -> bool:
        """Whether an image looks different each time."""
        return self.crop_scale != (1.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Model architecture and initial weights."""

    name: str = described(
        "ViT-B-32",
        "tiny, small, lite0-minilm (pretrained towers; needs neuclip[pretrained]), any open_clip model, "
        "local-dir:FOLDER, hf-hub:NAME, or the path of a model config (.json); empty: that of the run or folder in "
        "model.pretrained",
    )
    pretrained: str = described(
        "",
        "initial weights: an open_clip tag, a weights file, a run, a checkpoint of a run, or the folder of a saved "
        "model; for an image tower of timm also image=FILE, with the weights of that tower alone",
    )
    image_size: int = described(0, "image height and width in pixels; 0: the model's own")
    image_tower: Literal["train", "locked", "lora"] = described(
        "train",
        "train: all weights of the image tower; locked: only its projection to the embedding, the rest stays as it is; "
        "lora: the projection, and small matrices beside the weights of attention and MLPs, which stay as they are",
    )
    text_tower: Literal["train", "locked", "lora"] = described("train", "the same for the text tower")
    image_unlocked_layers: int = described(0, "locked: so many of the image tower's last layers train all the same")
    text_unlocked_layers: int = described(0, "locked: so many of the text tower's last layers train all the same")
    lora_rank: int = described(8, "lora: rank of what is added to a weight; more rank, more weights to train")
    lora_alpha: float = described(16.0, "lora: what is added is multiplied by lora_alpha / lora_rank")
    gradient_checkpointing: bool = described(False, "recompute activations in backward: less memory, more time")

    def __post_init__(self) -> None:
        check_at_least("model.image_size", self.image_size, 0, "0: the model's own")
        check_at_least("model.lora_rank", self.lora_rank, 1, "2 to 16 are usual")
        check_positive("model.lora_alpha", self.lora_alpha, "twice the rank is usual")
        check_at_least("model.image_unlocked_layers", self.image_unlocked_layers, 0, "0: none")
        check_at_least("model.text_unlocked_layers", self.text_unlocked_layers, 0, "0: none")


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW, which trains the encoders."""

    learning_rate: float = described(1e-3, "peak learning rate")
    weight_decay: float = described(0.1, "weight decay of matrices; vectors and scalars have none")
    beta1: float = described(0.9, "AdamW's first beta")
    beta2: float = described(0.98, "AdamW's second beta")
    eps: float = described(1e-6, "AdamW's epsilon")
    warmup: float = described(0.05, "linear warm-up: below 1 a share of the run, otherwise a number of steps")
    clip_gradient_norm: float = described(
        0.0, "clip the towers' gradient to this norm, and that of the temperature by itself; 0: no clipping"
    )
    layer_decay: float = described(
        1.0,
        "each layer of a tower learns at this share of the rate of the layer above it, from the projection down; "
        "1: all alike; 0.75 is usual for fine-tuning",
    )

    def __post_init__(self) -> None:
        check_positive("optimizer.learning_rate", self.learning_rate, "1e-3 suits small models")
        check_positive("optimizer.eps", self.eps, "1e-6 for transformers, 1e-8 for ResNets")
        check_at_least("optimizer.weight_decay", self.weight_decay, 0, "0: none")
        check_at_least("optimizer.warmup", self.warmup, 0, "0: none")
        check_at_least("optimizer.clip_gradient_norm", self.clip_gradient_norm, 0, "0: none")
        if not 0 < self.layer_decay <= 1:
            raise UserError(
                f"optimizer.layer_decay is {self.layer_decay}; give a share above 0, and at most 1: all alike"
            )
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            if not 0 <= beta < 1:
                raise UserError(f"optimizer.{name} is {beta}; give a number from 0 up to but not including 1")


@dataclass(frozen=True, kw_only=True)
class TemperatureSettings:
    """The softmax temperature tau, learned as ln(1/tau) with its own learning rate."""

    initial: float = described(0.07, "initial tau")
    minimum: float = described(0.01, "lower bound of tau (tau_0 in the paper)")
    maximum: float = described(1.0, "upper bound of tau")
    learning_rate: float = described(1.25e-4, "learning rate of ln(1/tau); 0: tau stays constant")
    schedule: Literal["constant", "cosine", "step_threshold"] = described(
        "constant",
        "cosine: warm-up and decay as in optimizer; step_threshold: one third of the rate while tau <= 0.03",
    )

    def __post_init__(self) -> None:
        check_at_least("temperature.learning_rate", self.learning_rate, 0, "0: the temperature stays constant")
        if not 0.005 <= self.minimum <= self.initial <= self.maximum <= 1:
            raise UserError(
                f"temperature.minimum, initial, maximum are {self.minimum}, {self.initial}, {self.maximum}; "
                "give 0.005 <= minimum <= initial <= maximum <= 1"
            )


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Training budget and batch sizes."""

    batch_size: int = described(1024, "pairs per step over all ranks: the contrastive batch")
    micro_batch_size: int = described(
        0,
        "pairs per rank and forward pass; less memory, one more pass, same gradient except with BatchNorm; 0: all",
    )
    samples: int = described(100_000_000, "training budget in samples; the run has samples // batch_size steps")
    epochs: int = described(
        0, "pass over the data at most so often, even where train.samples allows more; 0: no such limit"
    )

    def __post_init__(self) -> None:
        check_at_least("train.batch_size", self.batch_size, 1, "the paper uses 1024 to 5120")
        check_at_least("train.micro_batch_size", self.micro_batch_size, 0, "0: the whole share of the rank at once")
        check_at_least("train.epochs", self.epochs, 0, "0: train.samples alone is the budget")
        if self.samples < self.batch_size:
            raise UserError(
                f"train.samples {self.samples} is below train.batch_size {self.batch_size}; "
                f"give --train.samples {self.batch_size} or more"
            )


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Held-out data, and how often the model is evaluated on it."""

    retrieval: tuple[str, ...] = described(
        ("auto",),
        "held-out data for recall@k, given like data.train; NAME=DATA shows it as NAME in the figures; auto: the "
        "held-out parts of data.train, if any, and what data.hold_out keeps",
    )
    zero_shot: tuple[str, ...] = described(
        ("auto",),
        "folders with one folder of images per class, or with classnames.txt and test/*.tar, or names such as cifar-10 "
        "(`neuclip data list`); NAME=FOLDER shows it as NAME; auto: the held-out parts of data.train, if any",
    )
    image_column: str = described("", "as data.image_column, for retrieval; default: that of data")
    caption_column: str = described("", "as data.caption_column, for retrieval; default: that of data")
    caption_key: str = described("", "as data.caption_key, for retrieval; default: that of data")
    every: int = described(0, "samples between evaluations; 0: only at the end")
    at_start: bool = described(False, "evaluate before the first step too: what the model knew before fine-tuning")
    batch_size: int = described(256, "images per forward pass")
    error_anchors: int = described(0, "anchors for the normalizer error at the end; 0: none (see `neuclip error`)")
    error_every: int = described(0, "samples between normalizer errors, measured at evaluations; 0: only at the end")
    gallery: int = described(12, "example queries per direction in the report")

    def __post_init__(self) -> None:
        check_at_least("evaluation.every", self.every, 0, "0: only at the end")
        check_at_least("evaluation.batch_size", self.batch_size, 1, "256 fits almost anywhere")
        check_at_least("evaluation.error_anchors", self.error_anchors, 0, "0: none, the paper uses 10000")
        check_at_least("evaluation.error_every", self.error_every, 0, "0: only at the end")
        if self.error_every and not (self.error_anchors and self.every):
            raise UserError(
                "evaluation.error_every needs anchors and evaluations during training; "
                f"give --evaluation.error_anchors 2000 --evaluation.every {self.every or self.error_every} too"
            )
        check_at_least("evaluation.gallery", self.gallery, 0, "0: none")


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """How often the run is saved; it is always saved at the end and on Ctrl-C or SIGTERM."""

    every_samples: int = described(0, "samples between checkpoints; 0: by time only")
    every_minutes: float = described(15.0, "minutes between checkpoints; 0: by samples only")
    keep: int = described(2, "checkpoints to keep; the oldest is removed once a newer one is written")
    milestones: int = described(
        0,
        "checkpoints to keep for good beside these, evenly spaced over train.samples: at equal numbers of samples in "
        "runs of equal budget, for `neuclip error` (the paper takes 5); 0: none",
    )

    @property
    def most(self) -> int:
        """Checkpoints on disk at a time, at most: one is written before the oldest is removed."""
        return self.keep + 1 + self.milestones

    def __post_init__(self) -> None:
        check_at_least("checkpoint.every_samples", self.every_samples, 0, "0: by time only")
        check_at_least("checkpoint.every_minutes", self.every_minutes, 0, "0: by samples only")
        check_at_least("checkpoint.keep", self.keep, 1, "one is needed to resume")
        check_at_least("checkpoint.milestones", self.milestones, 0, "0: none, the paper compares 5")


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """Logging."""

    every: int = described(50, "steps between lines in records.jsonl")
    tensorboard: bool = described(False, "also write TensorBoard events (needs neuclip[tensorboard])")
    wandb: bool = described(False, "also write Weights & Biases files, offline (needs neuclip[wandb])")

    def __post_init__(self) -> None:
        check_at_least("log.every", self.every, 1, "1 logs each step")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of a run; stored in its folder, they are enough to repeat it."""

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
