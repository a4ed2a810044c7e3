"""What a reader must know before comparing: other data, other measurements, unfinished and repeated runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from neuclip.report.compare_inputs import Group, held_out_sets
from neuclip.report.contents import as_dict, number

MOST_NAMES = 4  # of tasks in one sentence


def all_notices(groups: Sequence[Group]) -> list[str]:
    """The most important first."""
    notices = [*data_notices(groups), *held_out_notices(groups), *task_notices(groups), *eps_notices(groups)]
    for group in groups:
        for member in group.members:
            notices += [f"{member.name}: {text}." for text in member.notices]
            if not member.finished and member.contents:
                seen, planned = member.contents.samples_seen, member.contents.samples_planned
                of_planned = f" of {planned:,.0f}" if planned else ""
                left_out = ", and it is left out of the mean" if member not in group.counted else ""
                notices.append(f"{member.name} has not finished: {seen:,.0f}{of_planned} samples seen{left_out}.")
        seeds = [member.seed for member in group.members if member.seed]
        if repeated := sorted({seed for seed in seeds if seeds.count(seed) > 1}):
            notices.append(
                f"{group.name} has seed {', '.join(repeated)} more than once: its spread is not that of seeds."
            )
    return notices


def data_notices(groups: Sequence[Group]) -> list[str]:
    """By the fingerprint where it is known, as the same data may lie in two places; otherwise by the address."""
    same: list[list[Group]] = []
    for group in groups:
        if group.runs:
            like = next((ours for ours in same if same_data(ours[0], group)), None)
            if like is None:
                same.append([group])
            else:
                like.append(group)
    if len(same) < 2:
        return [
            f"The runs of {group.name} were trained on different data: their spread is not that of seeds."
            for group in groups
            if len(fingerprints(group)) > 1 and group.members[0].settings.get("data.hold_out", "0") == "0"
        ]
    kinds = "; ".join(f"{', '.join(group.letter for group in ours)}: {describe_data(ours[0])}" for ours in same)
    return [f"The runs were trained on different data, which may explain every difference below ({kinds})."]


def same_data(one: Group, other: Group) -> bool:
    hashes, others = fingerprints(one), fingerprints(other)
    return bool(hashes & others) if hashes and others else data_of(one) == data_of(other)


def fingerprints(group: Group) -> set[str]:
    """One per seed where part of the data is held out, as the seed chooses it."""
    found = (as_dict(run.environment.get("data")).get("sha256") for run in group.runs)
    return {text for text in found if isinstance(text, str)}


def data_of(group: Group) -> str:
    return group.members[0].settings.get("data.train", "unknown")


def describe_data(group: Group) -> str:
    known = sorted(fingerprints(group))
    return data_of(group) + (f", fingerprint {known[0][:8]}" if known else "")


def held_out_notices(groups: Sequence[Group]) -> list[str]:
    return [
        f"{name} is not the same set in all runs ({'; '.join(sizes)}): its figures cannot be compared."
        for name, sizes in different_held_out(groups).items()
    ]


def different_held_out(groups: Sequence[Group]) -> dict[str, list[str]]:
    """Held-out sets of one name and several sizes, which are different sets: each size, and a run that has it."""
    sizes: dict[str, dict[str, str]] = {}
    for member in (member for group in groups for member in group.members):
        for one in held_out_sets(member):
            counts = {noun: one[noun] for noun in ("images", "captions", "classes")}
            size = ", ".join(f"{count:,.0f} {noun}" for noun, count in counts.items() if count is not None)
            sizes.setdefault(one.name, {}).setdefault(size, member.name)
    return {
        name: [f"{size} in {member}" for size, member in by_size.items()]
        for name, by_size in sizes.items()
        if len(by_size) > 1
    }


def held_out_sizes(groups: Sequence[Group]) -> list[str]:
    """'Held out: shop (1,000 images, 5,000 captions, 5 per image), kinds (261 images).' without those that differ."""
    members = [member for group in groups for member in group.counted]
    sizes = {one.name: one.size for member in members for one in held_out_sets(member) if one.size}
    different = different_held_out(groups)
    known = [f"{name} ({size})" for name, size in sizes.items() if name not in different]
    return [f"Held out: {', '.join(known)}."] if known else []


def task_notices(groups: Sequence[Group]) -> list[str]:
    """One sentence for all tasks that differ in the same way."""
    keys: dict[str, list[str]] = {}
    for key, what in different_tasks(groups).items():
        keys.setdefault(what, []).append(key)
    return [
        f"{', '.join(ours[:MOST_NAMES])}{f' and {len(ours) - MOST_NAMES} more' if len(ours) > MOST_NAMES else ''} "
        f"measured {what}: these figures cannot be compared."
        for what, ours in keys.items()
    ]


def different_tasks(groups: Sequence[Group]) -> dict[str, str]:
    """Tasks that were not measured in the same way everywhere, by key, and what differs."""
    found: dict[str, str] = {}
    for what in ("switches", "data"):  # the switches are the likelier reason
        first: dict[str, tuple[Any, str]] = {}
        for member in (member for group in groups for member in group.members):
            for key, result in member.tasks.items():
                if what in result.meta:
                    value, name = first.setdefault(key, (result.meta[what], member.name))
                    if value != result.meta[what]:
                        found.setdefault(key, f"with different {what} in {name} and {member.name}")
    return found


def eps_notices(groups: Sequence[Group]) -> list[str]:
    by_eps = different_eps(groups)
    values = ", ".join(f"{eps:g} in {letter}" for eps, letter in by_eps.items())
    sentence = (
        f"The normalizer errors were measured with different eps ({values}) and cannot be compared; "
        "`neuclip error RUN...` measures several runs with one eps."
    )
    return [sentence] if by_eps else []


def different_eps(groups: Sequence[Group]) -> dict[float, str]:
    """Each eps of the normalizer error, with the letter of a group that has it; empty if all have the same."""
    by_eps: dict[float, str] = {}
    for group in groups:
        for run in group.runs:
            if (eps := number(as_dict(run.summary.get("normalizer_error")).get("eps"))) is not None:
                by_eps.setdefault(eps, group.letter)
    return by_eps if len(by_eps) > 1 else {}
