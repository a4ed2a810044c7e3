"""Which settings exist: sections, fields and declared types, taken from the dataclasses."""

from __future__ import annotations

from dataclasses import Field, fields
from functools import cache
from operator import attrgetter
from typing import Any, get_type_hints

from neuclip.errors import UserError
from neuclip.settings.nearest import any_of, nearest, proposal
from neuclip.settings.objectives import OBJECTIVES, ObjectiveSettings
from neuclip.settings.sections import Settings
from neuclip.settings.values import RawValue

OBJECTIVE_KEY = "objective.name"
SECTION_NAMES = tuple(field.name for field in fields(Settings) if field.name != "objective_name")


@cache
def section_type(section: str, objective: str) -> type:
    """The dataclass of a section; that of `objective` depends on the objective's name."""
    return OBJECTIVES[objective] if section == "objective" else get_type_hints(Settings)[section]


def section_fields(section: str, objective: str) -> list[tuple[Field[Any], Any]]:
    """Each field of a section with its declared type, a method's own before what all methods have."""
    kind = section_type(section, objective)
    declared, shared = get_type_hints(kind), {field.name for field in fields(ObjectiveSettings)}
    return [(field, declared[field.name]) for field in sorted(fields(kind), key=lambda field: field.name in shared)]


@cache
def declared_types(objective: str) -> dict[str, Any]:
    """Every key of a run with this objective, and its type: {'train.batch_size': int, ...}."""
    return {
        f"{section}.{field.name}": declared
        for section in SECTION_NAMES
        for field, declared in section_fields(section, objective)
    }


def declared_type(raw: RawValue, objective: str) -> Any:
    """The type of a key, or the error that names the nearest one."""
    types = declared_types(objective)
    if raw.key in types:
        return types[raw.key]
    owners = [name for name in OBJECTIVES if raw.key in declared_types(name)]
    if owners:
        raise raw.error(
            f"{raw.key} belongs to objective {owners[0]}, but the objective is {objective}; "
            f"choose objective {owners[0]} or remove it"
        )
    raise unknown_key(raw, objective)


def unknown_key(raw: RawValue, objective: str) -> UserError:
    dashes = "" if raw.place else "--"
    section = raw.key.partition(".")[0]
    keys = [key for key in [OBJECTIVE_KEY, *declared_types(objective)] if key.startswith(f"{section}.")]
    siblings = ", ".join(dashes + key for key in keys)
    if raw.key in SECTION_NAMES:
        return raw.error(f"{raw.key} is a section; its fields are {siblings}")
    if isinstance(raw.value, dict):  # a section of a recipe
        return raw.error(f"{raw.key} is not a section; {proposal(raw.key, SECTION_NAMES)}")
    if near := [dashes + key for key in nearest_keys(raw.key)]:
        remedy = f"did you mean {any_of(near)}?"
    elif siblings:
        remedy = f"{section} has {siblings}"
    else:
        remedy = f"the sections are {', '.join(SECTION_NAMES)}"
    return raw.error(f"{raw.key} is not a setting; {remedy}")


def nearest_keys(key: str) -> list[str]:
    """At most two keys that were probably meant, the likelier first.

    In this order: a field of the same section, the same field elsewhere, a similar spelling elsewhere.

    >>> nearest_keys("batch_size")
    ['train.batch_size', 'evaluation.batch_size']
    """
    section, _, field = key.rpartition(".")
    section = section if section in SECTION_NAMES else nearest(section, SECTION_NAMES)
    known = list(dict.fromkeys(key for name in OBJECTIVES for key in [OBJECTIVE_KEY, *declared_types(name)]))
    namesakes = [other for other in known if is_called(field, other.partition(".")[2])]
    siblings = [other for other in known if other.startswith(f"{section}.")]
    same_section = [other for other in namesakes if other in siblings] or nearest_field(field, siblings)
    return same_section[:1] or namesakes[:2] or nearest_field(field, known)


def is_called(word: str, field: str) -> bool:
    """By its name, or by its initials: lr, wd."""
    return word == field or (len(word) > 1 and word == "".join(part[0] for part in field.split("_") if part))


def nearest_field(field: str, keys: list[str]) -> list[str]:
    """The first key whose field is spelled most like `field`, or none."""
    by_field = {key.partition(".")[2]: key for key in reversed(keys)}
    near = nearest(field, by_field)
    return [by_field[near]] if near else []


def changed_fields(before: Settings, after: Settings) -> list[str]:
    """The keys in which two runs differ: ['objective.name', 'train.samples']."""
    if before.objective_name != after.objective_name:
        return [OBJECTIVE_KEY]
    keys = declared_types(before.objective_name)
    return [key for key in keys if attrgetter(key)(before) != attrgetter(key)(after)]
