"""DRRho-CLIP (arXiv 2505.06699): FastCLIP, where the similarities of a frozen reference model are subtracted."""

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

LARGEST_DEVIATION = 0.02  # of a reference row's length from 1: rows in bf16 are off by up to 0.004


@objective
class DRRho(FastCLIP, DRRhoSettings):
    """With the reference's similarities r_ij, g_i is the mean over j of exp(((s_ij - s_ii) - (r_ij - r_ii)) / tau): an
    anchor weighs what it has not yet learnt that the reference knows. tau is the model's own. All else is FastCLIP, by
    default without memory (gamma 1) and at a constant temperature; the authors' is 0.01.

    >>> objective = DRRho(dataset_size, reference=(reference_image_features, reference_text_features))  # doctest: +SKIP
    >>> loss = objective(image_features, text_features, logit_scale, sample_ids=ids)                    # doctest: +SKIP
    """

    _: KW_ONLY
    reference: Any = option(
        "", "the frozen model's unit features by sample id: two tensors (n, width), or a function (b,) -> (2, b, width)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        # The name of a model is the trainer's: it sets `look_up` when the features are there.
        self.look_up: Callable[[Tensor], Tensor] | None = self.reference if callable(self.reference) else None
        if not isinstance(self.reference, str) and not callable(self.reference):
            self.look_up = FeaturesById(*self.reference, size=self.dataset_size)

    def loss(self, pairs: Pairs, tau: Tensor) -> Tensor:
        loss = super().loss(self.subtract_reference(pairs), tau)
        self.record(accuracy=accuracy(pairs))  # of the model, not of what it has beyond the reference
        return loss

    def subtract_reference(self, pairs: Pairs) -> Pairs:
        """Wider features: s_ij - r_ij = [x_i, r_i] . [y_j, -r_j], with r_i, r_j the reference's rows."""
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
                (off < LARGEST_DEVIATION).all(),  # zeros and NaN are not
                "a sample of the batch has no reference features, or they are no unit row; "
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
        raise NoEstimate("DRRho: each normalizer is of similarities minus the reference's, it estimates no other")


class FeaturesById:
    """Two tensors (n, width) on whatever device they are, or mapped from a file."""

    def __init__(self, image: Tensor, text: Tensor, *, size: int):
        if image.ndim != 2 or image.shape != text.shape or len(image) != size:
            raise ValueError(
                f"reference features have shapes {tuple(image.shape)} and {tuple(text.shape)}; "
                f"give two matrices of one shape, ({size}, width), row i of both being sample i"
            )
        self.sides = image, text

    def __call__(self, ids: Tensor) -> Tensor:  # (b,) -> (2, b, width)
        return torch.stack([rows[ids.to(rows.device)] for rows in self.sides])


@torch.no_grad()
def accuracy(pairs: Pairs) -> Tensor:
    """The share of images whose own text is the nearest of the batch."""
    nearest = torch.cat([similarity[0].amax(dim=1) for _, similarity in pairs.strips(sides=1)])
    pairs.forget()
    return (nearest <= pairs.positive).to(nearest.dtype).mean()
