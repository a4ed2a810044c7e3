"""Which runs there are: the tuning ones, on a held-out shard of the training part, and the final ones, on the tests.

Tuning never sees a test part, and the final stage chooses nothing. All is tuned on the icons at batch 128; batch 32 and
the photos take what was best there, by the rules of `scaled` and `Method.small_batch`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from benchmarks.comparison.images import shrunk
from benchmarks.comparison.methods import METHODS, TEMPERATURE_RATE, TUNED_BATCH, Flags, Method
from neuclip.errors import RunFailed
from neuclip.records import RunFolder
from neuclip.settings.reading import read_settings

HERE = Path(__file__).parent
COMMON = HERE / "common.yaml"
TUNING_SEED = 10
FINAL_SEEDS = (0, 1, 2)
ERROR_POINTS = 4  # over training, the end among them
ERROR_ANCHORS = 2000
SELECTION = "mean of recall@1 and recall@10, image to text and text to image, on the held-out shard"


@dataclass(frozen=True)
class Setting:
    """A data set and a batch size. `shards` of 4,000 pairs are trained on; `samples` is two epochs of them, in whole
    batches at each quarter."""

    name: str
    data: str
    tests: tuple[str, ...]
    batch_size: int
    shards: int
    samples: int
    seconds: int  # of a run, roughly: what the first estimate of the time left starts from


SETTINGS = (
    Setting("icons-128", "icons", ("new-drawings", "new-concepts"), 128, 4, 31_744, 70),
    Setting("icons-32", "icons", ("new-drawings", "new-concepts"), 32, 4, 31_744, 100),
    Setting("photos-128", "photos", ("test",), 128, 4, 31_744, 80),
)
ICONS_128, ICONS_32, PHOTOS_128 = SETTINGS


@dataclass(frozen=True)
class PlannedRun:
    """One `neuclip train`. `choice` is the place in the method's `tried`."""

    stage: str
    setting: Setting
    method: Method
    seed: int
    choice: int

    @property
    def name(self) -> str:
        last = f"choice{self.choice}" if self.stage == "tune" else f"seed{self.seed}"
        return f"{self.stage}/{self.setting.name}-{self.method.name}-{last}"

    def folder(self, root: Path) -> RunFolder:
        return RunFolder(root / self.name)

    def is_done(self, root: Path) -> bool:
        return self.folder(root).summary.is_file()

    def flags(self, root: Path) -> Flags:
        """Everything beside common.yaml."""
        return {
            **rates(self.setting),
            **self.method.fixed,
            **scaled(self.method.tried[self.choice], self.setting),
            **self.method.small_batch(self.choice, self.setting.batch_size),
            "train.batch_size": str(self.setting.batch_size),
            "train.samples": str(self.setting.samples),
            "run.seed": str(self.seed),
            **(tuning_data(root, self.setting) if self.stage == "tune" else final_data(root, self.setting, self.seed)),
        }

    def arguments(self, root: Path) -> list[str]:
        """What follows `neuclip`: a new run, or the rest of one that was cut off."""
        folder = self.folder(root)
        if any(folder.checkpoints.glob("*.pt")):
            return ["train", "--resume", str(folder.path)]
        place = {"run.folder": str(folder.path.parent), "run.name": folder.path.name}
        given = {"model.name": str(HERE / "nano.json")} | self.flags(root) | place
        return ["train", str(COMMON), *(part for key, value in given.items() for part in (f"--{key}", value))]


def rates(setting: Setting) -> Flags:
    """The towers' and the temperature's rate: those of common.yaml, times the root of the batch's ratio."""
    common = read_settings(COMMON, [])
    rate = {
        "optimizer.learning_rate": str(common.optimizer.learning_rate),
        TEMPERATURE_RATE: str(common.temperature.learning_rate),
    }
    return scaled(rate, setting)


def scaled(flags: Flags, setting: Setting) -> Flags:
    """AdamW's rule for a smaller batch, the same for all methods: rates shrink with the root of the batch."""
    share = math.sqrt(setting.batch_size / TUNED_BATCH)
    followed = ("optimizer.learning_rate", TEMPERATURE_RATE)
    return {key: f"{float(value) * share:g}" if key in followed else value for key, value in flags.items()}


def data_folder(root: Path, setting: Setting) -> Path:
    return root / "data" / setting.data


def training_shards(root: Path, setting: Setting) -> str:
    return f"{data_folder(root, setting)}/train/{{{0:05d}..{setting.shards - 1:05d}}}.tar"


def tuning_data(root: Path, setting: Setting) -> Flags:
    """Train on the first shards, measure on the last; the shards are mixed, so it is a fair sample."""
    folder = data_folder(root, setting) / "train"
    shards = sorted(folder.glob("*.tar"))
    if len(shards) <= setting.shards:
        raise RunFailed(f"{folder} has {len(shards)} shards, tuning needs more; remove the folder and start again")
    return {"data.train": training_shards(root, setting), "evaluation.retrieval": str(shards[-1])}


def final_data(root: Path, setting: Setting, seed: int) -> Flags:
    """The first seed also shows the error over training, which costs a pass over the data each time."""
    folder, every = data_folder(root, setting), str(setting.samples // ERROR_POINTS)
    on_the_way = {"evaluation.every": every} if seed == FINAL_SEEDS[0] else {}
    return {
        "data.train": training_shards(root, setting),
        "evaluation.retrieval": ",".join(str(folder / part) for part in setting.tests),
        "evaluation.error_anchors": str(ERROR_ANCHORS),
        **on_the_way,
    }


def prepare_data(root: Path, photos: Path | None) -> None:
    """Shrink what is not yet there. Without `photos` only the icons."""
    sources = {"icons/train": "icons-30k"} | {f"icons/{part}": f"icons-30k/{part}" for part in ICONS_128.tests}
    if photos:
        sources |= {f"photos/{part}": str(photos / part) for part in ("train", "test")}
    for name, address in sources.items():
        target = root / "data" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shrunk(address, target)


def tuning_runs() -> list[PlannedRun]:
    """Each method's configurations at batch 128."""
    return [
        PlannedRun("tune", ICONS_128, method, TUNING_SEED, choice)
        for choice in range(len(METHODS[0].tried))
        for method in METHODS
    ]


def choices(root: Path) -> dict[str, int]:
    """`chosen[method]` of finished tuning: the place in the method's `tried` with the best held-out recall."""
    best_last = sorted(tuning_runs(), key=lambda run: held_out_recall(run, root))
    return {run.method.name: run.choice for run in best_last}


def held_out_recall(run: PlannedRun, root: Path) -> float:
    """SELECTION of a finished tuning run, from 0 to 1."""
    figures = json.loads(run.folder(root).summary.read_text(encoding="utf-8"))["evaluation"]
    wanted = [f"{direction}_recall_at_{k}" for direction in ("image_to_text", "text_to_image") for k in (1, 10)]
    recalls = [value for key, value in figures.items() if key.rpartition(".")[2] in wanted]
    if len(recalls) != len(wanted):
        raise RunFailed(
            f"{run.folder(root).summary}: {len(recalls)} of {len(wanted)} recalls; remove that run's folder"
        )
    return sum(recalls) / len(recalls)


def final_runs(chosen: dict[str, int], photos: bool) -> list[PlannedRun]:
    """Three seeds of everything. `chosen[method]` is the place in the method's `tried`."""
    settings = SETTINGS if photos else (ICONS_128, ICONS_32)
    return [
        PlannedRun("final", setting, method, seed, chosen[method.name])
        for seed in FINAL_SEEDS
        for setting in settings
        for method in METHODS
    ]
