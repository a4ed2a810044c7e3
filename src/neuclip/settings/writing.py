"""Writes settings as YAML: complete, readable, and read back equal."""

from __future__ import annotations

from typing import Any

import yaml

from neuclip.settings.keys import SECTION_NAMES, section_fields
from neuclip.settings.sections import Settings

HEADER = "# The settings of one run, complete. To repeat the run: neuclip train settings.yaml --run.name ANOTHER_NAME\n"


def settings_as_yaml(settings: Settings) -> str:
    """All sections with all fields, in the order of the help."""
    parts = [HEADER]
    for section in SECTION_NAMES:
        given = getattr(settings, section)
        values = {
            field.name: getattr(given, field.name) for field, _ in section_fields(section, settings.objective_name)
        }
        if section == "objective":
            values = {"name": settings.objective_name, **values}
        parts.append(f"\n{section}:\n" + "".join(f"  {field}: {scalar(value)}\n" for field, value in values.items()))
    return "".join(parts)


def scalar(value: Any) -> str:
    """One value on one line, quoted where plain YAML readers would otherwise take it for something else."""
    value = list(value) if isinstance(value, tuple) else value
    texts = [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]
    printable = all(text.isprintable() for text in texts)
    # Line breaks and their like must be escaped: between single quotes PyYAML reads U+0085 back as a space.
    style: dict[str, Any] = {"allow_unicode": True} if printable else {"default_style": '"', "allow_unicode": False}
    text: str = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), **style)
    return text.removesuffix("\n").removesuffix("\n...")
