"""NeuCLIP for queries and documents: one direction or both, hard negatives, a temperature that does not learn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from neuclip.objectives.contrast import mean_normalizer_ratio
from neuclip.objectives.formulas import LARGEST_EXPONENT, capped_exponent, gradient_only
from neuclip.objectives.neuclip import NeuCLIP
from neuclip.objectives.pairs import Both, Pairs, full_precision

DIRECTIONS = ("query_to_doc", "doc_to_query")  # the anchors' side: queries stand in for images, documents for texts


class TextPairs(NeuCLIP):
    """Eq. 12 divided by tau and by the number of directions, at rho = 0: mean(exp(log z - alpha) + alpha) - 1.

    Where alpha is right this is mean log(eps + g), cross-entropy over the data set less the log of its size: learning
    rates and gradient clipping that suit cross-entropy suit it too.

    With k hard negatives a query's normalizer is a mean over the N other documents of the batch and its own k, as in a
    softmax over both: z = (N (eps + g) + h) / (N + k), h the sum of exp((s - s_ii) / tau) over its own. The batch and
    the prototypes speak of g alone, of documents in general; h is known exactly and enters the prediction as it is.

    Args:
        directions: "query_to_doc", and "doc_to_query" if documents are anchors too. Hard negatives concern the first.
        settings: those of `NeuCLIP`; `rho` has no effect, as the temperature is given.
    """

    def __init__(self, embed_dim: int, directions: Sequence[str] = DIRECTIONS, **settings: Any) -> None:
        super().__init__(embed_dim, **settings)
        if not {DIRECTIONS[0]} <= set(directions) <= set(DIRECTIONS):
            raise ValueError(f"directions are {tuple(directions)}; give {DIRECTIONS[:1]} or {DIRECTIONS}")
        self.sides = range(len(set(directions)))

    def forward(  # type: ignore[override]  # another door to the same room: no ids, but hard negatives
        self, query: Tensor, document: Tensor, logit_scale: Tensor, hard_negatives: Tensor | None = None
    ) -> Tensor:  # (b, d), (b, d), (), (b, k, d) -> ()
        """The loss of this rank's pairs, all of unit rows; the other ranks' pairs are candidates too."""
        self._recorded = {}
        with full_precision(query.device):
            pairs = self._gather(query, document, logit_scale, sample_ids=None)
            if hard_negatives is not None:
                pairs = replace(pairs, hard_negatives=hard_negatives.to(pairs.image.dtype))
            return self.loss(pairs, self._tau(logit_scale, pairs))

    def _robust_loss(self, pairs: Pairs, log_normalizer: Both, tau: Tensor) -> Tensor:
        """Gradient as in `NeuCLIP`: that of mean z / nu, nu = exp(alpha) held constant, and mean (1 - r) of alpha's."""
        alpha = self._alpha(pairs, tau, log_normalizer)
        self._record_normalizers(log_normalizer, alpha)
        value, gradient_terms = tau.new_zeros(()), tau.new_zeros(())
        held_log_nu = [torch.full_like(side, math.inf) for side in log_normalizer]  # of a side that does not count
        for side in self.sides:
            log_h, k = hard_negatives_of(pairs, tau) if side == 0 else no_hard_negatives(pairs)
            log_count, log_total = pairs.num_negatives.log(), (pairs.num_negatives + k).log()
            log_z, a = (torch.logaddexp(x + log_count, log_h) - log_total for x in (log_normalizer[side], alpha[side]))
            log_z, held = log_z.detach(), a.detach()
            ratio = torch.exp(capped_exponent(log_z, held))
            held = torch.maximum(held, log_z - LARGEST_EXPONENT[tau.dtype])  # capped like the ratio
            value = value + (ratio + a.detach()).mean() - 1
            gradient_terms = gradient_terms + ((1 - ratio) * a).mean() + torch.exp(log_h - log_total - held).mean()
            held_log_nu[side] = held + log_total - log_count  # g's share of z / nu is N / (N + k) of g / nu
        gradient_terms = gradient_terms + mean_normalizer_ratio(pairs, tau, (held_log_nu[0], held_log_nu[1]))
        return (value + gradient_only(gradient_terms)) / len(self.sides)


def hard_negatives_of(pairs: Pairs, tau: Tensor) -> tuple[Tensor, int]:  # (b,) with graph, k
    """log h: the log of each query's sum of exp((s - s_ii) / tau) over its own hard negatives; and their number."""
    if pairs.hard_negatives is None:
        return no_hard_negatives(pairs)
    similarity = torch.einsum("bd,bkd->bk", pairs.image, pairs.hard_negatives)
    return torch.logsumexp((similarity - pairs.positive[:, None]) / tau, dim=1), similarity.shape[1]


def no_hard_negatives(pairs: Pairs) -> tuple[Tensor, int]:
    return torch.full_like(pairs.positive, -math.inf).detach(), 0
