"""512 images of coloured shapes with captions: pairs that tiny towers learn in seconds, on any machine.

Sample 42 is an image of 32 x 32 pixels, the caption "a blue square in row three column three" and the number 42.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

SIDE = 32
COLOURS = {
    "red": (1, 0, 0),
    "green": (0, 1, 0),
    "blue": (0, 0, 1),
    "yellow": (1, 1, 0),
    "purple": (1, 0, 1),
    "cyan": (0, 1, 1),
    "white": (1, 1, 1),
    "grey": (0.4, 0.4, 0.4),
}
SHAPES = ("square", "disc", "cross", "ring")
NUMBERS = ("one", "two", "three", "four")
SIZE = len(COLOURS) * len(SHAPES) * len(NUMBERS) ** 2
# The end token has the largest number, because Hugging Face's CLIP reads the text feature at the largest token.
VOCABULARY = ("a", "in", "row", "column", *COLOURS, *SHAPES, *NUMBERS, "<end>")
END = len(VOCABULARY) - 1
CONTEXT_LENGTH = 9


def parts(number: int) -> tuple[str, str, int, int]:
    """The colour, shape, row and column of a sample. Every combination occurs once."""
    place, rest = number % 16, number // 16
    return list(COLOURS)[rest % 8], SHAPES[rest // 8], place // 4, place % 4


def caption(number: int) -> str:
    colour, shape, row, column = parts(number)
    return f"a {colour} {shape} in row {NUMBERS[row]} column {NUMBERS[column]}"


def tokens(text: str) -> Tensor:  # (9,)
    return torch.tensor([*(VOCABULARY.index(word) for word in text.split()), END])


def draw(number: int) -> Tensor:  # (3, 32, 32)
    """The shape in its cell of a 4 x 4 grid, on a noisy background that is the same each time."""
    colour, shape, row, column = parts(number)
    y, x = torch.meshgrid(torch.arange(8) - 3.5, torch.arange(8) - 3.5, indexing="ij")
    radius = (x**2 + y**2).sqrt()
    cell = {
        "square": torch.ones(8, 8, dtype=torch.bool),
        "disc": radius < 3.6,
        "cross": (x.abs() < 1) | (y.abs() < 1),
        "ring": (radius > 2) & (radius < 4),
    }[shape]
    image = torch.rand(3, SIDE, SIDE, generator=torch.Generator().manual_seed(number)) * 0.2
    window = image[:, row * 8 :, column * 8 :][:, :8, :8]  # a view: writing to it changes the image
    window[:, cell] = torch.tensor(COLOURS[colour], dtype=torch.float32)[:, None]
    return image


class Shapes(Dataset):
    """Items have the names that Hugging Face's CLIP uses; `sample_ids` is the sample's number, the same in every
    epoch."""

    def __init__(self) -> None:
        self.images = torch.stack([draw(number) for number in range(SIZE)])
        self.tokens = torch.stack([tokens(caption(number)) for number in range(SIZE)])

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {
            "pixel_values": self.images[number],
            "input_ids": self.tokens[number],
            "sample_ids": torch.as_tensor(number),
        }
