"""What every objective sees of a batch: features checked, gathered over ranks and cast, once."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from neuclip.distributed.collectives import all_gather_int, gather_values, rank
from neuclip.objectives.formulas import log_normalizer

Both = tuple[Tensor, Tensor]  # image side, text side
LIKELY_LOGARITHM = 5.0  # a logit_scale below this: temperatures above 0.2 are rare, logarithms above 5 too


@dataclass(frozen=True)
class Pairs:
    """This rank's anchors against the candidates of the whole global batch, in float32 or wider.

    Candidates are values: no gradient travels back through the gather. The gradient of a local row as a candidate of
    other ranks' anchors is computed here, from their numbers (`objectives/contrast.py`).
    """

    image: Tensor  # (b, d) with graph
    text: Tensor  # (b, d) with graph
    positive: Tensor  # (b,) with graph: the similarity of each pair
    all_image: Tensor  # (B, d)
    all_text: Tensor  # (B, d)
    positive_column: Tensor  # (b,) the column of each anchor's own partner among the candidates
    excluded: Tensor  # (b, B) bool, symmetric: own partner, same sample, with mask_duplicates same caption
    sample_ids: Tensor | None = None  # (b,)
    all_sample_ids: Tensor | None = None  # (B,)
    all_caption_ids: Tensor | None = None  # (B,) only where duplicates are masked
    logit_bias: Tensor | None = None  # scalar, with graph; only SigLIP looks at it
    hard_negatives: Tensor | None = None  # (b, k, d) with graph, each anchor's own; only TextPairs looks at them

    @cached_property
    def num_negatives(self) -> Tensor:  # (b,)
        """How many candidates each anchor's normalizer is a mean over; 1 where there are none, where g = 0."""
        return (~self.excluded).sum(dim=1).clamp(min=1).to(self.all_image.dtype)

    @cached_property
    def similarities(self) -> Both:  # (b, B), (b, B)
        """Images against all texts, texts against all images: values."""
        return self.image.detach() @ self.all_text.T, self.text.detach() @ self.all_image.T

    @cached_property
    def all_positive(self) -> Tensor:  # (B,)
        """Every rank's `positive`; collective at its first use."""
        return gather_values(self.positive)

    @property
    def local_rows(self) -> slice:
        """This rank's rows of the global batch."""
        first = rank() * len(self.image)
        return slice(first, first + len(self.image))


def gather_pairs(
    image: Tensor,
    text: Tensor,
    *,
    dtype: torch.dtype,
    sample_ids: Tensor | None = None,
    caption_ids: Tensor | None = None,
    logit_bias: Tensor | None = None,
) -> Pairs:
    """Features are sent as they come (bf16 stays bf16) and cast to `dtype` afterwards.

    Anchors and candidates with equal `sample_ids` or equal `caption_ids` are no negatives of each other.
    """
    _check_equal_batches(len(image))
    positive_column = rank() * len(image) + torch.arange(len(image), device=image.device)
    all_image, all_text = gather_values(torch.stack([image, text], dim=1)).to(dtype).unbind(dim=1)
    columns = torch.arange(len(all_image), device=image.device)
    excluded = columns[None, :] == positive_column[:, None]
    all_ids, all_captions = _gather_keys(sample_ids, image.device), _gather_keys(caption_ids, image.device)
    for keys in (all_ids, all_captions):
        if keys is not None:
            excluded = excluded | (keys[positive_column][:, None] == keys[None, :])
    image, text = image.to(dtype), text.to(dtype)
    return Pairs(
        image,
        text,
        (image * text).sum(dim=1),
        all_image.contiguous(),
        all_text.contiguous(),
        positive_column,
        excluded,
        sample_ids=None if all_ids is None else all_ids[positive_column],
        all_sample_ids=all_ids,
        all_caption_ids=all_captions,
        logit_bias=None if logit_bias is None else logit_bias.to(dtype),
    )


def batch_log_normalizers(pairs: Pairs, tau: Tensor | Both, eps: float) -> Both:  # -> (b,), (b,)
    """Eq. 9 with the global batch in place of the data set, image side and text side: values.

    `tau` is a scalar, or one temperature per anchor and side.
    """
    taus = tau if isinstance(tau, tuple) else (tau, tau)
    with torch.no_grad():
        image, text = (
            log_normalizer(similarity, pairs.positive, tau=t, eps=eps, excluded=pairs.excluded)
            for similarity, t in zip(pairs.similarities, taus, strict=True)
        )
    return image, text


def _gather_keys(keys: Tensor | None, device: torch.device) -> Tensor | None:
    return None if keys is None else gather_values(keys.to(device))


def _check_equal_batches(size: int) -> None:
    sizes = all_gather_int(size)
    if len(set(sizes)) > 1:
        raise ValueError(
            f"ranks have different batch sizes ({', '.join(map(str, sizes))}); "
            "give every rank as many pairs, for example with drop_last=True"
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


def check_keys(keys: Tensor | None, image: Tensor, name: str) -> None:
    if keys is not None and (keys.shape != image.shape[:1] or keys.is_floating_point()):
        raise ValueError(
            f"{name} have shape {tuple(keys.shape)} and type {keys.dtype}; give {len(image)} integers, one per pair"
        )


def check_unit_rows(image: Tensor, text: Tensor) -> None:
    """Lengths, at the first call only: the check waits for the device, and a missing normalisation shows at once."""
    for name, features in (("image", image), ("text", text)):
        off = (features.detach().float().norm(dim=1) - 1).abs().max().item()
        if not off < 0.02:  # bf16 rows of unit length are off by up to 0.004
            raise ValueError(
                f"{name} features are not unit rows (length off by {off:.3g}); "
                "pass them through torch.nn.functional.normalize(features, dim=1) first"
            )


def warn_of_logarithm(logit_scale: Tensor) -> None:
    """At the first call only, for the same reason. open_clip's parameter is ln(1/tau), 2.7 at first and 4.6 at most;
    its forward returns 1/tau, 14 at first."""
    value = torch.as_tensor(logit_scale).detach().item()
    if value < LIKELY_LOGARITHM:
        warnings.warn(
            f"logit_scale is {value:.3g}, a temperature of {1 / value if value else math.inf:.3g}; "
            "if it is the logarithm, pass logit_scale.exp()",
            stacklevel=6,  # the line that called the objective
        )


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Autocast would turn the product of two float32 matrices into bf16: an error of 0.2 in a logit at tau = 0.01."""
    with torch.autocast(device_type=device.type, enabled=False):
        yield
