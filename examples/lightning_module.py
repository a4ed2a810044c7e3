"""NeuCLIP in Lightning:

python examples/lightning_module.py
python examples/lightning_module.py --resume --epochs 12
python examples/lightning_module.py --devices 2 --micro-batch-size 8
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tiny_data import Shapes
from tiny_towers import EMBED_DIM, TinyTowers
from torch.utils.data import DataLoader, DistributedSampler

import neuclip.models  # noqa: F401 - lets a torchvision for CUDA import beside a CPU-only torch
from neuclip import LargeBatch, NeuCLIP

# isort: split
import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint


class ContrastiveModule(L.LightningModule):
    def __init__(self, objective: NeuCLIP, micro_batch_size: int = 0) -> None:
        super().__init__()
        self.towers = LargeBatch(TinyTowers(), micro_batch_size=micro_batch_size)  # exact gradient, in chunks that fit
        self.objective = objective  # Lightning's checkpoints include its state

    def training_step(self, batch, batch_number):
        image, text, logit_scale = self.towers(batch["pixel_values"], batch["input_ids"])
        return self.objective(image, text, logit_scale, sample_ids=batch["sample_ids"])

    def on_train_batch_end(self, outputs, batch, batch_number):
        if self.trainer.is_last_batch and self.trainer.is_global_zero:
            figures = {"loss": outputs["loss"].item(), **self.objective.metrics}
            shown = (f"{name} {figures[name]:.5f}" for name in ("loss", "accuracy", "calibration"))
            print(f"epoch {self.current_epoch + 1}", *shown, flush=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)

    def train_dataloader(self):
        data, ranks, rank = Shapes(), self.trainer.world_size, self.trainer.global_rank
        sampler = DistributedSampler(data, num_replicas=ranks, rank=rank)  # keeps its order after a resume
        return DataLoader(data, batch_size=32 // ranks, sampler=sampler)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6, help="total epochs, including those before --resume")
    parser.add_argument("--folder", type=Path, default=Path("runs/lightning_module"))
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in the folder")
    parser.add_argument("--devices", type=int, default=1, help="number of ranks, each with its own device")
    parser.add_argument("--micro-batch-size", type=int, default=0, help="pairs per forward pass; 0: the whole batch")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    objective = NeuCLIP(embed_dim=EMBED_DIM, num_prototypes=512, restart_every=16, inner_steps=3, network_lr=0.01)
    trainer = L.Trainer(
        max_epochs=arguments.epochs,
        devices=arguments.devices,
        callbacks=[ModelCheckpoint(arguments.folder, filename="last", enable_version_counter=False)],
        logger=False,
        enable_progress_bar=False,
    )
    last = arguments.folder / "last.ckpt" if arguments.resume else None
    trainer.fit(ContrastiveModule(objective, arguments.micro_batch_size), ckpt_path=last)


if __name__ == "__main__":
    main()
