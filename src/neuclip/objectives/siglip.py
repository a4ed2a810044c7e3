"""SigLIP: every image-text combination of the batch is a yes-or-no question: do they belong together?"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from neuclip.objectives.formulas import gradient_only
from neuclip.objectives.objective import Objective
from neuclip.objectives.pairs import Pairs
from neuclip.settings.objectives import SigLIPSettings

# Logits in memory at a time: 16 MB in float32, about six such buffers with what is made of them. The whole (b, B) block
# grows with the batch and is slower: on a CPU core 1.9 against 0.9 s at B = 4096, d = 256.
CHUNK_ELEMENTS = 2**22


class SigLIP(Objective):
    """The logistic loss over all combinations, divided by the batch size: open_clip's `SigLipLoss`.

    1/B sum_ij -log sigmoid(z_ij l_ij), logit l_ij = s_ij / tau + bias, z_ij = 1 for pairs and -1 otherwise.

    The bias is learned with the encoders and belongs to the model: build it with open_clip's `init_logit_bias=-10` and
    pass `model.logit_bias`.

    >>> objective = SigLIP()
    >>> loss = objective(image_features, text_features, logit_scale, logit_bias)        # doctest: +SKIP

    Args:
        mask_duplicates: pairs with an equal caption are no negatives of each other (`caption_ids`).
    """

    metric_names = (*Objective.metric_names, "bias", "positive_logit", "negative_logit")

    def __init__(self, *, mask_duplicates: bool = SigLIPSettings.mask_duplicates) -> None:
        super().__init__(mask_duplicates=mask_duplicates)

    def loss(self, pairs: Pairs, tau: Tensor) -> Tensor:
        """This rank's images against all texts, each combination once over all ranks; the mean over ranks is the loss
        of the global batch. Gradients are closed forms, so nothing travels back through the gather."""
        if pairs.logit_bias is None:
            raise ValueError(
                "SigLIP needs a bias: pass logit_bias=model.logit_bias, of a model built with init_logit_bias=-10"
            )
        scale, bias = 1 / tau, pairs.logit_bias
        needs_gradient = torch.is_grad_enabled()
        with torch.no_grad():
            value, by_scale, by_bias, image_rows = self._images_against_all_texts(pairs, scale, bias, needs_gradient)
            if not needs_gradient:
                return value
            text_rows = [
                slope @ pairs.all_image for _, _, slope in _blocks(pairs, pairs.text, pairs.all_image, scale, bias)
            ]
        gradient_terms = scale * by_scale + bias * by_bias
        for features, rows in ((pairs.image, image_rows), (pairs.text, text_rows)):
            # Sums over the global batch divided by the local size: DDP's mean over ranks does the rest.
            gradient_terms = gradient_terms + (features * torch.cat(rows)).sum() * (scale.detach() / len(features))
        return value + gradient_only(gradient_terms)

    def _images_against_all_texts(
        self, pairs: Pairs, scale: Tensor, bias: Tensor, needs_gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """The loss, its derivatives by scale and by bias, and slopes times texts, in chunks of (c, d)."""
        b = len(pairs.image)
        sums = pairs.image.new_zeros(4)
        rows, nearest = [], []
        for similarity, loss, slope in _blocks(pairs, pairs.image, pairs.all_text, scale, bias):
            sums += torch.stack([loss.sum(), (slope * similarity).sum(), slope.sum(), similarity.sum()])
            nearest.append(similarity.argmax(dim=1))
            rows += [slope @ pairs.all_text] if needs_gradient else []
        value, by_scale, by_bias, similarities = sums / b
        positive = pairs.positive.mean()
        self.record(
            accuracy=(torch.cat(nearest) == pairs.positive_column).float().mean(),
            calibration=None,  # no normalizer
            bias=bias,
            positive_logit=scale * positive + bias,
            negative_logit=scale * (similarities - positive) / max(len(pairs.all_image) - 1, 1) + bias,
        )
        return value, by_scale, by_bias, rows


def _blocks(
    pairs: Pairs, anchors: Tensor, candidates: Tensor, scale: Tensor, bias: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For some anchors at a time, (c, B) each: similarity, loss, and its slope by the logit. Excluded combinations (the
    same sample or caption, not a pair) have neither loss nor slope."""
    columns = torch.arange(len(candidates), device=anchors.device)
    size = max(1, CHUNK_ELEMENTS // len(candidates))
    for start in range(0, len(anchors), size):
        rows = slice(start, start + size)
        similarity = anchors[rows].detach() @ candidates.T
        is_pair = columns == pairs.positive_column[rows, None]
        ignored = pairs.excluded[rows] & ~is_pair
        logits = (similarity * scale + bias).masked_fill_(ignored, -torch.inf)
        error = torch.where(is_pair, -logits, logits)  # -z l: how far the logit is on the wrong side
        # softplus(x) returns x above 20, an error of 2e-9 that float64 would see.
        loss = -F.logsigmoid(-error)
        slope = error.sigmoid_()
        yield similarity, loss, torch.where(is_pair, -slope, slope)
