"""Writes settings: complete and readable YAML that is read back equal."""

from __future__ import annotations

from typing import Any

import yaml

from neuclip.settings.keys import SECTION_NAMES, section_fields
from neuclip.settings.sections import Settings

HEADER = "# All settings of one run. To repeat the run: neuclip train settings.yaml --run.name ANOTHER_NAME\n"


def settings_as_dict(settings: Settings) -> dict[str, dict[str, Any]]:
    """All sections with all fields, in the order of the help; the objective's name is the first of its fields."""
    sections = {
        section: {
            field.name: getattr(getattr(settings, section), field.name)
            for field, _ in section_fields(section, settings.objective_name)
        }
        for section in SECTION_NAMES
    }
    return sections | {"objective": {"name": settings.objective_name, **sections["objective"]}}


def settings_as_yaml(settings: Settings) -> str:
    text = HEADER
    for section, values in settings_as_dict(settings).items():
        text += f"\n{section}:\n" + "".join(f"  {field}: {scalar(value)}\n" for field, value in values.items())
    return text


def scalar(value: Any) -> str:
    """One value on one line, quoted where plain YAML readers would otherwise take it for something else."""
    value = list(value) if isinstance(value, tuple) else value
    texts = [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]
    printable = all(text.isprintable() for text in texts)
    # Line breaks and their like must be escaped: between single quotes PyYAML reads U+0085 back as a space.
    style: dict[str, Any] = {"allow_unicode": True} if printable else {"default_style": '"', "allow_unicode": False}
    text: str = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), **style)
    return text.removesuffix("\n").removesuffix("\n...")
