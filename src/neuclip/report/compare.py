"""Runs and results side by side: one self-contained HTML page, or the same as Markdown, LaTeX or CSV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from neuclip.errors import RunFailed, UserError
from neuclip.files import write_text
from neuclip.report.compare_curves import ERROR_MEANING, all_curves
from neuclip.report.compare_inputs import Group, different_settings, group_members, read_member
from neuclip.report.compare_notices import all_notices, held_out_sizes
from neuclip.report.compare_scores import (
    ERROR,
    Score,
    Target,
    all_targets,
    final_scores,
    incomplete_averages,
    rare_evaluations,
)
from neuclip.report.compare_tables import (
    BEST_RULE,
    HTML,
    LATEX,
    MARKDOWN,
    Style,
    escape_table,
    figures_csv,
    groups_table,
    latex_table,
    markdown_table,
    reach_table,
    score_table,
    seeds_table,
    settings_table,
)
from neuclip.report.evaluations import DEFINITION, DIFFERENT_DEFINITION
from neuclip.report.page import TEMPLATES, own_file, security_policy
from neuclip.report.tables import Table

MOST_NAMES = 4  # in the title


@dataclass(frozen=True)
class Comparison:
    """Groups of runs, and what follows from them."""

    groups: list[Group]

    @cached_property
    def scores(self) -> list[Score]:
        return final_scores(self.groups)

    @cached_property
    def targets(self) -> list[Target]:
        return all_targets(self.groups)

    @cached_property
    def notices(self) -> list[str]:
        return all_notices(self.groups)

    @property
    def title(self) -> str:
        names = [group.name for group in self.groups]
        return ", ".join(names) if len(names) <= MOST_NAMES else f"{', '.join(names[:MOST_NAMES])}, ..."

    @property
    def notes(self) -> list[str]:
        """What the figures mean, and by which rule the best is marked."""
        several = any(len(group.counted) > 1 for group in self.groups)
        metrics = {score.measure.metric for score in self.scores}
        notes = ["± is the standard deviation over n runs (n − 1 in its denominator)."] if several else []
        notes += [BEST_RULE] if len(self.groups) > 1 else []
        notes += held_out_sizes(self.groups)
        if any("_recall_at_" in metric for metric in metrics):
            notes.append(f"Recall@k: {DEFINITION}.")
        if any("different_text" in metric for metric in metrics):
            notes.append(f"{DIFFERENT_DEFINITION[0].upper()}{DIFFERENT_DEFINITION[1:]}.")
        notes += [f"Normalizer error: {ERROR_MEANING[0].lower()}{ERROR_MEANING[1:]}"] if ERROR in metrics else []
        return notes + incomplete_averages(self.groups)

    @property
    def reach_notes(self) -> list[str]:
        notes = [
            "The first evaluation at which the mean over the runs is at or above the score; nothing is interpolated. "
            "“Or before”: it was the first evaluation of all."
        ]
        return notes + rare_evaluations(self.targets, self.groups)


def compare(paths: Sequence[Path]) -> Comparison:
    """Read runs and files of task results; runs that differ only in their seed become one group.

    >>> compare([Path("runs/clip"), Path("runs/neuclip")]).title  # doctest: +SKIP
    'clip, neuclip'
    """
    places = [path.resolve() for path in paths]
    for path, place in zip(paths, places, strict=True):
        if places.count(place) > 1:
            raise UserError(f"{path} is given twice; give each run once")
    return Comparison(group_members(read_member(path) for path in paths))


def main_tables(comparison: Comparison, style: Style) -> list[Table]:
    """One of held-out sets and normalizers, one of tasks, where there are such figures."""
    scores = [score for score in comparison.scores if score.measure.main]
    kinds = {
        "Main figures": [score for score in scores if not score.measure.of_task],
        "Tasks": [score for score in scores if score.measure.of_task],
    }
    return [score_table(caption, comparison.groups, ours, style) for caption, ours in kinds.items() if ours]


def more_table(comparison: Comparison, style: Style) -> Table:
    others = [score for score in comparison.scores if not score.measure.main]
    return score_table("More figures", comparison.groups, others, style)


def render_html(comparison: Comparison) -> str:
    script, groups = own_file("hover.js"), comparison.groups
    return TEMPLATES.get_template("compare.html").render(
        comparison=comparison,
        style=own_file("style.css"),
        script=script,
        policy=security_policy(script),
        groups_table=groups_table(groups),
        main_tables=main_tables(comparison, HTML),
        more_table=more_table(comparison, HTML),
        figures=all_curves(groups),
        reach_table=reach_table(groups, comparison.targets),
        settings_table=settings_table(groups),
        seeds_table=seeds_table(groups, comparison.scores),
    )


def render_markdown(comparison: Comparison) -> str:
    """The page without its curves."""
    groups = comparison.groups
    parts = [f"# {MARKDOWN.text(comparison.title)}\n"]
    parts += [f"> {MARKDOWN.text(notice)}\n" for notice in comparison.notices]
    plain = [reach_table(groups, comparison.targets), settings_table(groups), seeds_table(groups, comparison.scores)]
    tables = [escape_table(groups_table(groups), MARKDOWN), *main_tables(comparison, MARKDOWN)]
    tables.append(more_table(comparison, MARKDOWN))
    for table in [*tables, *(escape_table(table, MARKDOWN) for table in plain)]:
        if table.rows:
            parts += [f"## {table.caption}\n", markdown_table(table)]
    notes = [*comparison.notes, *(comparison.reach_notes if comparison.targets else [])]
    return "\n".join([*parts, *(f"- {MARKDOWN.text(note)}" for note in notes)]) + "\n"


def render_latex(comparison: Comparison) -> str:
    """The main figures, for a paper: needs the package booktabs. Notes and warnings are comments above."""
    notes = [r"\usepackage{booktabs}", *comparison.notices, *comparison.notes]
    comments = "".join(f"% {' '.join(note.split())}\n" for note in notes)
    return comments + "\n".join(latex_table(table) for table in main_tables(comparison, LATEX))


RENDERERS: dict[str, Callable[[Comparison], str]] = {
    ".html": render_html,
    ".md": render_markdown,
    ".tex": render_latex,
    ".csv": lambda comparison: figures_csv(comparison.groups),
}


def renderer_of(path: Path) -> Callable[[Comparison], str]:
    """By the end of the file's name; UserError for another."""
    if path.suffix.lower() not in RENDERERS:
        raise UserError(f"--output {path}: give a name that ends in {', '.join(RENDERERS)}")
    return RENDERERS[path.suffix.lower()]


def write_comparison(comparison: Comparison, path: Path) -> None:
    text = renderer_of(path)(comparison)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    except OSError as error:
        raise RunFailed(f"cannot write {path}: {error.strerror}; give another --output") from error


def comparison_as_dict(comparison: Comparison) -> dict[str, Any]:
    """For `--json`: every value, nothing rounded."""
    names = [group.name for group in comparison.groups]
    return {
        "groups": [
            {
                "name": group.name,
                "runs": [
                    {"name": one.name, "path": str(one.path), "seed": one.seed or None, "finished": one.finished}
                    for one in group.members
                ],
            }
            for group in comparison.groups
        ],
        "figures": [
            {
                "dataset": score.measure.dataset,
                "metric": score.measure.metric,
                "best": None if score.best is None else names[score.best],
                "groups": {
                    name: {"mean": spread.mean, "standard_deviation": spread.deviation, "values": spread.values}
                    for name, spread in zip(names, score.spreads, strict=True)
                    if spread
                },
            }
            for score in comparison.scores
        ],
        "reached": [
            {
                "dataset": target.measure.dataset,
                "metric": target.measure.metric,
                "final_of": target.group.name,
                "score": target.score,
                "samples": {
                    name: reached.samples for name, reached in zip(names, target.reached, strict=True) if reached
                },
            }
            for target in comparison.targets
        ],
        "settings": {
            name: dict(zip(names, values, strict=True))
            for name, values in different_settings(comparison.groups).items()
        },
        "notices": comparison.notices,
    }
