"""The grammar of flags: `--name value`, `--name=value`, or a bare `--name`."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def split_flags(arguments: Sequence[str], switches: Collection[str] = ()) -> list[tuple[str | None, str | None]]:
    """Pairs (name, value): name without dashes in front and with `_` for `-`; None for an argument that is no flag.

    A flag takes the next argument unless it is one of `switches`, or the next begins with two dashes: then it is bare
    and its value None. So negative numbers are values.

    >>> split_flags(["tiny", "--train.batch-size", "64", "--json"], switches=["json"])
    [(None, 'tiny'), ('train.batch_size', '64'), ('json', None)]
    """
    pairs: list[tuple[str | None, str | None]] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--"):
            pairs.append((None, argument))
            continue
        name, equals, value = argument[2:].partition("=")
        name = name.replace("-", "_")
        if equals:
            pairs.append((name, value))
        elif name in switches or not rest or rest[0].startswith("--"):
            pairs.append((name, None))
        else:
            pairs.append((name, rest.pop(0)))
    return pairs
