"""Bias and variance of the gradient: how far each estimator's stochastic gradient is from the exact one of Eq. 1.

One run trains with its own objective. The other estimators watch it: they see the same pairs and update their state, so
their tables, prototypes and queues are as old as in training. At each moment we compute the exact gradient over the
whole training set, and each estimator's gradient on several hundred random batches.

With the gradient h of one batch and the exact gradient e, all relative to |e|^2:

    squared bias = |E h - e|^2          variance = E |h - E h|^2          E |h - e|^2 is their sum

Batches are drawn uniformly, like the run's next batch at the start of an epoch. Moments should therefore be multiples
of the data set's size: then moving averages and queues have the age that they have in training.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from neuclip.distributed.ranks import StopRequest
from neuclip.objectives.contrast import contrast
from neuclip.objectives.formulas import add_eps, unified_objective
from neuclip.objectives.objective import Objective, objective
from neuclip.objectives.pairs import Pairs
from neuclip.progress import say, track
from neuclip.runs.build import build_objective, build_run, open_training_source, resolve
from neuclip.settings.objectives import CLIPSettings, ObjectiveSettings
from neuclip.settings.reading import read_settings
from neuclip.settings.sections import Settings
from neuclip.settings.values import parse_whole
from neuclip.training.large_batch import LargeBatch
from neuclip.training.loop import caption_ids, parallel, take_step
from neuclip.training.run import Run
from neuclip.training.stored_features import store_features

EXACT = "exact"  # name of the estimator ExactNormalizers, beside the names of objectives
PRECISE = 10_000  # up to so many pairs everything is in float64: the exact gradient takes n^2 d products
ROWS = 4096  # rows that go through the heads at a time
GROUPS = 10  # groups of batches, for the standard error


class Estimator(NamedTuple):
    objective: str  # name of an objective, or EXACT
    settings: ObjectiveSettings
    sees_batch: bool = True  # False: use the state from before the batch whose gradient is taken


Estimators = Mapping[str, Estimator]


def gradient_figures(
    settings: Settings, estimators: Estimators, *, batches: int = 200, moments: Sequence[int]
) -> list[dict[str, float]]:
    """Measure all estimators at each moment, a number of samples seen (0: before the first step). Returns a line of
    figures per moment.

    For each estimator and the gradient in the two head matrices: `squared_bias` and its standard error
    `squared_bias_error`; `variance`; the `length` of the expected gradient relative to the exact one and its `cosine`
    with it (above 1 only by chance); `batch_cosine`, the mean over single batches; `exact_norm`. For the temperature:
    `tau_squared_bias`, `tau_variance`. Each estimator is compared with Eq. 1 at its own eps and rho, so it must
    minimise Eq. 1. AdamW hardly notices the length of a gradient: 1 - cosine^2 and variance / length^2 matter to it.

    >>> queue = Estimator("neuclip", NeuCLIPSettings(restart="rolling", inner_steps=0))             # doctest: +SKIP
    >>> gradient_figures(settings, {"queue": queue}, moments=[39_000])                              # doctest: +SKIP
    [{'samples': 39000, 'temperature': 0.05, 'pairs': 39000, 'queue.squared_bias': 0.21, 'queue.variance': 95.0, ...}]
    """
    settings = resolve(settings)
    run = build_run(settings, open_training_source(settings))
    store_features(run, StopRequest())
    assert len(run.stored) == 2, "the exact gradient needs two locked towers with stored features"
    watching = {name: build_estimator(run, own) for name, own in estimators.items()}
    run.objective = Watched(run.objective, watching)  # type: ignore[assignment]
    unseen = {name for name, own in estimators.items() if own.objective == EXACT or not own.sees_batch}
    encode, lines = parallel(run), []
    for moment in sorted(moments):
        steps = -(-moment // run.plan.batch_size) - run.step
        for batch in track(run.batches.steps(run.samples, steps), f"training to {moment:,} samples", steps, "steps"):
            take_step(run, encode, batch)
            run.step += 1
        lines.append(line := figures_now(run, watching, unseen, batches))
        found = [f"{name} {line[f'{name}.squared_bias']:.3g} / {line[f'{name}.variance']:.3g}" for name in estimators]
        say(f"at {run.samples:,} samples, squared bias / variance: {', '.join(found)}")
    return lines


def build_estimator(run: Run, estimator: Estimator) -> Objective:
    if estimator.objective == EXACT:
        return ExactNormalizers(**asdict(estimator.settings)).to(run.device)
    settings = replace(run.settings, objective_name=estimator.objective, objective=estimator.settings)
    return build_objective(settings, run.built, len(run.source), run.epoch_samples).to(run.device)


class Watched(nn.Module):
    """The objective that trains the run, and watchers that see the same pairs. Watchers update their state; their loss
    is dropped. Watchers without state are left out."""

    def __init__(self, driving: Objective, watching: Mapping[str, Objective]):
        super().__init__()
        self.driving = driving
        self.watching = nn.ModuleList(watcher for watcher in watching.values() if any(watcher.state_bytes()))

    def forward(self, image: Tensor, text: Tensor, scale: Tensor, *bias: Tensor, **ids: Tensor) -> Tensor:
        with torch.no_grad():
            for watcher in self.watching:
                watcher(image, text, scale, **ids)
        return self.driving(image, text, scale, *bias, **ids)


@objective
class ExactNormalizers(Objective, CLIPSettings):
    """Eq. 12 with alpha = the exact log-normalizers over the data set (Eq. 9), held constant.

    In train mode the batch must be the whole data set: alpha is computed and remembered by sample id. The gradient is
    then the exact one of Eq. 1, because the derivative of Eq. 12 in alpha is zero there. Eval mode uses that alpha.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.alpha = torch.empty(2, 0)  # (2, n), by sample id

    def loss(self, pairs: Pairs, tau: Tensor) -> Tensor:
        log_normalizer = add_eps(contrast(pairs, tau).log_g, self.eps)
        if self.training:
            self.alpha = torch.empty_like(log_normalizer).index_copy_(1, pairs.keys[0], log_normalizer.detach())
        alpha = self.alpha[:, pairs.keys[0]].to(log_normalizer.dtype)
        return unified_objective(log_normalizer, alpha, tau, self.rho)


# --- One moment -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DataSet:
    """All pairs of the training set, with the caption that the current epoch draws for each image."""

    images: Tensor  # (n, width) features of the locked trunks
    texts: Tensor  # (n, width)
    ids: dict[str, Tensor]  # sample_ids and caption_ids, (n,) each

    @classmethod
    def of_epoch(cls, run: Run) -> DataSet:
        size, batch_size = run.epoch_samples, run.plan.batch_size
        batches = list(run.batches.steps(run.samples // size * size, -(-size // batch_size)))
        images = torch.cat([batch.images for batch in batches])[:size]
        texts = torch.cat([batch.text_features for batch in batches if batch.text_features is not None])[:size]
        ids, tokens = (torch.cat(rows)[:size] for rows in zip(*((b.ids, b.tokens) for b in batches), strict=True))
        columns = {"sample_ids": ids, "caption_ids": caption_ids(tokens)}
        return cls(images.to(run.device), texts.to(run.device), {k: v.to(run.device) for k, v in columns.items()})

    def __getitem__(self, rows: Tensor) -> DataSet:
        return DataSet(self.images[rows], self.texts[rows], {name: ids[rows] for name, ids in self.ids.items()})


def figures_now(run: Run, watching: Mapping[str, Objective], unseen: Container[str], batches: int) -> dict[str, float]:
    """Measure all estimators now, without changing them or the run: each batch is given to a copy of an estimator, in
    eval mode if the estimator must not see it."""
    data, size = DataSet.of_epoch(run), run.epoch_samples
    line: dict[str, float] = {"samples": run.samples, "temperature": run.temperature, "pairs": size}
    draw = torch.Generator().manual_seed(run.settings.run.seed + run.samples)
    with Heads(run, torch.float64 if size <= PRECISE else torch.float32) as heads:
        samples = exact_gradients(heads, data, watching)
        for _ in track(range(batches), "gradients", batches, "batches"):
            batch = data[torch.randperm(size, generator=draw)[: run.plan.batch_size].to(run.device)]
            for name, own in watching.items():
                fresh = copy.deepcopy(own).train(name not in unseen)
                for sample, gradient in zip(samples[name], heads.gradient(fresh, batch), strict=True):
                    sample.add(gradient)
    for name, (weights, tau) in samples.items():
        line |= {f"{name}.{key}": value for key, value in weights.figures().items()}
        line |= {f"{name}.tau_{key}": tau.figures()[key] for key in ("squared_bias", "variance")}
    return line


def exact_gradients(
    heads: Heads, data: DataSet, watching: Mapping[str, Any]
) -> dict[str, tuple[GradientSample, GradientSample]]:
    """For each estimator an empty sample of gradients in the weights and one in ln(1/tau), with the exact gradients to
    compare with. These are computed once per eps and mask: rho adds only 2 tau rho, whose derivative in ln(1/tau) is
    -2 tau rho."""
    known: dict[tuple[float, bool], tuple[Tensor, Tensor, Tensor]] = {}
    samples = {}
    for name, own in watching.items():
        kind = (own.eps, own.mask_duplicates)
        if kind not in known:
            whole = ExactNormalizers(eps=own.eps, rho=0.0, mask_duplicates=own.mask_duplicates)
            known[kind] = (*heads.gradient(whole, data), whole.alpha)
        weights, tau, alpha = known[kind]
        samples[name] = GradientSample(weights), GradientSample(tau - 2 * heads.run.temperature * own.rho)
        if isinstance(own, ExactNormalizers):
            own.alpha = alpha
    return samples


class Heads:
    """The trained part of the towers, from stored features to unit rows; inside `with` it has the given precision."""

    def __init__(self, run: Run, dtype: torch.dtype):
        self.run, self.dtype = run, dtype
        towers = run.built.towers
        self.weights = [*towers.locked["image"].head_parameters, *towers.locked["text"].head_parameters]
        self.log_scale: nn.Parameter = towers.model.logit_scale
        self.encode = LargeBatch(towers.train(), micro_batch_size=ROWS)

    def gradient(self, objective: nn.Module, data: DataSet) -> tuple[Tensor, Tensor]:  # (p,), ()
        """The objective's gradient on these pairs, in the weights and in ln(1/tau)."""
        image, text, scale, *_ = self.encode(data.images.to(self.dtype), data.texts.to(self.dtype))
        loss = objective(image, text, scale, **data.ids)
        *weights, log_scale = torch.autograd.grad(loss, [*self.weights, self.log_scale])
        return torch.cat([gradient.flatten() for gradient in weights]), log_scale

    def __enter__(self) -> Heads:
        self._convert(self.dtype)
        return self

    def __exit__(self, *_: object) -> None:
        self._convert(torch.float32)  # exact: the values were float32 before

    def _convert(self, dtype: torch.dtype) -> None:
        for parameter in (*self.weights, self.log_scale):
            parameter.data = parameter.data.to(dtype)


class GradientSample:
    """Statistics of the gradients of random batches, compared with the exact one. Keeps sums only, in float64."""

    def __init__(self, exact: Tensor):
        self.exact = exact.double().flatten()  # (p,)
        self.sums = self.exact.new_zeros(GROUPS, len(self.exact))
        self.counts = self.exact.new_zeros(GROUPS, 1)
        self.squares, self.cosines = self.exact.new_zeros(2)

    def add(self, gradient: Tensor) -> None:
        gradient, group = gradient.double().flatten(), int(self.counts.sum()) % GROUPS
        self.sums[group] += gradient
        self.counts[group] += 1
        square = gradient @ gradient
        self.squares += square
        self.cosines += gradient @ self.exact / square.sqrt()

    def figures(self) -> dict[str, float]:
        count, norm = self.counts.sum(), self.exact.norm()
        mean = self.sums.sum(dim=0) / count
        variance = (self.squares - count * (mean @ mean)) / (count - 1)
        chance = variance / count  # expected share of noise in the square of a mean of `count` gradients
        length = (mean @ mean - chance).sqrt()  # NaN where the mean is nothing but noise
        figures = {
            "squared_bias": ((mean - self.exact).square().sum() - chance) / norm**2,
            "squared_bias_error": self._error() / norm**2,
            "variance": variance / norm**2,
            "length": length / norm,
            "cosine": mean @ self.exact / length / norm,
            "batch_cosine": self.cosines / count / norm,
            "exact_norm": norm,
        }
        return {name: figure.item() for name, figure in figures.items()}

    def _error(self) -> Tensor:
        """The standard error of the squared bias, by a jackknife that leaves out each group in turn: the expected
        product of two different groups' mean deviations is the squared bias."""
        deviations = self.sums / self.counts - self.exact
        products = (deviations @ deviations.T).fill_diagonal_(0)
        left_out = (products.sum() - 2 * products.sum(dim=0)) / ((GROUPS - 1) * (GROUPS - 2))
        return ((GROUPS - 1) * left_out.var(correction=0)).sqrt()


# --- As a job ---------------------------------------------------------------------------------------------------------


def run(settings: Mapping[str, str]) -> list[dict[str, float]]:
    """Run the job of an experiment. It writes nothing; a killed job starts again from the beginning.

    `settings` are the recipe, flags of `neuclip train`, and

    - gradient.moments: samples seen, such as 39k,78k
    - gradient.batches: how many random batches
    - gradient.estimators: name -> flags of its objective, in JSON: {"queue": {"objective": "neuclip",
      "objective.restart": "rolling", "objective.inner_steps": 0}}. Other settings are the recipe's. With
      "sees_batch": false the gradient uses the state from before the batch
    """
    flags = dict(settings)
    recipe, estimators = flags.pop("recipe"), json.loads(flags.pop("gradient.estimators"))
    batches, moments = flags.pop("gradient.batches"), flags.pop("gradient.moments").split(",")
    return gradient_figures(
        as_typed(recipe, flags),
        {name: read_estimator(recipe, own) for name, own in estimators.items()},
        batches=int(batches),
        moments=[parse_whole(moment) for moment in moments],
    )


def as_typed(recipe: str, flags: Mapping[str, Any]) -> Settings:
    return read_settings(Path(recipe), [f"--{key}={value}" for key, value in flags.items()])


def read_estimator(recipe: str, given: Mapping[str, Any]) -> Estimator:
    flags = dict(given)
    sees_batch = flags.pop("sees_batch", True)
    if flags["objective"] == EXACT:
        flags |= {"objective": "clip", "objective.form": "minibatch"}
    return Estimator(given["objective"], as_typed(recipe, flags).objective, sees_batch)
