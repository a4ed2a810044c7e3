"""`neuclip data`"""

from __future__ import annotations

from collections.abc import Sequence

from neuclip.cli.flags import Command, wants_help
from neuclip.errors import AskedWrongly
from neuclip.settings.nearest import proposal

DESCRIPTIONS = {"icons-30k": "30 thousand icons and emoji with their names, drawn at 64 x 64"}

COMMAND = Command(
    usage="data list | data prepare NAME",
    about="""Lists the built-in data sets, or prepares one and prints its folder.
They are made once, from installed packages and without any download; `neuclip train` prepares what it needs itself.""",
    flags=(),
    examples=(
        "neuclip data list",
        "neuclip data prepare icons-30k",
    ),
    most=2,
)


def run(arguments: Sequence[str]) -> int:
    if wants_help(arguments):
        print(COMMAND.help(), end="")
        return 0
    (action, *names), _ = COMMAND.parse(arguments)
    if action == "list" and not names:
        return list_data()
    if action == "prepare" and names:
        return prepare(names[0])
    if action in ("list", "prepare"):
        raise AskedWrongly(
            f"data {action} takes {'no name' if names else 'the name of a data set'}; give neuclip {COMMAND.usage}"
        )
    raise AskedWrongly(f"no action {action!r} of data; {proposal(action, ['list', 'prepare'])}")


def list_data() -> int:
    from neuclip.data.builtin import builtin_names, cache_folder

    for name in builtin_names():
        built = sorted(cache_folder().glob(f"{name}-*/"))
        print(f"{name}  {DESCRIPTIONS[name]} ({f'built: {built[-1]}' if built else 'not built yet'})")
    return 0


def prepare(name: str) -> int:
    from neuclip.data.builtin import builtin_folder, builtin_names

    if name not in builtin_names():
        raise AskedWrongly(f"no built-in data set {name!r}; {proposal(name, list(builtin_names()))}")
    print(builtin_folder(name))
    return 0
