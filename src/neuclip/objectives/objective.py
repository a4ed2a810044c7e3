"""What all objectives share: how they are called, and what they return."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from neuclip.objectives.normalizers.sharded import ShardedRows
from neuclip.objectives.pairs import (
    Both,
    Pairs,
    check_features,
    check_keys,
    check_unit_rows,
    full_precision,
    gather_pairs,
    warn_of_logarithm,
)
from neuclip.settings.fields import check_at_least


class NoEstimate(RuntimeError):
    """The objective has no normalizer, or has not stored anything yet."""


class Objective(nn.Module, ABC):
    """A contrastive loss with whatever state its method needs, called as `objective(image, text, logit_scale)`.

    A method subclasses it and defines `loss(pairs, tau)`. State is never a parameter: `list(parameters()) == []`, so
    that no outer optimizer picks it up. `train()` lets forward update state, `eval()` writes nothing.
    """

    # Constructor arguments that a run supplies beside the settings: "embed_dim" of the model, "dataset_size",
    # "epoch_samples" (samples per epoch) and "total_samples" (of the whole run).
    needs: ClassVar[tuple[str, ...]] = ()
    # Every name that `record` may be called with. They become columns of records.jsonl.
    metric_names: ClassVar[tuple[str, ...]] = ("accuracy", "calibration", "masked_duplicates", "weight_deviation")
    # The encoders' present learning rate over their peak. A trainer sets it before each call; what a method updates
    # beside the encoders, as NeuCLIP's simultaneous update does, follows it.
    learning_rate_factor: float = 1.0

    def __init__(self, embed_dim: int | None = None, *, mask_duplicates: bool = False) -> None:
        super().__init__()
        if embed_dim is not None:
            check_at_least("embed_dim", embed_dim, 1, "the width of the features")
        self.embed_dim = embed_dim
        self.mask_duplicates = mask_duplicates
        self._recorded: dict[str, Tensor | None] = {}
        self._first_call = True

    @property
    def metrics(self) -> dict[str, float | None]:
        """What the last call measured, as floats. Reading them waits for the device; calling the objective does not."""
        return {name: None if value is None else float(value) for name, value in self._recorded.items()}

    def record(self, **values: Tensor | None) -> None:
        """Keep tensors for `metrics` without waiting for the device; the names are among `metric_names`."""
        self._recorded.update({name: None if value is None else value.detach() for name, value in values.items()})

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
        """The loss of this rank's pairs. The mean over ranks of its gradients, which DDP takes, is the gradient of the
        loss of the global batch. It can be differentiated once.

        Args:
            image_features, text_features: (b, d), unit rows; row i of both is one pair of this rank.
            logit_scale: scalar tensor 1/tau, as open_clip's models return it.
            logit_bias: scalar tensor for SigLIP; a softmax does not depend on it.
            sample_ids: (b,) int64, the number of each sample in its data set.
            caption_ids: (b,) int64, equal for equal captions; only `mask_duplicates` needs them.
            output_dict: return {"contrastive_loss": loss}, as open_clip's trainer expects.
        """
        self._recorded = {}
        with full_precision(image_features.device):
            pairs = self._gather(image_features, text_features, logit_scale, sample_ids, caption_ids, logit_bias)
            loss = self.loss(pairs, self._tau(logit_scale, pairs))
        return {"contrastive_loss": loss} if output_dict else loss

    @abstractmethod
    def loss(self, pairs: Pairs, tau: Tensor) -> Tensor:
        """The method's scalar for this rank's anchors; in train mode it may update the method's state first."""

    @torch.no_grad()
    def log_normalizers(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        sample_ids: Tensor | None = None,
        eps: float | None = None,
    ) -> tuple[Tensor, Tensor]:  # (b, d), (b, d) -> (b,), (b,)
        """The method's current estimates of log(eps + g) for these anchors, image side and text side. Read only.

        `eps`: None is the method's own. Methods can be compared only with one eps for all: it is a floor that hides
        every error below it. NaN is an anchor of which the method has no estimate.
        """
        with full_precision(image_features.device):
            pairs = self._gather(image_features, text_features, logit_scale, sample_ids)
            return self.estimates(pairs, self._tau(logit_scale, pairs), eps)

    def estimates(self, pairs: Pairs, tau: Tensor, eps: float | None = None) -> tuple[Tensor, Tensor]:
        """`log_normalizers` of gathered pairs; a method without normalizers leaves it out."""
        raise NoEstimate(f"{type(self).__name__} has no normalizer")

    def restart_steps(self, batch_size: int) -> range:
        """The steps whose batches of `batch_size` were stored at the method's last restart; empty if it has none. What
        it says of the samples in them, it says of samples that it holds."""
        return range(0)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Continue from `state_dict()` of the same objective with the same sizes, from any number of ranks."""
        try:
            return super().load_state_dict(state_dict, strict, assign)
        except (RuntimeError, KeyError) as error:  # a KeyError comes from set_extra_state
            reasons = [line.strip() for line in str(error).splitlines()[1:]] or [f"Missing key {error}"]
            raise ValueError(
                f"this is not the state of {type(self).__name__} as it was built here ({reasons[0]}); "
                "load it into the objective that saved it, with the same arguments"
            ) from error

    def _gather(
        self,
        image: Tensor,
        text: Tensor,
        logit_scale: Tensor,
        sample_ids: Tensor | None,
        caption_ids: Tensor | None = None,
        logit_bias: Tensor | None = None,
    ) -> Pairs:
        check_features(image, text, self.embed_dim)
        check_keys(sample_ids, image, "sample_ids")
        check_keys(caption_ids, image, "caption_ids")
        if self._first_call:
            check_unit_rows(image, text)
            warn_of_logarithm(logit_scale)
            self._first_call = False
        pairs = gather_pairs(
            image,
            text,
            dtype=self.match_state_to(image),
            sample_ids=sample_ids,
            caption_ids=caption_ids if self.mask_duplicates else None,
            logit_bias=logit_bias,
        )
        if self.mask_duplicates:
            self.record(masked_duplicates=pairs.excluded.sum() - len(image))
        return pairs

    def match_state_to(self, features: Tensor) -> torch.dtype:
        """Move the state to the features' device, and to float64 if they are.

        Returns the type to compute in: float32, or float64 if features or state are.
        """
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

    def record_accuracy(self, pairs: Pairs) -> None:
        """The share of images whose own text is the nearest of the batch; the trainer prints it."""
        self.record(accuracy=(pairs.similarities[0].argmax(dim=1) == pairs.positive_column).float().mean())

    def record_calibration(self, ratios: Both | None) -> None:
        """Each side's mean of true over predicted normalizer; None where nothing is predicted yet."""
        image, text = ratios or (None, None)
        mean = None if image is None or text is None else (image + text) / 2
        self.record(calibration=mean, calibration_image=image, calibration_text=text)

    def record_weight_deviation(self, log_normalizer: Both, held_log_nu: Both) -> None:
        """How unequal the anchors' weights g / nu are over the batch; both arguments are logarithms."""
        exponent = torch.stack(log_normalizer) - torch.stack(held_log_nu)
        self.record(weight_deviation=exponent.detach().exp().std(correction=0))
