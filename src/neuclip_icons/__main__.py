"""`python -m neuclip_icons icons-30k FOLDER`: a separate program, because the child processes that draw import the main
module, which must not be a user's script."""

from __future__ import annotations

import sys
from pathlib import Path

from neuclip.errors import RunFailed, UserError
from neuclip_icons.build import build_once

USAGE = "usage: python -m neuclip_icons icons-30k FOLDER"


def main(arguments: list[str]) -> int:
    if len(arguments) != 2 or arguments[0] != "icons-30k":
        print(USAGE, file=sys.stderr)
        return 2
    try:
        build_once(Path(arguments[1]))
    except (UserError, RunFailed) as error:
        print(f"neuclip_icons: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
