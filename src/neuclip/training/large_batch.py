"""The exact gradient of a large batch through a model that sees a part of it at a time, for any training loop."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

WRAPPERS = (DistributedDataParallel, FullyShardedDataParallel, FSDPModule)


class LargeBatch(nn.Module):
    """Calls `model` with at most `micro_batch_size` rows at a time (0: all at once) and returns the model's output for
    the whole batch, with the gradient of the whole batch.

    >>> encode = LargeBatch(model, micro_batch_size=256)        # then DistributedDataParallel(encode) on several ranks
    >>> image, text, logit_scale = encode(images, tokens)       # 4,096 pairs, activations of 256
    >>> objective(image, text, logit_scale).backward()          # doctest: +SKIP

    A contrastive loss needs only the features of the whole batch, not the model's activations. The model runs twice:
    in forward without a graph, to get the features, and in backward with a graph, chunk by chunk. By the chain rule the
    sum over chunks is the gradient of the whole batch. The parameters receive it in one piece, and DDP averages over
    ranks once per step.

    The model takes tensors with a row per pair and returns a tuple. Its elements are tensors with a row per pair, or
    single numbers such as open_clip's logit scale and bias, which receive their gradient once. Dropout draws the same
    mask in both runs. BatchNorm normalizes each chunk by itself, and updates its running statistics once per chunk.
    """

    def __init__(self, model: nn.Module, *, micro_batch_size: int):
        super().__init__()
        if isinstance(model, WRAPPERS):
            kind = "fully_shard" if isinstance(model, FSDPModule) else type(model).__name__
            raise ValueError(f"LargeBatch goes inside {kind}: give it the bare model, and wrap LargeBatch")
        if micro_batch_size < 0:
            raise ValueError(f"micro_batch_size is {micro_batch_size}; give 1 or more, or 0 for the whole batch")
        self.model = model
        self.micro_batch_size = micro_batch_size

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:  # (b, ...) each -> (b, ...) or () each
        count = math.ceil(len(inputs[0]) / self.micro_batch_size) if self.micro_batch_size else 1
        if count <= 1:
            return _AllUsed.apply(*_outputs(self.model, inputs))
        if any(x.requires_grad for x in inputs):
            raise ValueError("an input of LargeBatch requires a gradient; compute this input inside the model")
        # Chunks of nearly equal size: BatchNorm has no variance over a last chunk of one row.
        chunks = list(zip(*(x.tensor_split(count) for x in inputs), strict=True))
        learned = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        return _InChunks.apply(self.model, chunks, *learned)


class _AllUsed(torch.autograd.Function):
    """The identity. An output that the loss does not use, such as the logit scale in a method with individual
    temperatures, gets a gradient of zeros: DDP waits for a gradient of every parameter."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(output.view_as(output) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, model: nn.Module, chunks: list[tuple[Tensor, ...]], *learned: Tensor) -> tuple[Tensor, ...]:
        device = chunks[0][0].device
        ctx.model, ctx.chunks, ctx.learned, ctx.random = model, chunks, learned, []
        # The second run uses the same autocast. Its cache is off: the weights that this run casts have no graph.
        kind, dtype = device.type, torch.get_autocast_dtype(device.type)
        ctx.autocast = torch.autocast(kind, dtype, torch.is_autocast_enabled(kind), cache_enabled=False)
        outputs = []
        with ctx.autocast, frozen_running_statistics(model):
            for chunk in chunks:
                ctx.random.append(random_state(device))
                outputs.append(_outputs(model, chunk))
        # A single number may be a parameter of the model, which must not be an output of this function: clone it.
        return tuple(
            parts[0].clone() if _is_shared(parts[0]) else torch.cat(parts) for parts in zip(*outputs, strict=True)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        device, count = ctx.chunks[0][0].device, len(ctx.chunks)
        # A number that all rows share gets its gradient once, with the last chunk.
        rows = [[None] * (count - 1) + [x] if _is_shared(x) else x.tensor_split(count) for x in gradients]
        sums: list[Tensor | None] = [None] * len(ctx.learned)
        after = random_state(device)
        for number, chunk in enumerate(ctx.chunks):
            set_random_state(ctx.random[number], device)
            with torch.enable_grad(), ctx.autocast:
                outputs = _outputs(ctx.model, chunk)
            pairs = [(y, x[number]) for y, x in zip(outputs, rows, strict=True) if y.requires_grad]
            pairs = [(y, gradient) for y, gradient in pairs if gradient is not None]
            if not pairs:
                continue
            differentiable, output_gradients = zip(*pairs, strict=True)
            found = torch.autograd.grad(differentiable, ctx.learned, output_gradients, allow_unused=True)
            for index, gradient in enumerate(found):
                if gradient is not None:
                    # Not in place: autograd may return one tensor for two parameters, such as two that are added.
                    sums[index] = gradient if sums[index] is None else sums[index] + gradient
        set_random_state(after, device)
        return None, None, *sums


def _outputs(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    outputs = model(*inputs)
    if not isinstance(outputs, tuple | list) or not all(isinstance(output, Tensor) for output in outputs):
        raise TypeError(
            f"LargeBatch needs a model that returns a tuple of tensors, such as (image, text, logit_scale), but "
            f"{type(model).__name__} returns a {type(outputs).__name__}; wrap it in a module that returns a tuple"
        )
    wrong = [tuple(output.shape) for output in outputs if not _is_shared(output) and len(output) != len(inputs[0])]
    if wrong:
        raise ValueError(
            f"the model returns a tensor of shape {wrong[0]} for {len(inputs[0])} rows; "
            "return one row for each input row, or a single number"
        )
    return tuple(outputs)


def _is_shared(output: Tensor) -> bool:
    """Whether it is one number for all rows."""
    return output.ndim == 0 or output.shape == (1,)


@contextmanager
def frozen_running_statistics(module: nn.Module) -> Iterator[None]:
    """Inside, BatchNorm normalizes by its batch and does not update its running mean and variance."""
    norms = [m for m in module.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    for norm in norms:
        norm.track_running_stats = False
    try:
        yield
    finally:
        for norm in norms:
            norm.track_running_stats = True


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The states of torch's random generators on the host and on `device`."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        state["mps"] = torch.mps.get_rng_state()
    return state


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    elif device.type == "mps" and "mps" in state:
        torch.mps.set_rng_state(state["mps"])
