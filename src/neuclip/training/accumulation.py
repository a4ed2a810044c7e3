"""The gradient of the whole batch, over all ranks, through towers that see a part of it at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from neuclip.distributed.collectives import world_size
from neuclip.models.towers import Towers
from neuclip.plan import chunk_count
from neuclip.training.randomness import random_state, set_random_state


class Accumulation:
    """Splits the backward pass between objective and towers. A contrastive loss needs all features of its batch at
    once, and nothing else of the towers: it is computed on detached features, and the gradient of each row of them is
    then passed through the towers. By the chain rule that is the gradient of the whole batch; temperature and bias get
    theirs once.

    With `micro_batch_size` below the local batch (0: no limit) the towers run twice, in chunks: without a graph for
    the features, then with one for the gradient, with the same random numbers in both. Only one chunk's activations are
    alive at a time. BatchNorm takes its statistics chunk by chunk, as it does rank by rank.

    >>> accumulation = Accumulation(towers, micro_batch_size=256)
    >>> image, text, scale, bias = accumulation.features(images, tokens)
    >>> accumulation.backward(objective(image, text, scale, bias))        # doctest: +SKIP
    """

    def __init__(self, towers: Towers, *, micro_batch_size: int = 0, precision: torch.dtype = torch.float32):
        self.towers = towers
        self.micro_batch_size = micro_batch_size
        self.precision = precision
        # DDP averages over ranks while backward still runs, and gives every rank rank 0's running statistics.
        self.parallel: nn.Module = DistributedDataParallel(towers) if world_size() > 1 else towers

    def features(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Images (b, 3, H, W) and tokens (b, L), or features of locked trunks -> image and text features (b, d), scale
        1/tau, and SigLIP's bias or None: leaves."""
        # Of nearly equal size: a last chunk of one pair would leave BatchNorm without a variance.
        count = chunk_count(len(images), self.micro_batch_size)
        self.chunks = list(zip(images.tensor_split(count), texts.tensor_split(count), strict=True))
        self.outputs: Sequence[Tensor] = ()
        if len(self.chunks) == 1:
            self.outputs = self._run(self.parallel, 0)
        image, text = self.outputs or self._features_of_chunks()
        self.leaves = [x.detach().requires_grad_() for x in (image, text, *self._shared())]
        image, text, scale, *bias = self.leaves
        return image, text, scale, bias[0] if bias else None

    def backward(self, loss: Tensor) -> None:
        """What `loss.backward()` does in a loop without this split."""
        loss.backward()
        # Zero where a method does not use the temperature: DDP waits for every parameter.
        image, text, *shared = (torch.zeros_like(x) if x.grad is None else x.grad for x in self.leaves)
        if self.outputs:
            backward_from_features([*self.outputs, *self._shared()], [image, text, *shared])
        else:
            self._backward_of_chunks(image, text, shared)
        self.chunks, self.outputs, self.leaves = [], (), []

    def _shared(self) -> list[Tensor]:
        """The parameters that the objective gets beside the features: 1/tau, and SigLIP's bias."""
        bias = self.towers.logit_bias
        return [self.towers.logit_scale] if bias is None else [self.towers.logit_scale, bias]

    @torch.no_grad()
    def _features_of_chunks(self) -> tuple[Tensor, Tensor]:
        self.random, rows = [], []
        with frozen_running_statistics(self.towers):
            for number in range(len(self.chunks)):
                self.random.append(random_state(self.towers.device))
                rows.append(self._run(self.towers, number))
        image, text = zip(*rows, strict=True)
        return torch.cat(image), torch.cat(text)

    def _backward_of_chunks(self, image: Tensor, text: Tensor, shared: list[Tensor]) -> None:
        state_after = random_state(self.towers.device)
        count = len(self.chunks)
        for number, gradients in enumerate(zip(image.tensor_split(count), text.tensor_split(count), strict=True)):
            last = number == count - 1
            set_random_state(self.random[number], self.towers.device)
            with nullcontext() if last else self._no_sync():
                outputs = self._run(self.parallel, number)
                if last:  # temperature and bias once, in the backward that DDP waits for
                    backward_from_features([*outputs, *self._shared()], [*gradients, *shared])
                else:
                    backward_from_features(outputs, gradients)
        set_random_state(state_after, self.towers.device)

    def _run(self, towers: nn.Module, number: int) -> tuple[Tensor, Tensor]:
        images, texts = self.chunks[number]
        enabled = self.precision != torch.float32
        with torch.autocast(images.device.type, dtype=self.precision, enabled=enabled):
            return towers(images, texts)

    def _no_sync(self) -> AbstractContextManager:
        return self.parallel.no_sync() if isinstance(self.parallel, DistributedDataParallel) else nullcontext()


def backward_from_features(outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Backward from the features; frozen ones are left out."""
    learned = [number for number, output in enumerate(outputs) if output.requires_grad]
    if learned:
        torch.autograd.backward([outputs[i] for i in learned], [gradients[i] for i in learned])


@contextmanager
def frozen_running_statistics(module: nn.Module) -> Iterator[None]:
    """Inside, BatchNorm normalizes by its batch and does not update its running mean and variance."""
    norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]
    for norm in norms:
        norm.track_running_stats = False
    try:
        yield
    finally:
        for norm in norms:
            norm.track_running_stats = True
