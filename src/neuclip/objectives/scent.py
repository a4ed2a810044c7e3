"""SCENT (arXiv 2602.02877): FastCLIP's table, where the weight of a visit is computed for each entry."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from neuclip.objectives.objective import objective
from neuclip.objectives.pairs import Pairs
from neuclip.objectives.table import TableObjective
from neuclip.settings.objectives import SCENTSettings
from neuclip.settings.options import option


@objective
class SCENT(TableObjective, SCENTSettings):
    """u_i <- (1 - gamma_i) u_i + gamma_i (eps + g_i) at each visit of sample i, per side, where
    gamma_i = alpha u_i / (1 + alpha u_i): a large normalizer follows the batch, a small one keeps its average.

    >>> objective = SCENT(dataset_size=3_000_000)
    >>> loss = objective(image_features, text_features, logit_scale, sample_ids=ids)        # doctest: +SKIP

    Loss and gradients are those of FastCLIP-v3. With alpha to infinity it is the mini-batch form, with alpha to 0 it
    keeps the value of the first visit.
    """

    dataset_size: int = option(help="number of samples; `sample_ids` are 0..dataset_size-1", at_least=1)

    def renew(self, log_u: Tensor, target: Tensor) -> Tensor:  # (2, B), (2, B) -> (2, B)
        """The step of proximal mirror descent on exp(target - nu) + nu, from nu = log u:

            argmin over nu of  exp(target - nu) + nu + D(nu, log_u) / alpha,   D the Bregman distance of exp(-nu)

        The closed form is the moving average above, with gamma = sigmoid(log_alpha + log_u).
        """
        x = self.log_alpha + log_u
        self.record(gamma=x.sigmoid().nanmean())
        # 1 - gamma is sigmoid(-x). Computed as 1 - gamma it would be 0 in float32 from x = 17 on, and log_u be lost.
        return torch.logaddexp(F.logsigmoid(-x) + log_u, F.logsigmoid(x) + target)

    def inner_tau(self, pairs: Pairs, tau: Tensor, stored: Tensor) -> Tensor:
        return tau if self.temperature_gradient == "paper" else 2 * tau - tau.detach()  # has twice the gradient
