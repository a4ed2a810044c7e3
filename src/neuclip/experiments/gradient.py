"""Bias and variance of the gradient: how far each estimator's stochastic gradient is from the exact one of Eq. 1.

One run trains, driven by its own objective, and the others watch: they see the same pairs and update their state, so
that tables, prototypes and queues are as old as they would be. At each moment the exact gradient over the whole
training set is computed, and each estimator's gradient on some hundred random batches, one step from where the run is.

With the gradient h of one batch and the exact gradient e, all relative to |e|^2:

    squared bias = |E h - e|^2          variance = E |h - E h|^2          E |h - e|^2 is their sum

Batches are drawn uniformly, as the run itself draws its next one at the start of an epoch: moments at multiples of the
size of the data set show a moving average or a queue at the age it has in training.
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
from neuclip.errors import UserError
from neuclip.objectives.contrast import contrast
from neuclip.objectives.formulas import add_eps, unified_objective
from neuclip.objectives.objective import Objective, objective
from neuclip.objectives.pairs import Pairs
from neuclip.progress import say, track
from neuclip.runs.build import build_objective, build_run, open_training_source, resolve
from neuclip.settings.objectives import CLIPSettings, FastCLIPSettings, NeuCLIPSettings, ObjectiveSettings
from neuclip.settings.reading import read_settings
from neuclip.settings.sections import Settings
from neuclip.settings.values import parse_whole
from neuclip.training.large_batch import LargeBatch
from neuclip.training.loop import caption_ids, parallel, take_step
from neuclip.training.run import Run
from neuclip.training.stored_features import store_features

EXACT = "exact"  # the name of the estimator below, beside those of objectives
PRECISE = 10_000  # pairs, up to which everything is in float64: the exact gradient takes n^2 d products
ROWS = 4096  # that go through the heads together
GROUPS = 10  # of batches, from which the standard error is taken


class Estimator(NamedTuple):
    objective: str  # its name, or EXACT
    settings: ObjectiveSettings
    sees_batch: bool = True  # False: the batch whose gradient is taken is not in its state yet


Estimators = Mapping[str, Estimator]


def gradient_figures(
    settings: Settings, estimators: Estimators, *, batches: int = 200, moments: Sequence[int]
) -> list[dict[str, float]]:
    """One line of figures per moment, which is a number of samples seen; 0 is before the first step.

    Of each estimator, by its name, for the gradient in the two head matrices: `squared_bias` and its standard error
    `squared_bias_error`; `variance`; the expected gradient's `length`, relative to the exact one, and its `cosine` with
    it, above 1 only by chance; the mean `batch_cosine` of one batch's gradient; `exact_norm`. For the temperature:
    `tau_squared_bias`, `tau_variance`. Each is compared with Eq. 1 at its own eps and rho. AdamW hardly notices the
    length of gradients: for it 1 - cosine^2 and variance / length^2 count.

    >>> queue = NeuCLIPSettings(restart="rolling", inner_steps=0, num_prototypes=1024)
    >>> gradient_figures(settings, {"queue": Estimator("neuclip", queue)}, moments=[39_000])        # doctest: +SKIP
    [{'samples': 39000, 'temperature': 0.05, 'pairs': 39000, 'queue.squared_bias': 0.21, 'queue.variance': 95.0, ...}]
    """
    refuse_other_objectives(estimators)
    if batches < GROUPS:
        raise UserError(f"{batches} batches say nothing about a variance; give {GROUPS} or more")
    settings = resolve(settings)
    run = build_run(settings, open_training_source(settings))
    store_features(run, StopRequest())
    refuse_other_runs(run, moments)
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


def refuse_other_objectives(estimators: Estimators) -> None:
    """Only what minimises Eq. 1 can be compared with its gradient."""
    for name, (_, own, _) in estimators.items():
        robust = isinstance(own, CLIPSettings) and own.form == "minibatch"
        moving = isinstance(own, FastCLIPSettings) and own.temperature != "individual"
        if not (robust or moving or isinstance(own, NeuCLIPSettings)):
            raise UserError(
                f"estimator {name} minimises another function than Eq. 1, so that its gradient has another goal; "
                f"give neuclip, fastclip with one temperature, clip with form minibatch, or {EXACT}"
            )


def refuse_other_runs(run: Run, moments: Sequence[int]) -> None:
    if len(run.stored) < 2:
        raise UserError(
            "the exact gradient needs stored features: lock both towers, as recipe locked does, without random crops, "
            f"and give --train.samples above {run.epoch_samples}"
        )
    if run.epoch_samples != len(run.source):
        raise UserError("data with weights have samples twice in an epoch; give data.train without weights")
    if not moments or min(moments) < 0 or max(moments) > run.plan.samples:
        raise UserError(f"moments are {list(moments)}; give numbers of samples from 0 to {run.plan.samples}")


def build_estimator(run: Run, own: Estimator) -> Objective:
    if own.objective == EXACT:
        return ExactNormalizers(**asdict(own.settings)).to(run.device)
    settings = replace(run.settings, objective_name=own.objective, objective=own.settings)
    return build_objective(settings, run.built, len(run.source), run.epoch_samples).to(run.device)


class Watched(nn.Module):
    """The driving objective, and others that see the same pairs: their state follows, their loss is dropped. Those that
    have no state need not look."""

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

    In train mode its batch is the whole data set: it remembers the alpha of each sample, and its gradient is then the
    exact one of Eq. 1, because the derivative of Eq. 12 in alpha is zero there. In eval mode it uses them.
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
    """All pairs of the training set as the present epoch draws them: of several captions one."""

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
    """One line. Changes nothing of the run: every batch meets a copy of the estimators' state, in eval mode where it
    stays unseen."""
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
    """Of each estimator, what its gradients of weights and of ln(1/tau) will be compared with: computed once for each
    eps and mask, because rho is in the second alone, where 2 tau rho has the derivative -2 tau rho."""
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
    """The trained part of the towers, from stored features to unit rows; inside `with` in another precision."""

    def __init__(self, run: Run, dtype: torch.dtype):
        self.run, self.dtype = run, dtype
        towers = run.built.towers
        self.weights = [*towers.locked["image"].head_parameters, *towers.locked["text"].head_parameters]
        self.log_scale: nn.Parameter = towers.model.logit_scale
        self.encode = LargeBatch(towers.train(), micro_batch_size=ROWS)

    def gradient(self, objective: nn.Module, data: DataSet) -> tuple[Tensor, Tensor]:  # (p,), ()
        """Of the objective on these pairs, in the weights and in ln(1/tau)."""
        image, text, scale, *_ = self.encode(data.images.to(self.dtype), data.texts.to(self.dtype))
        loss = objective(image, text, scale, **data.ids)
        *weights, log_scale = torch.autograd.grad(loss, [*self.weights, self.log_scale])
        return torch.cat([gradient.flatten() for gradient in weights]), log_scale

    def __enter__(self) -> Heads:
        self._convert(self.dtype)
        return self

    def __exit__(self, *_: object) -> None:
        self._convert(torch.float32)  # float64 has kept every bit of it

    def _convert(self, dtype: torch.dtype) -> None:
        for parameter in (*self.weights, self.log_scale):
            parameter.data = parameter.data.to(dtype)


class GradientSample:
    """Gradients of random batches beside the exact one; sums only, in float64."""

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
        chance = variance / count  # what is in the square of a mean of so many by chance
        length = (mean @ mean - chance).sqrt()  # no number where chance is all there is
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
        """The standard error of the squared bias, by a jackknife: products of different groups' mean deviations have it
        as their expectation, and each group is left out in turn."""
        deviations = self.sums / self.counts - self.exact
        products = (deviations @ deviations.T).fill_diagonal_(0)
        left_out = (products.sum() - 2 * products.sum(dim=0)) / ((GROUPS - 1) * (GROUPS - 2))
        return ((GROUPS - 1) * left_out.var(correction=0)).sqrt()


# --- As a job ---------------------------------------------------------------------------------------------------------


def run(settings: Mapping[str, str]) -> list[dict[str, float]]:
    """The job of an experiment; nothing is written, and a job that was killed starts again. `settings` are the flags of
    `neuclip train`, its recipe, and

    - gradient.moments: samples seen, such as 39k,78k
    - gradient.batches: how many random batches
    - gradient.estimators: by name the objective of each, as flags in JSON: {"queue": {"objective": "neuclip",
      "objective.restart": "rolling", "objective.inner_steps": 0}}; what they leave out is the recipe's. With
      "sees_batch": false the gradient is that of the state before the batch
    """
    given = dict(settings)
    recipe, estimators = given.pop("recipe"), json.loads(given.pop("gradient.estimators"))
    batches, moments = given.pop("gradient.batches"), given.pop("gradient.moments").split(",")
    return gradient_figures(
        as_typed(recipe, given),
        {name: read_estimator(recipe, flags) for name, flags in estimators.items()},
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
