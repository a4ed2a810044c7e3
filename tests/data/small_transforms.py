"""Transforms and a tokenizer that can be pickled, so that workers of every kind can be given them."""

from __future__ import annotations

import multiprocessing
import random

import numpy as np
import torch
from PIL import Image


def plain(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image.convert("RGB").resize((4, 4)))).permute(2, 0, 1)


def noisy(image: Image.Image) -> torch.Tensor:
    """Draws from both generators that transforms use."""
    return plain(image).float() + torch.rand(1) + random.random()


def spawned(image: Image.Image) -> torch.Tensor:
    """As `noisy`, but only in a process that began afresh: a fork would have its parent's modules and files."""
    assert type(multiprocessing.current_process()).__name__ == "SpawnProcess"
    return noisy(image)


def afresh(image: Image.Image) -> torch.Tensor:
    assert type(multiprocessing.current_process()).__name__ in ("SpawnProcess", "ForkServerProcess")
    return plain(image)


def failing(image: Image.Image) -> torch.Tensor:
    raise ZeroDivisionError("no width")


def tokenize(captions: list[str]) -> torch.Tensor:
    """The number that the caption ends with."""
    return torch.tensor([[int((caption.split() or ["-1"])[-1])] for caption in captions])
