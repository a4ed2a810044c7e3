"""Optional copies of the records for TensorBoard and Weights & Biases; records.jsonl is always written."""

from __future__ import annotations

from typing import Any, Protocol

from neuclip.errors import UserError
from neuclip.records import RunFolder
from neuclip.settings.sections import LogSettings


class Sink(Protocol):
    def write(self, record: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


def open_sinks(settings: LogSettings, folder: RunFolder) -> list[Sink]:
    sinks: list[Sink] = []
    if settings.tensorboard:
        sinks.append(TensorBoardSink(folder))
    if settings.wandb:
        sinks.append(WandbSink(folder))
    return sinks


def scalars(record: dict[str, Any]) -> dict[str, float]:
    return {f"train/{key}": value for key, value in record.items() if isinstance(value, int | float)}


class TensorBoardSink:
    def __init__(self, folder: RunFolder):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError("log.tensorboard needs its extra: pip install 'neuclip[tensorboard]'") from error
        self.writer = SummaryWriter(folder.path / "tensorboard")  # type: ignore[no-untyped-call]

    def write(self, record: dict[str, Any]) -> None:
        for key, value in scalars(record).items():
            self.writer.add_scalar(key, value, record["samples"])  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self.writer.close()  # type: ignore[no-untyped-call]


class WandbSink:
    """Offline: files in the run's folder, which `wandb sync` can upload."""

    def __init__(self, folder: RunFolder):
        try:
            import wandb
        except ImportError as error:
            raise UserError("log.wandb needs its extra: pip install 'neuclip[wandb]'") from error
        self.run = wandb.init(mode="offline", dir=folder.path, project="neuclip", name=folder.path.name)

    def write(self, record: dict[str, Any]) -> None:
        self.run.log(scalars(record), step=record["samples"])

    def close(self) -> None:
        self.run.finish()
