"""CLIP: the batch is its own normalizer."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from neuclip.objectives.contrast import mean_normalizer_ratio
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
        mask_duplicates: pairs with an equal caption are no negatives of each other (`caption_ids`).
    """

    def __init__(
        self,
        *,
        form: Literal["openclip", "minibatch"] = CLIPSettings.form,
        rho: float = CLIPSettings.rho,
        eps: float = CLIPSettings.eps,
        mask_duplicates: bool = CLIPSettings.mask_duplicates,
    ) -> None:
        super().__init__(mask_duplicates=mask_duplicates)
        self.form, self.rho, self.eps = form, rho, eps

    def loss(self, pairs: Pairs, tau: Tensor) -> Tensor:
        self._note_accuracy(pairs)
        self._metrics.note(calibration=None)  # the batch cannot tell how far it is from the data set
        if self.form == "minibatch":
            image, text = batch_log_normalizers(pairs, tau, self.eps)
            ratio = mean_normalizer_ratio(pairs, tau, (image, text))
            return tau * (image.mean() + text.mean() + 2 * self.rho) + tau.detach() * (ratio - ratio.detach())
        # Cross-entropy with the positive in the denominator is log(1 + N g), N the number of others: the mini-batch
        # form at eps = 1 / N, without the factor tau.
        others = pairs.others.log()
        others_only = batch_log_normalizers(pairs, tau, 0.0)
        image, text = (torch.logaddexp(side, -others) for side in others_only)
        self._note_weights(others_only, (image, text))
        ratio = mean_normalizer_ratio(pairs, tau, (image, text))
        return (image + text).mean() / 2 + others.mean() + (ratio - ratio.detach()) / 2

    def estimates(self, pairs: Pairs, tau: Tensor) -> tuple[Tensor, Tensor]:
        return batch_log_normalizers(pairs, tau, self.eps)
