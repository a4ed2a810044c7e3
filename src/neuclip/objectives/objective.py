"""The base class of all objectives: how they are built and called, and what they return."""

from __future__ import annotations

import inspect
import math
import warnings
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeVar, dataclass_transform

import torch
from torch import Tensor, nn

from neuclip.distributed.collectives import all_gather_int
from neuclip.objectives.formulas import LARGEST_EXPONENT, ratio
from neuclip.objectives.pairs import Pairs, gather_pairs
from neuclip.objectives.state import ShardedRows
from neuclip.settings.objectives import ObjectiveSettings
from neuclip.settings.options import option, types_of

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)
LIKELY_LOGARITHM = 5.0  # a logit_scale below 5 is likely its logarithm: temperatures above 0.2 are rare
T = TypeVar("T")


class NoEstimate(RuntimeError):
    """The objective has no normalizers, or has not learned any yet."""


@dataclass_transform(frozen_default=True, field_specifiers=(option, field))
def objective(kind: type[T]) -> type[T]:
    """Class decorator: make the constructor of an objective from its fields, those of its settings and its own. The
    fields are read-only; in all else an objective is an ordinary module."""
    restate_defaults(kind)
    kind = dataclass(frozen=True, eq=False)(kind)
    del kind.__setattr__, kind.__delattr__
    options: list[Any] = sorted(fields(kind), key=lambda option: option.default is not MISSING)  # type: ignore[arg-type]
    lines = [f"    {option.name}: {option.metadata['help']}" for option in options]
    kind.__doc__ = "\n".join([inspect.cleandoc(kind.__doc__ or ""), "", "Args:", *lines])
    kind.__init__.__doc__ = "The arguments are explained in the class's docstring."
    return kind


def restate_defaults(kind: type) -> None:
    """Give a method that inherits from another method the defaults of its own settings. By the order of the bases,
    dataclasses would use the other method's defaults."""
    methods = [base for base in kind.__bases__ if issubclass(base, nn.Module)]
    inherited = {setting.name for base in methods for setting in fields(base)}  # type: ignore[arg-type]
    for settings in (base for base in kind.__bases__ if base not in methods):
        for name in inherited & set(inspect.get_annotations(settings)) - set(inspect.get_annotations(kind)):
            setting = next(setting for setting in fields(settings) if setting.name == name)
            kind.__annotations__[name] = types_of(settings)[name]
            setattr(kind, name, field(default=setting.default, metadata=setting.metadata, kw_only=True))


class Objective(nn.Module, ObjectiveSettings):
    """A contrastive loss and the state of its method, called as `objective(image, text, logit_scale)`.

    A method is `class Method(Objective, MethodSettings)` and defines `loss(pairs, tau)`. Its state is never a parameter
    (`list(parameters()) == []`), so that no outer optimizer picks it up. In train mode forward updates the state, in
    eval mode it does not.

    Call it once per step and outside activation checkpointing, which would call it a second time in backward and
    update its state twice.
    """

    prefix = ""  # errors name arguments of a constructor here, not settings
    measures = True  # False: skip computations that only `metrics` need, in steps that are not logged
    embed_dim: int | None = None
    __eq__, __hash__ = object.__eq__, object.__hash__  # as for any module; those of the settings compare options

    def __post_init__(self) -> None:
        nn.Module.__init__(self)
        super().__post_init__()  # checks its settings
        self.steps = self.samples_seen = 0  # in train mode
        self._recorded: dict[str, Tensor | None] = {}
        self._checked = False

    @property
    def metrics(self) -> dict[str, float | None]:
        """Metrics of the last call, as floats. Reading them waits for the device; calling the objective does not."""
        values = {name: math.nan if value is None else float(value) for name, value in self._recorded.items()}
        return {name: None if math.isnan(value) else value for name, value in values.items()}

    def record(self, **values: Tensor | None) -> None:
        """Keep tensors for `metrics` without waiting for the device. They are copied: SigLIP's bias is a parameter,
        which the optimizer changes later."""
        self._recorded.update({name: None if x is None else x.detach().clone() for name, x in values.items()})

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
        """The loss of this rank's pairs. DDP averages its gradients over ranks; the mean is the gradient of the loss of
        the global batch. The loss can be differentiated once. Forward and backward are collective.

        If features or the temperature are NaN or infinite, the loss is NaN on every rank. The state stays intact: it is
        updated from the other pairs alone, and `metrics["left_out"]` counts the pairs that were left out. Pairs with a
        feature of zeros are left out too; they leave the loss finite and receive no gradient.

        Args:
            image_features, text_features: (b, d), unit rows; row i of both is one pair of this rank.
            logit_scale: scalar tensor 1/tau, as open_clip's models return it.
            logit_bias: scalar tensor for SigLIP; the other methods ignore it.
            sample_ids: (b,) int64, the id of each sample in the data set.
            caption_ids: (b,) int64, equal for equal captions; only `mask_duplicates` needs them.
            output_dict: return {"contrastive_loss": loss}, as open_clip's trainer expects.
        """
        self._recorded = {}
        with torch.autocast(image_features.device.type, enabled=False):  # bf16 logits would be off by 0.2 at tau 0.01
            pairs, tau = self._gather(image_features, text_features, logit_scale, logit_bias, sample_ids, caption_ids)
            loss = self.loss(pairs, tau)
            loss = loss * torch.where(pairs.all_finite, 1.0, math.nan)  # NaN of one rank: on every rank
        if loss.requires_grad:
            loss.register_hook(refuse_second_derivative)
        if self.training:
            self.steps += 1
            self.samples_seen += pairs.batch
        return {"contrastive_loss": loss} if output_dict else loss

    @abstractmethod
    def loss(self, pairs: Pairs, tau: Tensor) -> Tensor:
        """The method's loss of this rank's anchors, a scalar. In train mode it may update the method's state first."""

    @torch.no_grad()
    def log_normalizers(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        sample_ids: Tensor | None = None,
        *,
        eps: float | None = None,
    ) -> tuple[Tensor, Tensor]:  # (b, d), (b, d) -> (b,), (b,)
        """The method's current estimates of log(eps + g) for these anchors, image side and text side; NaN for an anchor
        without an estimate. Does not change the state.

        `eps`: None means the method's own. Use one eps for all methods that you compare: it is a floor that hides all
        errors below it.
        """
        with torch.autocast(image_features.device.type, enabled=False):
            pairs, tau = self._gather(image_features, text_features, logit_scale, None, sample_ids, None)
            image, text = self.estimates(pairs, tau, self.eps if eps is None else eps)
        return image, text

    def estimates(self, pairs: Pairs, tau: Tensor, eps: float) -> Tensor:  # -> (2, b)
        """`log_normalizers` of gathered pairs. A method without normalizers does not define it."""
        raise NoEstimate(f"{type(self).__name__} has no normalizer")

    def state_bytes(self) -> tuple[int, int]:
        """Bytes of the state: of the part that every rank holds, and of the part that is spread over all ranks."""
        sharded = [module for module in self.modules() if isinstance(module, ShardedRows)]
        return sum(buffer.nbytes for buffer in self.buffers()), sum(module.bytes() for module in sharded)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Continue from `state_dict()` of the same objective with the same sizes, from any number of ranks."""
        try:
            return super().load_state_dict(state_dict, strict, assign)
        except (RuntimeError, KeyError) as error:  # a KeyError comes from set_extra_state
            reasons = [line.strip() for line in str(error).splitlines()[1:]] or [f"Missing key {error}"]
            raise ValueError(
                f"the state does not fit this {type(self).__name__} ({reasons[0]}); "
                "load it into an objective of the same class, built with the same arguments"
            ) from error

    def get_extra_state(self) -> dict[str, int]:
        return {"steps": self.steps, "samples_seen": self.samples_seen}

    def set_extra_state(self, state: Any) -> None:
        self.steps, self.samples_seen = state["steps"], state["samples_seen"]

    def _gather(
        self,
        image: Tensor,
        text: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None,
        sample_ids: Tensor | None,
        caption_ids: Tensor | None,
    ) -> tuple[Pairs, Tensor]:
        sample_ids, caption_ids = (None if ids is None else torch.as_tensor(ids) for ids in (sample_ids, caption_ids))
        check_shapes(image, text, self.embed_dim, sample_ids=sample_ids, caption_ids=caption_ids)
        logit_scale = torch.as_tensor(logit_scale, device=image.device)
        if not self._checked:  # only at the first call, which shows such mistakes: the checks wait for the device
            check_unit_rows(image, text)
            check_scale(logit_scale)
            self._checked = True
        check_equal_batches(len(image))
        dtype = self._match_state_to(image)
        tau = 1 / logit_scale.to(dtype)
        valid = tau.isfinite() & (tau > 0)
        with torch.no_grad():
            tau.masked_fill_(~valid, 1.0)  # only the value: the gradient is NaN, like the loss
        pairs = gather_pairs(
            image,
            text,
            dtype=dtype,
            valid=valid,
            first_key=self.samples_seen,
            sample_ids=sample_ids,
            caption_ids=caption_ids if self.mask_duplicates else None,
            logit_bias=logit_bias,
        )
        self.record(left_out=(~pairs.sound).sum())
        if self.mask_duplicates:
            self.record(masked_duplicates=(pairs.num_excluded - 1).sum())
        return pairs, tau

    def _match_state_to(self, features: Tensor) -> torch.dtype:
        """Move the state to the features' device and dtype to compute in, and return this dtype: float64 if features or
        state are float64, otherwise float32."""
        dtype = torch.promote_types(features.dtype, torch.float32)
        state = [*self.buffers()]
        for module in self.modules():
            if isinstance(module, ShardedRows):
                module.reshard()
                state += module.blocks.values()
        for tensor in state:
            dtype = torch.promote_types(dtype, tensor.dtype) if tensor.is_floating_point() else dtype

        def match(tensor: Tensor) -> Tensor:
            target_dtype = dtype if tensor.is_floating_point() else tensor.dtype
            return tensor.to(features.device, target_dtype, copy=tensor.is_inference())

        if any(match(tensor) is not tensor for tensor in state):
            with torch.inference_mode(False):  # tensors that are made in inference mode could never train again
                self._apply(match)
        return dtype

    @torch.no_grad()
    def record_normalizers(self, log_normalizer: Tensor, predicted: Tensor | None, used: Tensor) -> None:  # (2, b) each
        """Record metrics of the batch's log-normalizers, of those that were predicted before the method saw the batch,
        and of those that the loss uses."""
        if not self.measures:
            return
        floor, largest = math.log(self.eps) if self.eps else -math.inf, LARGEST_EXPONENT[used.dtype]
        image = text = mean = deviation = None
        if predicted is not None:  # the mean ratio is 1 if the prediction is right
            known = predicted.isfinite()
            ratios = torch.where(known, ratio(log_normalizer, predicted), 0).sum(dim=1) / known.sum(dim=1)
            image, text, mean = ratios[0], ratios[1], ratios.mean()
            deviation = torch.where(known, log_normalizer - predicted, 0).square().sum().div(known.sum()).sqrt()
        self.record(
            calibration=mean,
            calibration_image=image,
            calibration_text=text,
            log_ratio_deviation=deviation,
            weight_deviation=ratio(log_normalizer, used).std(correction=0),  # how unequal the anchors' weights are
            mean_log_normalizer_image=used[0].mean(),
            mean_log_normalizer_text=used[1].mean(),
            share_at_eps=(log_normalizer - floor < 1).float().mean(),  # below e * eps, eps decides, not the data
            capped=(log_normalizer - used > largest).float().sum(),
        )


def refuse_second_derivative(gradient: Tensor) -> None:
    """Backward hook on the loss: it runs with gradients enabled only under create_graph=True."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "objectives have first derivatives only: their gradients are closed forms that cannot be differentiated "
            "again; leave this loss out of gradient penalties and Hessians, and out of backward(create_graph=True)"
        )


def check_shapes(image: Tensor, text: Tensor, embed_dim: int | None, **keys: Tensor | None) -> None:
    """Refuse wrong shapes, which would broadcast into a wrong loss. Runs at each call."""
    if image.ndim != 2 or image.shape != text.shape:
        raise ValueError(
            f"image and text features have shapes {tuple(image.shape)} and {tuple(text.shape)}; "
            "give two matrices of the same shape (batch, embed_dim), where row i of both is pair i"
        )
    if embed_dim is not None and image.shape[1] != embed_dim:
        raise ValueError(f"features have {image.shape[1]} columns; this objective was made with embed_dim={embed_dim}")
    for name, values in keys.items():
        if values is not None and (values.shape != image.shape[:1] or values.dtype not in INTEGERS):
            raise ValueError(
                f"{name} have shape {tuple(values.shape)} and type {values.dtype}; "
                f"give {len(image)} integers, one per pair"
            )


def check_equal_batches(size: int) -> None:
    """Refuse ranks with different batch sizes, which would make collectives hang. Runs at each call, on the host."""
    sizes = all_gather_int(size)
    if len(set(sizes)) > 1:
        raise ValueError(
            f"ranks have different batch sizes ({', '.join(map(str, sizes))}); "
            "give every rank the same number of pairs, for example with drop_last=True"
        )


def check_unit_rows(image: Tensor, text: Tensor) -> None:
    """Refuse features that are not normalized. Runs at the first call. Ignores rows that are NaN, infinite or zero:
    `gather_pairs` leaves them out."""
    for name, features in (("image", image), ("text", text)):
        length = features.detach().float().norm(dim=1)
        off = torch.where(length.isfinite() & (length > 0), (length - 1).abs(), 0).max().item()
        if off > 0.02:  # bf16 rows of unit length are off by up to 0.004
            raise ValueError(
                f"{name} features are not unit rows (length off by {off:.3g}); "
                "pass them through torch.nn.functional.normalize(features, dim=1) first"
            )


def check_scale(logit_scale: Tensor) -> None:
    """Refuse a logit_scale that is not 1/tau. Runs at the first call. open_clip's parameter is ln(1/tau), initially 2.7
    and at most 4.6; open_clip's forward returns 1/tau, initially 14."""
    if logit_scale.numel() != 1:
        raise ValueError(f"logit_scale has shape {tuple(logit_scale.shape)}; give one number, 1/tau")
    value = logit_scale.item()
    if value <= 0:
        raise ValueError(f"logit_scale is {value:.3g}; give 1/tau, which is positive: logit_scale.exp() in open_clip")
    if value < LIKELY_LOGARITHM:
        warnings.warn(
            f"logit_scale is {value:.3g}, a temperature of {1 / value:.3g}; "
            "if it is the logarithm, pass logit_scale.exp()",
            stacklevel=6,  # the line that called the objective
        )
