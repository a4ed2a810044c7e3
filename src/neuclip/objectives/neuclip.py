"""NeuCLIP: a small network, trained in turns with the encoders, predicts log-normalizers over the whole data set."""

from __future__ import annotations

import torch
from torch import Tensor

from neuclip.objectives.contrast import contrast
from neuclip.objectives.formulas import add_eps, conjugate, unified_objective
from neuclip.objectives.mlp import MLPNetwork
from neuclip.objectives.objective import NoEstimate, Objective, objective
from neuclip.objectives.pairs import Pairs
from neuclip.objectives.prototypes import Prototypes
from neuclip.settings.objectives import NeuCLIPSettings
from neuclip.settings.options import option


@objective
class NeuCLIP(Objective, NeuCLIPSettings):
    """Algorithm 1 of the paper, with its defaults; `rho` depends on the data (6.5 on CC3M, 8.5 on CC12M, 11 on DFN).

    >>> objective = NeuCLIP(embed_dim=512)
    >>> loss = objective(image_features, text_features, model.logit_scale.exp())        # doctest: +SKIP
    >>> loss.backward()                                                                 # doctest: +SKIP
    """

    embed_dim: int = option(help="width d of the features", at_least=1)

    def loss(self, pairs: Pairs, tau: Tensor) -> Tensor:
        """Algorithm 1 from line 3 to the loss of line 11. The caller takes its gradient and updates the encoders."""
        batch = contrast(pairs, tau)
        log_normalizer = add_eps(batch.log_g, self.eps)
        with torch.no_grad():  # for the metrics: the prediction before the network has seen this batch
            unseen = self.predict(pairs, tau) if self.measures and self.normalizer.ready else None

        if self.training:
            self.normalizer.restart(pairs)  # lines 3 and 4
            if self.update == "alternating":
                self.learn(pairs, log_normalizer, tau, steps=self.inner_steps)  # lines 6 to 8
        alpha = self.predict(pairs, tau) if self.normalizer.ready else log_normalizer.detach()  # line 10
        loss = unified_objective(log_normalizer, alpha, tau, self.rho)  # line 11
        if self.training and self.update == "simultaneous":
            self.learn(pairs, log_normalizer, tau, steps=1)  # Algorithm 3

        self.record(accuracy=batch.accuracy)
        self.record_normalizers(log_normalizer, unseen, alpha)
        return loss

    def learn(self, pairs: Pairs, log_normalizer: Tensor, tau: Tensor, *, steps: int) -> None:
        """Take `steps` updates of the network on Eq. 12 or, as an ablation (`fit`), on the squared difference to the
        batch's log-normalizers."""

        def loss(target: Tensor, log_g: Tensor) -> Tensor:  # of each anchor, (2, c)
            alpha = add_eps(log_g, self.eps)
            return tau * conjugate(target, alpha) if self.fit == "unified" else (alpha - target).square() / 2

        tau = tau.detach()
        self.normalizer.learn(pairs, log_normalizer.detach(), loss, tau, steps=steps)

    def predict(self, pairs: Pairs, tau: Tensor) -> Tensor:  # (2, b)
        """alpha of this rank's anchors, Eq. 10 and 11."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.alpha_gradient == "full"):
            return add_eps(self.normalizer.log_g(pairs, tau), self.eps)

    def estimates(self, pairs: Pairs, tau: Tensor, eps: float) -> Tensor:
        if not self.normalizer.ready:
            raise NoEstimate("NeuCLIP has no prototypes yet: call it once in train mode, or load its state")
        return add_eps(self.normalizer.log_g(pairs, tau), eps)

    def __post_init__(self) -> None:
        super().__post_init__()
        alternating = self.update == "alternating"
        if self.network == "mlp":
            self.normalizer: Prototypes | MLPNetwork = MLPNetwork(self.embed_dim, rate=self.network_lr or 1e-3)
        else:
            self.normalizer = Prototypes(
                self.num_prototypes,
                self.embed_dim,
                restart_every=self.restart_every if alternating else 0,
                rolling=self.restart == "rolling",
                masks=(self.mask_own_positive or self.mask_duplicates, self.mask_duplicates),
                rate=self.network_lr or (1.0 if alternating else 1e-3),
                adam=not alternating,
            )
