"""SigLIP: for every image-text combination of the batch, a binary classifier decides if they belong together."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from neuclip.objectives.objective import Objective, objective
from neuclip.objectives.pairs import Pairs
from neuclip.settings.objectives import SigLIPSettings


@objective
class SigLIP(Objective, SigLIPSettings):
    """The logistic loss over all image-text combinations, divided by the batch size: open_clip's `SigLipLoss`.

    1/B sum_ij -log sigmoid(z_ij l_ij), logit l_ij = s_ij / tau + bias, z_ij = 1 for pairs and -1 otherwise.

    The bias is learned with the encoders and belongs to the model: build it with open_clip's `init_logit_bias=-10` and
    pass `model.logit_bias`.

    >>> objective = SigLIP()
    >>> loss = objective(image_features, text_features, logit_scale, logit_bias)        # doctest: +SKIP
    """

    def loss(self, pairs: Pairs, tau: Tensor) -> Tensor:
        """The loss of this rank's images and all texts. Over all ranks each combination counts once, and the mean over
        ranks is the loss of the global batch."""
        if pairs.logit_bias is None:
            raise ValueError(
                "SigLIP needs a bias: pass logit_bias=model.logit_bias of a model built with init_logit_bias=-10"
            )
        scale, bias = 1 / tau, pairs.logit_bias
        positive = scale * pairs.positive + bias
        negative, nearest = NegativeLoss.apply(pairs.features, scale, bias, pairs)
        self.record(
            accuracy=(nearest <= pairs.positive).float().mean(),
            calibration=None,  # no normalizer
            bias=bias,
            positive_logit=positive.mean(),
            negative_loss=negative,
        )
        return negative - F.logsigmoid(positive).mean()


class NegativeLoss(torch.autograd.Function):
    """1/b sum_ij log(1 + exp(l_ij)) over this rank's images i and their negatives j, in strips of rows.

    With p_ij = sigmoid(l_ij), its derivative by a logit: d/dx_i = scale/b sum_j p_ij y_j for an image, and
    d/dy_j = scale/b sum_i p_ij x_i for a text, over the images of all ranks; DDP divides by the number of ranks.
    """

    @staticmethod
    def forward(ctx: Any, features: Tensor, scale: Tensor, bias: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
        nearest, slopes = features.new_empty(features.shape[1]), torch.zeros_like(features)
        sums = features.new_zeros(3)  # the loss, and its derivatives by scale and by bias
        sides = 1 if features.shape[1] == pairs.batch else 2  # with one rank, side 0 has all combinations
        for rows, similarity in pairs.strips(sides):
            torch.amax(similarity[0], dim=1, out=nearest[rows])
            logits = torch.addcmul(bias, similarity, scale)
            sums[0] -= F.logsigmoid(-logits[0]).sum()  # torch's softplus(x) is x above 20, an error in float64
            p = logits.sigmoid_()
            sums[1] += torch.linalg.vecdot(p[0], similarity[0]).sum()
            sums[2] += p[0].sum()
            torch.mm(p[0], pairs.all_features[1], out=slopes[0, rows])
            if sides == 1:
                slopes[1].addmm_(p[0].T, features[0, rows])
            else:
                torch.mm(p[1], pairs.all_features[0], out=slopes[1, rows])
        pairs.forget()
        sums /= features.shape[1]
        ctx.save_for_backward(slopes.mul_(scale / features.shape[1]), sums)
        ctx.mark_non_differentiable(nearest)
        return sums[0].clone(), nearest

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        slopes, (_, by_scale, by_bias) = ctx.saved_tensors
        return gradient * slopes, gradient * by_scale, gradient * by_bias, None
