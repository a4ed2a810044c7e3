"""Which settings exist: their sections, fields and declared types, found from the dataclasses alone."""

from __future__ import annotations

from dataclasses import Field, fields
from functools import cache
from typing import Any, get_type_hints

from neuclip.errors import UserError
from neuclip.settings.nearest import any_of, nearest, proposal
from neuclip.settings.objectives import OBJECTIVES, ObjectiveSettings
from neuclip.settings.sections import Settings
from neuclip.settings.values import RawValue

OBJECTIVE_KEY = "objective.name"
SECTION_NAMES = (
    "run",
    "data",
    "model",
    "objective",
    "optimizer",
    "temperature",
    "train",
    "evaluation",
    "checkpoint",
    "log",
)


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


def declared_type(given: RawValue, objective: str) -> Any:
    """The type of a given key, or the error that names the nearest one."""
    types = declared_types(objective)
    if given.key in types:
        return types[given.key]
    owners = [name for name in OBJECTIVES if given.key in declared_types(name)]
    if owners:
        raise given.wrong(
            f"{given.key} belongs to objective {owners[0]}, but the objective is {objective}; "
            f"choose objective {owners[0]} or leave it out"
        )
    raise unknown(given, objective)


def unknown(given: RawValue, objective: str) -> UserError:
    dashes = "" if given.place else "--"
    section = given.key.partition(".")[0]
    siblings = [key for key in [OBJECTIVE_KEY, *declared_types(objective)] if key.startswith(f"{section}.")]
    if given.key in SECTION_NAMES:
        return given.wrong(f"{given.key} is a section; its fields are {', '.join(dashes + key for key in siblings)}")
    if isinstance(given.value, dict):  # a section of a recipe
        return given.wrong(f"{given.key} is not a section; {proposal(given.key, SECTION_NAMES)}")
    near = [dashes + key for key in nearest_keys(given.key)]
    if near:
        return given.wrong(f"{given.key} is not a setting; did you mean {any_of(near)}?")
    if siblings:
        return given.wrong(f"{given.key} is not a setting; {section} has {', '.join(dashes + key for key in siblings)}")
    return given.wrong(f"{given.key} is not a setting; the sections are {', '.join(SECTION_NAMES)}")


def nearest_keys(key: str) -> list[str]:
    """At most two keys that were probably meant, the likelier first.

    Near are, in this order: a field of the same section, the same field elsewhere, a similar spelling elsewhere.

    >>> nearest_keys("batch_size")
    ['train.batch_size', 'evaluation.batch_size']
    """
    section, _, field = key.rpartition(".")
    section = section if section in SECTION_NAMES else nearest(section, SECTION_NAMES)
    known = list(dict.fromkeys(key for name in OBJECTIVES for key in [OBJECTIVE_KEY, *declared_types(name)]))
    siblings = {other.partition(".")[2]: other for other in known if other.startswith(f"{section}.")}
    meant = [name for name in siblings if is_called(field, name)] or [nearest(field, siblings)]
    if meant[0]:
        return [siblings[meant[0]]]
    namesakes = [other for other in known if is_called(field, other.partition(".")[2])]
    fields = {other.partition(".")[2]: other for other in reversed(known)}
    alike = nearest(field, fields)
    return namesakes[:2] or ([fields[alike]] if alike else [])


def is_called(word: str, field: str) -> bool:
    """By its name, or by its initials: lr, wd."""
    return word == field or (len(word) > 1 and word == "".join(part[0] for part in field.split("_") if part))


def changed_fields(before: Settings, after: Settings) -> list[str]:
    """The keys in which two runs differ: ['objective.name', 'train.samples']."""
    if before.objective_name != after.objective_name:
        return [OBJECTIVE_KEY]
    keys = declared_types(before.objective_name)
    return [key for key in keys if _value(before, key) != _value(after, key)]


def _value(settings: Settings, key: str) -> Any:
    section, _, field = key.partition(".")
    return getattr(getattr(settings, section), field)
