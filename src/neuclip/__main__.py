"""`python -m neuclip` is the command `neuclip`."""

from __future__ import annotations

import sys

from neuclip.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
