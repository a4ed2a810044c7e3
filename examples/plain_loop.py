"""NeuCLIP in a plain PyTorch loop. One rank and two ranks train the same weights:

python examples/plain_loop.py
torchrun --nproc-per-node 2 examples/plain_loop.py
python examples/plain_loop.py --resume --epochs 12
python examples/plain_loop.py --micro-batch-size 8
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from tiny_data import Shapes
from tiny_towers import EMBED_DIM, TinyTowers
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from neuclip import LargeBatch, NeuCLIP

BATCH_SIZE = 32  # of all ranks together


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6, help="total epochs, including those before --resume")
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/plain_loop.pt"))
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    parser.add_argument("--micro-batch-size", type=int, default=0, help="pairs per forward pass; 0: the whole batch")
    arguments = parser.parse_args()
    distributed = "WORLD_SIZE" in os.environ  # set by torchrun
    if distributed:
        dist.init_process_group("gloo")
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
    torch.manual_seed(0)
    towers = TinyTowers()
    # Computes a large batch in chunks that fit into memory: the same gradient, with two forward passes. DDP wraps it.
    encode = LargeBatch(towers, micro_batch_size=arguments.micro_batch_size)
    model = DistributedDataParallel(encode) if distributed else encode
    optimizer = torch.optim.AdamW(towers.parameters(), lr=2e-3)
    # The loss. It gathers the features of all ranks itself. embed_dim alone gives the paper's settings; the other
    # options are for 512 samples.
    objective = NeuCLIP(embed_dim=EMBED_DIM, num_prototypes=512, restart_every=16, inner_steps=3, network_lr=0.01)
    first_epoch = 0
    if arguments.resume:
        saved = torch.load(arguments.checkpoint, weights_only=True)
        towers.load_state_dict(saved["towers"])
        optimizer.load_state_dict(saved["optimizer"])
        objective.load_state_dict(saved["objective"])
        first_epoch = saved["epoch"]

    data = Shapes()
    sampler = DistributedSampler(data, num_replicas=ranks, rank=rank)
    loader = DataLoader(data, batch_size=BATCH_SIZE // ranks, sampler=sampler)
    for epoch in range(first_epoch, arguments.epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            image, text, logit_scale = model(batch["pixel_values"], batch["input_ids"])
            loss = objective(image, text, logit_scale, sample_ids=batch["sample_ids"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            figures = {"loss": loss.item(), **objective.metrics}  # for this rank's part of the last batch
            shown = (f"{name} {figures[name]:.5f}" for name in ("loss", "accuracy", "calibration"))
            print(f"epoch {epoch + 1}", *shown, flush=True)

        # Call state_dict on every rank, because each holds a part of the state; write it on one rank. It can be loaded
        # on any number of ranks.
        state = {"towers": towers.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
        state["objective"] = objective.state_dict()
        if rank == 0:
            arguments.checkpoint.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, arguments.checkpoint)
    if distributed:
        del model  # first, because a process group that only DDP still holds may block forever when it is freed
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
