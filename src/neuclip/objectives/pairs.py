"""The door of every objective: features are checked, gathered over processes and cast, once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from neuclip.distributed import gather_rows, gather_values, rank
from neuclip.objectives.formulas.normalizer import log_normalizer


@dataclass(frozen=True)
class Pairs:
    """This process's anchors against the candidates of the whole global batch, in float32 or wider."""

    image: Tensor  # (b, d)
    text: Tensor  # (b, d)
    all_image: Tensor  # (B, d)
    all_text: Tensor  # (B, d)
    own: Tensor  # (b,) the column of each anchor's own partner among the candidates
    excluded: Tensor  # (b, B) bool: the own partner, and the same sample drawn twice into one batch

    @property
    def positive(self) -> Tensor:  # (b,)
        return (self.image * self.text).sum(dim=1)

    def similarities(self) -> tuple[Tensor, Tensor]:  # (b, B), (b, B)
        """Images against all texts, texts against all images."""
        return self.image @ self.all_text.T, self.text @ self.all_image.T


def gather_pairs(image: Tensor, text: Tensor, *, dtype: torch.dtype, sample_ids: Tensor | None) -> Pairs:
    """Features travel as they come (bf16 stays bf16) and are computed with in `dtype`."""
    own = rank() * len(image) + torch.arange(len(image), device=image.device)
    all_image, all_text = gather_rows(image).to(dtype), gather_rows(text).to(dtype)
    if sample_ids is None:
        columns = torch.arange(len(all_image), device=image.device)
        excluded = columns[None, :] == own[:, None]
    else:
        sample_ids = sample_ids.to(image.device)
        excluded = sample_ids[:, None] == gather_values(sample_ids)[None, :]
    return Pairs(image.to(dtype), text.to(dtype), all_image, all_text, own, excluded)


def batch_log_normalizers(
    by_image: Tensor, by_text: Tensor, pairs: Pairs, *, tau: Tensor, eps: float
) -> tuple[Tensor, Tensor]:  # (b, B), (b, B) -> (b,), (b,)
    """Eq. 9 with the global batch in place of the data set, image side and text side."""
    return (
        log_normalizer(by_image, pairs.positive, tau=tau, eps=eps, excluded=pairs.excluded),
        log_normalizer(by_text, pairs.positive, tau=tau, eps=eps, excluded=pairs.excluded),
    )


def check_features(image: Tensor, text: Tensor, embed_dim: int | None = None) -> None:
    """Shapes at each call: a wrong shape would broadcast into a wrong loss."""
    if image.ndim != 2 or image.shape != text.shape:
        raise ValueError(
            f"image and text features have shapes {tuple(image.shape)} and {tuple(text.shape)}; "
            "give two matrices of one shape, (batch, embed_dim), row i of both being pair i"
        )
    if embed_dim is not None and image.shape[1] != embed_dim:
        raise ValueError(f"features have {image.shape[1]} columns; this objective was made with embed_dim={embed_dim}")


def check_unit_rows(image: Tensor, text: Tensor) -> None:
    """Lengths, at the first call only: it makes a device wait, and who forgets to normalise does so from the start."""
    for name, features in (("image", image), ("text", text)):
        off = (features.detach().float().norm(dim=1) - 1).abs().max().item()
        if not off < 0.02:  # bf16 rows of unit length are off by up to 0.004
            raise ValueError(
                f"{name} features are not unit rows (length off by {off:.3g}); "
                "pass them through torch.nn.functional.normalize(features, dim=1) first"
            )


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Autocast would turn the product of two float32 matrices into bf16: an error of 0.2 in a logit at tau = 0.01."""
    with torch.autocast(device_type=device.type, enabled=False):
        yield
