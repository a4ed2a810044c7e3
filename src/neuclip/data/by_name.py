"""Data sets by name: built once on this machine, kept in the cache folder, used wherever a data path is accepted.

neuclip knows a set's name, its parts and where its folder is; another package (neuclip_icons) makes it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from neuclip.errors import RunFailed, UserError, proposal
from neuclip.files import cache_folder

# The name alone means the first part; a model that was trained on it is tested on the others.
PARTS = {
    "icons-30k": ("train", "new-drawings", "new-concepts", "zero-shot/groups", "zero-shot/subgroups", "zero-shot/names")
}
ZERO_SHOT = "zero-shot/"  # what parts with labels and no captions begin with


def is_name(address: str) -> bool:
    """Whether an address means a data set by name, or a part of one; write `./icons-30k` for a folder."""
    return address.partition("/")[0] in PARTS


def is_labelled(address: str) -> bool:
    """Whether an address means a part with labels and no captions. It need not be built."""
    return is_name(address) and address.partition("/")[2].startswith(ZERO_SHOT)


def held_out(name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Addresses of what a model trained on the set is tested on: for retrieval, and for zero-shot. Nothing is built.

    >>> held_out("icons-30k")[0]
    ('icons-30k/new-drawings', 'icons-30k/new-concepts')
    """
    tests = [f"{name}/{part}" for part in PARTS[name][1:]]
    labelled = tuple(filter(is_labelled, tests))
    return tuple(address for address in tests if address not in labelled), labelled


def resolve(address: str) -> Path | None:
    """The folder of a set's part, built if it is not there; None when the address is no data set by name."""
    if not is_name(address):
        return None
    name, _, part = address.rstrip("/").partition("/")
    parts = PARTS[name]
    part = part or parts[0]
    if part not in parts:
        known = [f"{name}/{one}" for one in parts]
        raise UserError(f"{name} has no part {part!r}; {proposal(f'{name}/{part}', known)} (parts: {', '.join(parts)})")
    folder = built_folder(name)
    if not folder.exists():
        _build(name, folder)
    if not (folder / part).is_dir():
        raise UserError(f"{folder / part}: is missing, the data set was damaged; remove {folder} to build it again")
    return folder / part


def built_folder(name: str) -> Path:
    """Where the built set is or will be; the folder's name changes with the versions of what the set is made from."""
    from neuclip_icons.sources import set_version

    return cache_folder() / f"{name}-{set_version()}"


def _build(name: str, folder: Path) -> None:
    """By a program of its own, because the processes that it starts must not run a user's script again. It lets one
    process build while others wait."""
    from neuclip_icons.sources import check_packages

    check_packages()
    folder.parent.mkdir(parents=True, exist_ok=True)
    # -P: nothing in the working folder is imported.
    code = subprocess.run([sys.executable, "-P", "-m", "neuclip_icons", name, str(folder)], check=False).returncode
    if code:
        raise RunFailed(f"{name} could not be built in {folder.parent}, exit code {code}; mend what is said above it")
