"""What all objectives share: how they are called, and how they answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from neuclip.objectives.metrics import Metrics
from neuclip.objectives.normalizers.sharded import ShardedRows
from neuclip.objectives.pairs import (
    Both,
    Pairs,
    check_features,
    check_keys,
    check_unit_rows,
    full_precision,
    gather_pairs,
)


class NoEstimate(RuntimeError):
    """The objective has no normalizer, or has not stored anything yet."""


class Objective(nn.Module, ABC):
    """A contrastive loss with whatever state its method needs, called as `objective(image, text, logit_scale)`.

    A method subclasses it and says `loss(pairs, tau)`. State is never a parameter: `list(parameters()) == []`, so
    that no outer optimizer picks it up. `train()` lets forward update state, `eval()` writes nothing.
    """

    def __init__(self, embed_dim: int | None = None, *, mask_duplicates: bool = False) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.mask_duplicates = mask_duplicates
        self._metrics = Metrics()
        self._rows_checked = False

    @property
    def metrics(self) -> dict[str, float | None]:
        """What the last call measured, as floats. Reading them waits for the device; calling the objective does not."""
        return self._metrics.as_floats()

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None = None,
        *,
        sample_ids: Tensor | None = None,
        caption_ids: Tensor | None = None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """The loss of the global batch as this process sees it: the mean over processes of its gradients is the
        gradient of the loss of the whole batch.

        Args:
            image_features, text_features: (b, d), unit rows; row i of both is one pair of this process.
            logit_scale: scalar tensor 1/tau, as open_clip's models give it.
            logit_bias: scalar tensor for SigLIP; a softmax does not see it.
            sample_ids: (b,) int64, the number of each sample in its data set.
            caption_ids: (b,) int64, equal for equal captions; only `mask_duplicates` needs them.
            output_dict: answer {"contrastive_loss": loss}, as open_clip's trainer expects.
        """
        self._metrics.clear()
        with full_precision(image_features.device):
            pairs = self._pairs(image_features, text_features, sample_ids, caption_ids, logit_bias)
            loss = self.loss(pairs, self._tau(logit_scale, pairs))
        return {"contrastive_loss": loss} if output_dict else loss

    @abstractmethod
    def loss(self, pairs: Pairs, tau: Tensor) -> Tensor:
        """The method's scalar for this process's anchors; in train mode it may renew the method's state first."""

    @torch.no_grad()
    def log_normalizers(
        self, image_features: Tensor, text_features: Tensor, logit_scale: Tensor, sample_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:  # (b, d), (b, d) -> (b,), (b,)
        """The method's current estimates of log(eps + g) for these anchors, image side and text side. Read only."""
        with full_precision(image_features.device):
            pairs = self._pairs(image_features, text_features, sample_ids)
            return self.estimates(pairs, self._tau(logit_scale, pairs))

    def estimates(self, pairs: Pairs, tau: Tensor) -> tuple[Tensor, Tensor]:
        raise NoEstimate(f"{type(self).__name__} has no normalizer")

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Continue from `state_dict()` of the same objective with the same sizes, from any number of processes."""
        try:
            return super().load_state_dict(state_dict, strict, assign)
        except RuntimeError as error:
            reasons = [line.strip() for line in str(error).splitlines()[1:]] or [str(error)]
            raise ValueError(
                f"this is not the state of {type(self).__name__} as it was built here ({reasons[0]}); "
                "load it into the objective that saved it, with the same arguments"
            ) from error

    def _pairs(
        self,
        image: Tensor,
        text: Tensor,
        sample_ids: Tensor | None,
        caption_ids: Tensor | None = None,
        logit_bias: Tensor | None = None,
    ) -> Pairs:
        check_features(image, text, self.embed_dim)
        check_keys(sample_ids, image, "sample_ids")
        check_keys(caption_ids, image, "caption_ids")
        if not self._rows_checked:
            check_unit_rows(image, text)
            self._rows_checked = True
        pairs = gather_pairs(
            image,
            text,
            dtype=self.match_state_to(image),
            sample_ids=sample_ids,
            caption_ids=caption_ids if self.mask_duplicates else None,
            logit_bias=logit_bias,
        )
        if self.mask_duplicates:
            self._metrics.note(masked_duplicates=pairs.excluded.sum() - len(image))
        return pairs

    def match_state_to(self, features: Tensor) -> torch.dtype:
        """Move the state to the features' device, and to float64 when they are, so that nobody has to remember to.
        Answers the type to compute in: float32, or float64 when features or state are."""
        dtype = torch.promote_types(features.dtype, torch.float32)
        sharded = [
            block for part in self.modules() if isinstance(part, ShardedRows) for block in part.blocks().values()
        ]
        state = [tensor for tensor in (*self.buffers(), *sharded) if tensor.is_floating_point()]
        for tensor in state:
            dtype = torch.promote_types(dtype, tensor.dtype)
        if any(tensor.device != features.device or tensor.dtype != dtype for tensor in state):
            self.to(features.device, dtype)
        return dtype

    @staticmethod
    def _tau(logit_scale: Tensor, pairs: Pairs) -> Tensor:
        return 1 / torch.as_tensor(logit_scale, device=pairs.image.device).to(pairs.image.dtype)

    def _note_accuracy(self, pairs: Pairs) -> None:
        self._metrics.note(accuracy=(pairs.similarities()[0].argmax(dim=1) == pairs.own).float().mean())

    def _note_weights(self, log_normalizer: Both, believed: Both) -> None:
        """How unequally anchors pull: the deviation of g / nu over the batch, both as logarithms."""
        exponent = torch.stack(log_normalizer) - torch.stack(believed)
        self._metrics.note(weight_deviation=exponent.detach().exp().std(correction=0))
