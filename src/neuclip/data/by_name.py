"""Data sets by name: built once on this machine, kept in the cache folder, and accepted in place of a data path.

neuclip knows a set's name, parts and folder; another package (neuclip_icons) builds it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from neuclip.errors import RunFailed, UserError, proposal
from neuclip.files import cache_folder

# The name alone means the first part, which is for training; the other parts are for evaluation.
PARTS = {
    "icons-30k": ("train", "new-drawings", "new-concepts", "zero-shot/groups", "zero-shot/subgroups", "zero-shot/names")
}
ZERO_SHOT = "zero-shot/"  # parts whose names begin like this have labels and no captions


def is_name(address: str) -> bool:
    """Whether a data path is a data set by name, or a part of one; `./icons-30k` would be a folder."""
    return address.partition("/")[0] in PARTS


def is_labelled(address: str) -> bool:
    """Whether a data path is a part with labels and no captions. It need not be built."""
    return is_name(address) and address.partition("/")[2].startswith(ZERO_SHOT)


def held_out(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The evaluation parts of a data set by name: those for retrieval, and those for zero-shot. Builds nothing.

    >>> held_out("icons-30k")[0]
    ('icons-30k/new-drawings', 'icons-30k/new-concepts')
    """
    tests = [f"{name}/{part}" for part in PARTS[name][1:]]
    labelled = tuple(filter(is_labelled, tests))
    return tuple(address for address in tests if address not in labelled), labelled


def resolve(address: str) -> Path | None:
    """The folder of a data set by name or of its part, built if necessary; None for any other data path."""
    if not is_name(address):
        return None
    name, _, part = address.rstrip("/").partition("/")
    parts = PARTS[name]
    part = part or parts[0]
    if part not in parts:
        known = [f"{name}/{known_part}" for known_part in parts]
        raise UserError(f"{name} has no part {part!r}; {proposal(f'{name}/{part}', known)} (parts: {', '.join(parts)})")
    folder = built_folder(name)
    if not folder.exists():
        _build(name, folder)
    if not (folder / part).is_dir():
        raise UserError(f"{folder / part}: is missing from the data set; remove {folder} to build it again")
    return folder / part


def built_folder(name: str) -> Path:
    """The folder that the set is built in. Its name changes with the versions of the packages the set is made from."""
    from neuclip_icons.sources import set_version

    return cache_folder() / f"{name}-{set_version()}"


def _build(name: str, folder: Path) -> None:
    """Build the set in a separate program, because its worker processes must not run the user's script again. If
    several processes call this, one builds and the others wait."""
    from neuclip_icons.sources import check_packages

    check_packages()
    folder.parent.mkdir(parents=True, exist_ok=True)
    # -P: nothing in the working folder is imported.
    code = subprocess.run([sys.executable, "-P", "-m", "neuclip_icons", name, str(folder)], check=False).returncode
    if code:
        raise RunFailed(f"{name} could not be built in {folder.parent}, exit code {code}; fix the error printed above")
