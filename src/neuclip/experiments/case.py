"""The finished runs of one case of an experiment: which variant is best, the tables and the curves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import NamedTuple

from neuclip.experiments.definition import Experiment, Job
from neuclip.experiments.records import Records, member
from neuclip.formatting import UNKNOWN, percent
from neuclip.report.charts import Chart, group_lines
from neuclip.report.compare import Comparison, Difference, Group
from neuclip.report.compare_page import DEVIATION, decimals, difference_text, drawable, figure_cell
from neuclip.report.measures import (
    DEFINITION,
    DIFFERENT_DEFINITION,
    ERROR_KEY,
    SPEED,
    Measure,
    error_chart,
    evaluation_lines,
    measure_chart,
)
from neuclip.report.page import Cell, Table

RESTART = "objective.restart_every"
SMALLEST, WITHOUT_NETWORK = "CLIP", "mini-batch form"  # the variants that memory and time are compared with
AHEAD, BEHIND, LEVEL = "ahead of", "behind", "not shown to differ from"
SUMMARY = {  # figures of a run: the column's head, decimals and factor
    "calibration": ("calibration", 2, 1.0),
    "temperature": ("τ", 3, 1.0),
    "samples_per_second": ("samples per second", 0, 1.0),
    "normalizer_share": ("time in the loss, %", 0, 100.0),
    "peak_memory_bytes": ("peak memory, MB", 0, 1e-6),
}


@dataclass(frozen=True)
class Case:
    """The finished runs of one case."""

    name: str
    groups: Sequence[Group]
    against: Sequence[str]
    metric: str
    planned: int  # runs, finished or not

    @property
    def finished(self) -> int:
        return sum(len(group.members) for group in self.groups)

    @cached_property
    def comparison(self) -> Comparison:
        return Comparison(self.groups)

    @cached_property
    def measure(self) -> Measure:
        """The experiment's measure, on the first data set that has it."""
        return next(one for one in self.comparison.measures if self.metric in (one.metric, one.key))

    @cached_property
    def baselines(self) -> dict[str, Comparison]:
        names = [group.name for group in self.groups]
        chosen = [name for name in self.against if name in names]
        return {name: Comparison(self.groups, against=name, measure=self.measure.key) for name in chosen}

    @cached_property
    def best(self) -> Group:
        """The best variant among those with most seeds. Baselines count only if there is nothing else."""
        own = [group for group in self.groups if group.name not in self.against] or self.groups
        most = max(len(group.counted) for group in own)
        compared = [group for group in own if len(group.counted) == most]
        return max(compared, key=lambda group: self.measure.better * fmean(group.values(self.measure)))

    @property
    def best_figure(self) -> str:
        return self.measure.text(fmean(self.best.values(self.measure)))

    def differences(self, group: Group) -> dict[str, Difference]:
        """The differences to each baseline that has enough common seeds."""
        gaps = {name: one.difference(group, self.measure) for name, one in self.baselines.items()}
        return {name: gap for name, gap in gaps.items() if gap}

    def standing(self) -> dict[str, dict[str, Difference]]:
        """The baselines that the best variant is ahead of, behind, or not shown to differ from."""
        found: dict[str, dict[str, Difference]] = {AHEAD: {}, BEHIND: {}, LEVEL: {}}
        for name, gap in self.differences(self.best).items():
            side = AHEAD if self.measure.better * gap.mean > 0 else BEHIND
            found[side if gap.is_shown else LEVEL][name] = gap
        return found

    def answer(self) -> str:
        """One sentence: which variant is best, and by how much."""
        so_far = f" ({self.finished} of {self.planned} runs so far)" if self.finished < self.planned else ""
        if len(self.groups) < 2:
            return f"{self.name}{so_far}: nothing to compare yet."
        if self.measure == SPEED:
            costs, alone = step_costs(self.groups), (SMALLEST, WITHOUT_NETWORK)
            shares = [f"{own.share} in {name}" for name, own in costs.items() if name not in alone]
            return f"{self.name}{so_far}: of a step, the network takes {', '.join(shares)}."
        parts = [
            f"{self.name}{so_far}: {self.best.name} is best, {self.measure.words.partition(',')[0]} {self.best_figure}"
        ]
        places = decimals(self.best.values(self.measure), self.measure)
        for words, gaps in self.standing().items():
            named = [f"{name} ({difference_text(gap, self.measure, places)})" for name, gap in gaps.items()]
            parts += [f"{words} {', '.join(named)}"] if named else []
        return "; ".join(parts) + "."

    def tables(self) -> list[Table]:
        """The table of the experiment's measure, then the other figures."""
        if self.measure == SPEED:
            return [cost_table(self.groups)]
        return [self._table(), self._more()]

    def _table(self) -> Table:
        """One row per variant: the experiment's measure with its differences to the baselines."""
        head = ["variant", "seeds", self.measure.words, *(f"to {name}" for name in self.baselines)]
        rows: list[list[str | Cell]] = []
        for group in self.groups:
            gaps, places = self.differences(group), decimals(group.values(self.measure), self.measure)
            cells = [
                Cell(difference_text(gap, self.measure, places), strong=gap.is_shown) if gap else Cell(UNKNOWN)
                for gap in map(gaps.get, self.baselines)
            ]
            rows.append([group.name, str(len(group.counted)), self._cell(group, self.measure), *cells])
        return Table("", head, rows, 1, list(self.notes()))

    def _more(self) -> Table:
        """The other figures, without verdict."""
        others = self._others()
        runs = [run for group in self.groups for run in group.runs]
        known = [key for key in SUMMARY if any(run.number(key) is not None for run in runs)]
        words = [one.words.replace(", different captions", "") for one in others]
        rows: list[list[str | Cell]] = []
        for group in self.groups:
            values = [[value for run in group.runs if (value := run.number(key)) is not None] for key in known]
            summary = [
                f"{SUMMARY[key][2] * fmean(found):,.{SUMMARY[key][1]}f}" if found else UNKNOWN
                for key, found in zip(known, values, strict=True)
            ]
            rows.append([group.name, *(self._cell(group, one) for one in others), *summary])
        return Table("Other figures", ["variant", *words, *(SUMMARY[key][0] for key in known)], rows)

    def _cell(self, group: Group, measure: Measure) -> Cell:
        return figure_cell(self.comparison, group, measure)._replace(note="", strong=False)

    def _others(self) -> list[Measure]:
        """Recall at 1 and 10, over different captions where there are any, accuracy and the normalizer error."""
        shown = [one for one in self.comparison.measures if one.better and (one.main or one.metric.endswith("_at_10"))]
        if any("different" in one.metric for one in shown):
            shown = [one for one in shown if not one.of_retrieval]
        return [one for one in shown if one != self.measure]

    def notes(self) -> Iterator[str]:
        if self.finished < self.planned:
            yield f"{self.finished} of {self.planned} planned runs have finished."
        if any(len(group.counted) > 1 for group in self.groups):
            yield DEVIATION
        if any(self.differences(group) for group in self.groups):
            corrected = (
                f", corrected for {len(self.groups) - 1} comparisons (Bonferroni)" if len(self.groups) > 2 else ""
            )
            yield (
                f"Differences are means over the seeds that both have, with 95 % intervals: Student's t, paired by seed"
                f"{corrected}. Only {self.measure.words} was chosen beforehand; bold: the interval excludes zero."
            )
        if any("different" in one.metric for one in self.comparison.measures):
            yield f"{DEFINITION}; {DIFFERENT_DEFINITION}."

    def charts(self, across: str = "") -> list[Chart]:
        evaluations = {group.name: [run.evaluations for run in group.runs] for group in self.groups}
        curves = [error_chart(evaluation_lines(ERROR_KEY, evaluations))]
        if self.measure.percent:  # the error has its own
            curves.insert(0, replace(measure_chart(self.measure, evaluations), from_zero=False))
        return ([self._chart_across(across)] if across else []) + drawable(curves)

    def _chart_across(self, setting: str) -> Chart:
        """The final figure over the values of one setting, each seed thin and the mean thick. A line joins runs whose
        other settings are equal, except for the restart interval, which is scaled with the number of prototypes."""
        names: dict[str, dict[str, float]] = {}  # line -> its variants with their values of the setting
        curves: dict[str, dict[int | None, list[tuple[float, float]]]] = {}  # line -> seed -> points
        for group in self.groups:
            for one in group.counted:
                others = {key: value for key, value in one.settings.items() if not key.startswith("run.")}
                value = others.pop(setting, None)
                never = setting == RESTART and not value  # 0 means never, which has no place on the axis
                others.pop(RESTART, None)
                if value is not None and not never and self.measure in one.figures:
                    line = str(sorted(others.items()))
                    names.setdefault(line, {})[group.name] = float(value)
                    curves.setdefault(line, {}).setdefault(one.seed, []).append(
                        (float(value), one.figures[self.measure])
                    )
        drawn = {}
        for line, own in names.items():
            first, *_, last = sorted(own, key=own.__getitem__) if len(own) > 1 else ("", "")
            if first:
                drawn[f"{first} to {last}"] = [sorted(points) for points in curves[line].values()]
        return Chart(
            title=f"{self.measure.words} over {setting}",
            unit=self.measure.words.partition(",")[0],  # short enough to fit below the chart
            lines=group_lines(drawn),
            from_zero=False,
            across=setting.rpartition(".")[2],
            percent=self.measure.percent,
            dots=True,
        )


class StepCost(NamedTuple):
    """The cost of one step: milliseconds in all, in the objective's forward pass and in the network; megabytes."""

    step: float
    loss: float
    memory: float
    network: float = 0.0

    @property
    def share(self) -> str:
        """The network's share of a step's time."""
        return percent(self.network / self.step) if self.step else UNKNOWN


def step_costs(groups: Sequence[Group]) -> dict[str, StepCost]:
    """The mean cost over the runs of each variant. The network's time is the loss's time minus that of the same loss
    without a network."""
    costs = {}
    for group in groups:
        rows = []
        for run in group.runs:
            speed, share, memory = map(
                run.number, ("steady_samples_per_second", "normalizer_share", "peak_memory_bytes")
            )
            step = 1000 * run.settings["train.batch_size"] / speed if speed else 0.0
            rows.append((step, step * (share or 0.0), (memory or 0.0) / 1e6))
        costs[group.name] = StepCost(*(fmean(column) for column in zip(*rows, strict=True)))
    return {name: own._replace(network=own.loss - costs.get(WITHOUT_NETWORK, own).loss) for name, own in costs.items()}


def cost_table(groups: Sequence[Group]) -> Table:
    """Time and memory of a step, as in the paper's Tables 5 and 6."""
    costs, rows = step_costs(groups), []
    for name, own in costs.items():
        times = [f"{time:.1f}" for time in (own.step, own.loss, own.network)]
        memory = percent(own.memory / costs.get(SMALLEST, own).memory - 1) if own.memory else UNKNOWN
        rows.append([name, *times, own.share, f"{own.memory:,.0f}", memory])
    head = ["variant", "step, ms", "loss with network, ms", "network, ms", "share of the step", "peak memory, MB"]
    note = (
        f"The network's time is what the loss takes beyond that of the {WITHOUT_NETWORK}, the same loss without a "
        "network; its backward pass into the encoders is not in it. Memory is that of the whole process."
    )
    return Table("", [*head, f"to {SMALLEST}"], rows, 1, [note])


def finished_cases(experiment: Experiment, jobs: Sequence[Job], records: Records, metric: str) -> list[Case]:
    """The cases with a finished run that has the experiment's measure."""
    cases = []
    for name in dict.fromkeys(job.case for job in jobs):
        groups, planned = [], sum(job.case == name for job in jobs)
        for variant in dict.fromkeys(job.variant for job in jobs):
            own = [job for job in jobs if (job.case, job.variant) == (name, variant)]
            members = [member(job, records[job.key]) for job in own if is_finished(job, records)]
            if members:
                groups.append(Group(variant, members))
        if any(metric in (one.metric, one.key) for one in Comparison(groups).measures):
            cases.append(Case(name, groups, experiment.against, metric, planned))
    return cases


def is_finished(job: Job, records: Records) -> bool:
    return bool(records.get(job.key, {}).get("finished"))
