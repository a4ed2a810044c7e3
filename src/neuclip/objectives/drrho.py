"""DRRho-CLIP (arXiv 2505.06699): FastCLIP on similarities minus those of a frozen reference model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, replace
from typing import Any

import torch
from torch import Tensor

from neuclip.objectives.fastclip import FastCLIP
from neuclip.objectives.objective import NoEstimate, objective
from neuclip.objectives.pairs import Pairs, gather_sides
from neuclip.objectives.state import refuse_unless
from neuclip.settings.objectives import DRRhoSettings
from neuclip.settings.options import option

LARGEST_DEVIATION = 0.02  # of the length of a reference row from 1; rows in bf16 are off by up to 0.004


@objective
class DRRho(FastCLIP, DRRhoSettings):
    """FastCLIP, where g_i is the mean over j of exp(((s_ij - s_ii) - (r_ij - r_ii)) / tau) with the reference's
    similarities r_ij: a negative weighs more if the model separates it less well than the reference does. tau is
    that of the trained model. By default there is no memory (gamma 1) and tau is constant; the authors use 0.01.

    >>> objective = DRRho(dataset_size, reference=(reference_image_features, reference_text_features))  # doctest: +SKIP
    >>> loss = objective(image_features, text_features, logit_scale, sample_ids=ids)                    # doctest: +SKIP
    """

    _: KW_ONLY
    reference: Any = option(
        "", "the frozen model's unit features by sample id: two tensors (n, width), or a function (b,) -> (2, b, width)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        # A string is a model's name: the trainer (`store_features`) then sets `look_up`.
        self.look_up: Callable[[Tensor], Tensor] | None = self.reference if callable(self.reference) else None
        if not isinstance(self.reference, str) and not callable(self.reference):
            self.look_up = FeaturesById(*self.reference, size=self.dataset_size)

    def loss(self, pairs: Pairs, tau: Tensor) -> Tensor:
        loss = super().loss(self.subtract_reference(pairs), tau)
        self.record(accuracy=accuracy(pairs))  # by the model's similarities, without subtracting the reference's
        return loss

    def subtract_reference(self, pairs: Pairs) -> Pairs:
        """Widen the features: s_ij - r_ij = [x_i, r_i] . [y_j, -r_j], where r_i, r_j are the reference's rows."""
        if self.look_up is None:
            raise ValueError(
                "DRRho has no reference features; give reference=(image_features, text_features), "
                "unit rows of every sample by its id"
            )
        ids = self._ids(pairs)
        self.table.check(ids)
        with torch.no_grad():
            rows = self.look_up(ids[pairs.local]).to(pairs.features.device)  # (2, b, width)
            all_rows = gather_sides(rows).to(pairs.features.dtype)
            off = (torch.linalg.vector_norm(all_rows, dim=2) - 1).abs()
            refuse_unless(
                (off < LARGEST_DEVIATION).all(),  # false for zeros and NaN
                "a sample of the batch has no reference features, or they do not have length 1; "
                "compute them for every sample id, and normalize them",
            )
            all_rows = torch.stack([all_rows[0], -all_rows[1]]) * pairs.sound[:, None]
        features = torch.cat([pairs.features, all_rows[:, pairs.local]], dim=2)
        return replace(
            pairs,
            features=features,
            positive=torch.linalg.vecdot(*features),
            all_features=torch.cat([pairs.all_features, all_rows], dim=2),
        )

    def estimates(self, pairs: Pairs, tau: Tensor, eps: float) -> Tensor:
        raise NoEstimate("DRRho's normalizers are for similarities minus the reference's; it has no others")


class FeaturesById:
    """Reference features from two tensors (n, width), on any device or mapped from a file, by sample id."""

    def __init__(self, image: Tensor, text: Tensor, *, size: int):
        if image.ndim != 2 or image.shape != text.shape or len(image) != size:
            raise ValueError(
                f"reference features have shapes {tuple(image.shape)} and {tuple(text.shape)}; "
                f"give two matrices of the same shape ({size}, width), where row i of both is sample i"
            )
        self.sides = image, text

    def __call__(self, ids: Tensor) -> Tensor:  # (b,) -> (2, b, width)
        return torch.stack([rows[ids.to(rows.device)] for rows in self.sides])


@torch.no_grad()
def accuracy(pairs: Pairs) -> Tensor:
    """The share of images whose own text is the nearest in the batch."""
    nearest = torch.cat([similarity[0].amax(dim=1) for _, similarity in pairs.strips(sides=1)])
    pairs.forget()
    return (nearest <= pairs.positive).to(nearest.dtype).mean()
