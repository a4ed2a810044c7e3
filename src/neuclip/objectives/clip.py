"""CLIP: the batch is its own normalizer."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from neuclip.objectives.contrast import contrast
from neuclip.objectives.formulas import add_eps, robust_loss
from neuclip.objectives.objective import Objective, objective
from neuclip.objectives.pairs import Pairs
from neuclip.settings.objectives import CLIPSettings


@objective
class CLIP(Objective, CLIPSettings):
    """Softmax cross-entropy over the global batch, in both directions: open_clip's `ClipLoss`, with the exact gradient
    on any number of ranks. `form="minibatch"`: the robust loss of Eq. 1 with the batch in place of the data set, which
    is NeuCLIP's objective without estimates. At eps = 1/(B-1) it is 2 tau times the cross-entropy, up to a constant.

    >>> objective = CLIP()
    >>> loss = objective(image_features, text_features, logit_scale)        # doctest: +SKIP
    """

    def loss(self, pairs: Pairs, tau: Tensor) -> Tensor:
        batch = contrast(pairs, tau)
        self.record(accuracy=batch.accuracy, calibration=None)  # CLIP predicts no normalizers of the data set
        if self.form == "minibatch":
            return robust_loss(add_eps(batch.log_g, self.eps), tau, self.rho)
        # The positive is in the denominator: cross-entropy is log(1 + N g), where N is the number of negatives.
        return -F.logsigmoid(-(batch.log_g + pairs.negatives.log())).mean()

    def estimates(self, pairs: Pairs, tau: Tensor, eps: float) -> Tensor:
        return add_eps(contrast(pairs, tau).log_g, eps)
