"""CLIP: the batch is its own normalizer."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from neuclip.objectives.objective import Objective
from neuclip.objectives.pairs import Pairs, batch_log_normalizers
from neuclip.settings.objectives import CLIPSettings


class CLIP(Objective):
    """Softmax cross-entropy over the global batch, both ways: open_clip's `ClipLoss`, with its right gradient on any
    number of processes. With `form="minibatch"` the robust loss of Eq. 1, the batch standing in for the data set: what
    NeuCLIP minimises, without any estimator.

    >>> objective = CLIP()
    >>> loss = objective(image_features, text_features, logit_scale)        # doctest: +SKIP

    Args:
        form: "openclip" or "minibatch". At eps = 1/(B-1) the second is 2 tau times the first, up to a constant.
        rho, eps: constants of the mini-batch form; eps is also that of `log_normalizers`.
    """

    def __init__(
        self,
        *,
        form: Literal["openclip", "minibatch"] = CLIPSettings.form,
        rho: float = CLIPSettings.rho,
        eps: float = CLIPSettings.eps,
    ) -> None:
        super().__init__()
        self.form, self.rho, self.eps = form, rho, eps

    def loss(self, pairs: Pairs, tau: Tensor) -> Tensor:
        by_image, by_text = pairs.similarities()
        self._note_accuracy(by_image, pairs)
        self._metrics.note(calibration=None)  # the batch cannot tell how far it is from the data set
        if self.form == "minibatch":
            image, text = batch_log_normalizers(by_image, by_text, pairs, tau=tau, eps=self.eps)
            return tau * (image.mean() + text.mean() + 2 * self.rho)
        # A sample drawn twice into one batch is no wrong answer for itself; its own column stays.
        twins = pairs.excluded.scatter(1, pairs.own[:, None], False)
        sides = [F.cross_entropy((s / tau).masked_fill(twins, -math.inf), pairs.own) for s in (by_image, by_text)]
        return torch.stack(sides).mean()

    def estimates(self, pairs: Pairs, tau: Tensor) -> tuple[Tensor, Tensor]:
        return batch_log_normalizers(*pairs.similarities(), pairs, tau=tau, eps=self.eps)
