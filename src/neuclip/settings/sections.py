"""The settings of a run, one frozen dataclass per section. Defaults are the paper's or open_clip's; a laptop's are in
`recipes/tiny.yaml`. Every field's metadata `help` is what `neuclip train --help` prints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from neuclip.errors import UserError
from neuclip.settings.fields import check_at_least, check_positive, described
from neuclip.settings.objectives import NeuCLIPSettings, ObjectiveSettings


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Where the run lives and on what it runs."""

    name: str = described("", "name of the run's folder; default: date, objective, model")
    folder: str = described("runs", "folder that holds the runs")
    seed: int = described(0, "fixes the order of the data, the augmentation and the initial weights")
    device: Literal["auto", "cuda", "mps", "cpu"] = described("auto", "auto takes cuda, then mps, then cpu")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = described(
        "auto", "autocast of the towers; auto: bf16 where the device has it, fp32 elsewhere and on the CPU"
    )
    threads: int = described(0, "CPU threads per process; 0: PyTorch's choice, several processes share the cores")

    def __post_init__(self) -> None:
        check_at_least("run.threads", self.threads, 0, "0 leaves PyTorch's choice")


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """What is trained on."""

    train: str = described(
        "",
        "tar shards (folder, file, URL or pattern such as 'shards/{00000..00019}.tar'), a CSV, TSV, JSONL or Parquet "
        "file, COCO's captions, a folder of images, a saved Hugging Face set, a name (`neuclip data list`); several "
        "between commas, with weights: a.csv:2,shards:0.5",
    )
    image_column: str = described("", "tables: column of images or their paths; default: found by its name")
    caption_column: str = described(
        "", "tables: column of captions, several between commas; default: found by its name"
    )
    caption_key: str = described(
        "", "shards: key of the json members that holds the captions; default: txt, or caption"
    )
    workers: int = described(4, "processes that decode and transform; 0: none")
    crop_scale: tuple[float, float] = described((0.9, 1.0), "share of the image that the random crop keeps")
    pixels: Literal["exact", "fast"] = described(
        "exact",
        "exact: open_clip's pixels to the bit; fast: twice the speed, some values of training images differ by 1 "
        "of 255, rarely by 3, by more where a large JPEG is decoded at reduced size",
    )
    max_bad_share: float = described(0.05, "stop when more than this share of the samples read is bad")
    cache_size: int = described(64_000_000_000, "remote shards: bytes of disk for copies of them (64G: 64 GB)")
    remote_timeout: float = described(60.0, "remote shards: a try fails when nothing comes for so many seconds")

    def __post_init__(self) -> None:
        check_at_least("data.workers", self.workers, 0, "0 reads in the training process")
        check_at_least("data.cache_size", self.cache_size, 1, "in bytes; 64G means 64 GB")
        check_positive("data.remote_timeout", self.remote_timeout, "in seconds")
        if not 0 <= self.max_bad_share <= 1:
            raise UserError(f"data.max_bad_share is {self.max_bad_share}; give a share from 0 to 1")
        low, high = self.crop_scale
        if not 0 < low <= high <= 1:
            raise UserError(f"data.crop_scale is {low}, {high}; give two shares with 0 < first <= second <= 1")


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Which towers."""

    name: str = described(
        "ViT-B-32", "tiny, small, any open_clip model, local-dir:FOLDER, or the path of a model config (.json)"
    )
    pretrained: str = described("", "start from these weights: an open_clip tag or the path of a checkpoint")
    image_size: int = described(0, "pixels per side; 0: the model's own")
    gradient_checkpointing: bool = described(False, "recompute activations in backward: less memory, more time")

    def __post_init__(self) -> None:
        check_at_least("model.image_size", self.image_size, 0, "0 takes the model's own")


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW on the towers."""

    learning_rate: float = described(1e-3, "peak rate of the towers")
    weight_decay: float = described(0.1, "decay of weight matrices; vectors and scalars have none")
    beta1: float = described(0.9, "AdamW's first beta")
    beta2: float = described(0.98, "AdamW's second beta")
    eps: float = described(1e-6, "AdamW's epsilon")
    warmup: float = described(0.05, "linear warm-up: a share of the run below 1, a number of steps from 1 on")
    clip_gradient_norm: float = described(0.0, "largest gradient norm; 0: no clipping")

    def __post_init__(self) -> None:
        check_positive("optimizer.learning_rate", self.learning_rate, "1e-3 suits small models")
        check_positive("optimizer.eps", self.eps, "1e-6 for transformers, 1e-8 for ResNets")
        check_at_least("optimizer.weight_decay", self.weight_decay, 0, "0 for none")
        check_at_least("optimizer.warmup", self.warmup, 0, "0 for none")
        check_at_least("optimizer.clip_gradient_norm", self.clip_gradient_norm, 0, "0 for none")
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            if not 0 <= beta < 1:
                raise UserError(f"optimizer.{name} is {beta}; give a number from 0 up to but not including 1")


@dataclass(frozen=True, kw_only=True)
class TemperatureSettings:
    """The softmax temperature tau, learned as ln(1/tau) with a rate of its own."""

    initial: float = described(0.07, "where tau starts")
    minimum: float = described(0.01, "tau is held at or above this (tau_0)")
    maximum: float = described(1.0, "tau is held at or below this")
    learning_rate: float = described(1.25e-4, "rate of ln(1/tau); 0 keeps tau constant")
    schedule: Literal["constant", "cosine", "step_threshold"] = described(
        "constant",
        "constant; cosine: warm-up and decay as the towers' rate; step_threshold: a third of it while tau <= 0.03",
    )

    def __post_init__(self) -> None:
        check_at_least("temperature.learning_rate", self.learning_rate, 0, "0 keeps the temperature constant")
        if not 0.005 <= self.minimum <= self.initial <= self.maximum <= 1:
            raise UserError(
                f"temperature.minimum, initial, maximum are {self.minimum}, {self.initial}, {self.maximum}; "
                "give 0.005 <= minimum <= initial <= maximum <= 1"
            )


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How much, and in which bites."""

    batch_size: int = described(1024, "pairs per step over all processes: the contrastive batch")
    micro_batch_size: int = described(
        0, "pairs per process and forward pass: less memory, one more pass, the same gradient (BatchNorm sees chunks)"
    )
    samples: int = described(100_000_000, "budget in samples seen; the run takes samples // batch_size steps")

    def __post_init__(self) -> None:
        check_at_least("train.batch_size", self.batch_size, 1, "the paper uses 1024 to 5120")
        check_at_least("train.micro_batch_size", self.micro_batch_size, 0, "0 takes the process's whole share at once")
        if self.samples < self.batch_size:
            raise UserError(
                f"train.samples {self.samples} is below train.batch_size {self.batch_size}; "
                f"give --train.samples {self.batch_size} or more"
            )


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """What is measured on held-out data, and when."""

    retrieval: tuple[str, ...] = described(
        ("auto",), "held-out data for recall@k, addressed as data.train; auto: the parts the data set brings, or none"
    )
    zero_shot: tuple[str, ...] = described(
        ("auto",),
        "folders with classnames.txt, templates and test/*.tar, or names such as cifar-10 (`neuclip data list`); "
        "auto: those the data set brings, or none",
    )
    every: int = described(0, "samples between evaluations; 0: only at the end")
    batch_size: int = described(256, "images per forward pass")
    error_anchors: int = described(0, "anchors for the normalizer error at the end; 0: leave it to `neuclip error`")
    error_every: int = described(0, "samples between such errors, taken at evaluations on the way; 0: only at the end")
    gallery: int = described(12, "held-out queries per direction shown in the report")

    def __post_init__(self) -> None:
        check_at_least("evaluation.every", self.every, 0, "0 evaluates only at the end")
        check_at_least("evaluation.batch_size", self.batch_size, 1, "256 fits almost anywhere")
        check_at_least("evaluation.error_anchors", self.error_anchors, 0, "0 for none, the paper uses 10000")
        check_at_least("evaluation.error_every", self.error_every, 0, "0 measures only at the end")
        if self.error_every and not (self.error_anchors and self.every):
            raise UserError(
                "evaluation.error_every measures at evaluations on the way; "
                f"give --evaluation.error_anchors 2000 --evaluation.every {self.every or self.error_every} with it"
            )
        check_at_least("evaluation.gallery", self.gallery, 0, "0 for none")


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """When the run is saved. It is always saved at the end and on Ctrl-C or SIGTERM."""

    every_samples: int = described(0, "samples between checkpoints; 0: by time alone")
    every_minutes: float = described(15.0, "minutes between checkpoints; 0: by samples alone")
    keep: int = described(2, "how many stay; older ones are removed after a newer one is safely written")

    def __post_init__(self) -> None:
        check_at_least("checkpoint.every_samples", self.every_samples, 0, "0 saves by time alone")
        check_at_least("checkpoint.every_minutes", self.every_minutes, 0, "0 saves by samples alone")
        check_at_least("checkpoint.keep", self.keep, 1, "one must stay to resume from")


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """What is written down while training."""

    every: int = described(50, "steps between lines of records.jsonl")
    tensorboard: bool = described(False, "also write TensorBoard events (extra: neuclip[tensorboard])")
    wandb: bool = described(False, "also write Weights & Biases files, offline (extra: neuclip[wandb])")

    def __post_init__(self) -> None:
        check_at_least("log.every", self.every, 1, "1 logs each step")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything a run is told. Stored resolved in the run's folder, enough to repeat the run."""

    objective_name: str = "neuclip"
    objective: ObjectiveSettings = field(default_factory=NeuCLIPSettings)
    run: RunSettings = field(default_factory=RunSettings)
    data: DataSettings = field(default_factory=DataSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    temperature: TemperatureSettings = field(default_factory=TemperatureSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    log: LogSettings = field(default_factory=LogSettings)
