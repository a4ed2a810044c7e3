"""NeuCLIP in open_clip's own trainer (open_clip_torch 3.3); all flags of the trainer work:

python examples/open_clip_trainer.py --name first
python examples/open_clip_trainer.py --name first --epochs 12 --resume latest
"""

from __future__ import annotations

import csv
import json
import logging
import sys
from pathlib import Path

import torch
from PIL import Image
from tiny_data import SIDE, SIZE, caption, draw

from neuclip import NeuCLIP
from neuclip.models import open_clip_module

open_clip = open_clip_module()  # before importing the trainer, because it makes a CPU-only torch work
from open_clip_train import main as trainer  # noqa: E402

EMBED_DIM = 64
FOLDER = Path("runs/open_clip_trainer")
VISION = {"width": 64, "layers": 1, "image_size": SIDE, "patch_size": 8, "head_width": 16}
TEXT = {"width": 64, "layers": 1, "context_length": 12, "heads": 4}
MODEL = {"embed_dim": EMBED_DIM, "vision_cfg": VISION, "text_cfg": TEXT}
FLAGS = f"""--model tiny-shapes --train-data {FOLDER}/shapes.csv --logs {FOLDER} --epochs 6 --batch-size 32
 --lr 1e-3 --wd 0 --warmup 0 --lr-scheduler const --precision fp32 --workers 0 --log-every-n-steps 16"""


def create_loss(args):
    objective = NeuCLIP(embed_dim=EMBED_DIM, num_prototypes=512, restart_every=16, inner_steps=3, network_lr=0.01)
    if args.resume:  # the trainer has replaced "latest" by the path of a checkpoint: .../checkpoints/epoch_3.pt
        objective.load_state_dict(torch.load(objective_file(Path(args.resume)), weights_only=True))
    return objective


def objective_file(checkpoint: Path) -> Path:
    # In a folder of its own: among the checkpoints, `--resume latest` would take it for a checkpoint.
    return checkpoint.parents[1] / "objective" / checkpoint.name


def train_one_epoch(model, data, loss, epoch, optimizer, scaler, scheduler, dist_model, args, tb_writer=None):
    OPEN_CLIPS_EPOCH(model, data, loss, epoch, optimizer, scaler, scheduler, dist_model, args, tb_writer=tb_writer)
    figures = (f"{name} {loss.metrics[name]:.5f}" for name in ("accuracy", "calibration"))
    logging.info(" ".join([f"epoch {epoch + 1}", *figures]))
    state = loss.state_dict()  # on every rank, because each holds a part of the state
    if trainer.is_master(args):
        file = objective_file(Path(args.checkpoint_path) / f"epoch_{epoch + 1}.pt")
        file.parent.mkdir(exist_ok=True)
        torch.save(state, file)


# The trainer has no option for another loss and does not save a loss's state. Replacing these two functions adds both.
trainer.create_loss = create_loss
OPEN_CLIPS_EPOCH, trainer.train_one_epoch = trainer.train_one_epoch, train_one_epoch


def write_data() -> None:
    """Write the files that the flags name: images, captions, and the model's configuration."""
    (FOLDER / "images").mkdir(parents=True, exist_ok=True)
    files = [FOLDER / "images" / f"{number}.png" for number in range(SIZE)]
    for number, file in enumerate(files):
        Image.fromarray((draw(number) * 255).byte().permute(1, 2, 0).numpy()).save(file)
    with (FOLDER / "shapes.csv").open("w", newline="") as table:
        rows = ((file, caption(number)) for number, file in enumerate(files))
        csv.writer(table, delimiter="\t").writerows([("filepath", "title"), *rows])
    (FOLDER / "tiny-shapes.json").write_text(json.dumps(MODEL))
    open_clip.add_model_config(FOLDER / "tiny-shapes.json")


if __name__ == "__main__":
    write_data()
    trainer.main(FLAGS.split() + sys.argv[1:])
