"""CLIP: the batch is its own normalizer."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from neuclip.objectives.contrast import mean_normalizer_ratio
from neuclip.objectives.formulas import gradient_only
from neuclip.objectives.objective import Objective
from neuclip.objectives.pairs import Pairs, batch_log_normalizers
from neuclip.settings.objectives import CLIPSettings


class CLIP(Objective):
    """Softmax cross-entropy over the global batch, both ways: open_clip's `ClipLoss`, with its right gradient on any
    number of ranks. With `form="minibatch"` the robust loss of Eq. 1 with the batch in place of the data set: what
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
        self.settings = CLIPSettings.from_arguments(locals())

    def loss(self, pairs: Pairs, tau: Tensor) -> Tensor:
        self.record_accuracy(pairs)
        self.record(calibration=None)  # the batch cannot tell how far it is from the data set
        return self._robust_loss(pairs, tau) if self.settings.form == "minibatch" else self._cross_entropy(pairs, tau)

    def _robust_loss(self, pairs: Pairs, tau: Tensor) -> Tensor:
        """Eq. 1: tau * (mean log(eps + g) of both sides + 2 rho)."""
        image, text = batch_log_normalizers(pairs, tau, self.settings.eps)
        ratio = mean_normalizer_ratio(pairs, tau, (image, text))
        return tau * (image.mean() + text.mean() + 2 * self.settings.rho) + tau.detach() * gradient_only(ratio)

    def _cross_entropy(self, pairs: Pairs, tau: Tensor) -> Tensor:
        """With the positive in the denominator it is log(1 + N g), N the number of negatives: log(1/N + g) + log N,
        the mini-batch form at eps = 1 / N without the factor tau."""
        log_count = pairs.num_negatives.log()
        log_g = batch_log_normalizers(pairs, tau, 0.0)
        image, text = (torch.logaddexp(side, -log_count) for side in log_g)
        self.record_weight_deviation(log_g, (image, text))
        ratio = mean_normalizer_ratio(pairs, tau, (image, text))
        return (image + text).mean() / 2 + log_count.mean() + gradient_only(ratio) / 2

    def estimates(self, pairs: Pairs, tau: Tensor, eps: float | None = None) -> tuple[Tensor, Tensor]:
        return batch_log_normalizers(pairs, tau, self.settings.eps if eps is None else eps)
