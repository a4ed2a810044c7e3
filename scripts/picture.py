"""The picture in the README: the top of the report of a run.

    python scripts/picture.py docs/report.png         # trains the demo first: some minutes
    python scripts/picture.py docs/report.png RUN     # of a run that is there

It needs chromium, as the tests of the pages do.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from neuclip.records import RunFolder  # noqa: E402
from neuclip.report.run_report import write_report  # noqa: E402
from tests.builders.browser import browsing  # noqa: E402

WIDTH, HEIGHT = 1100, 950  # with the first row of charts


def train_demo(folder: Path) -> Path:
    command = [sys.executable, "-m", "neuclip", "train", "--run.folder", str(folder), "--run.name", "demo"]
    subprocess.run(command, check=True)
    return folder / "demo"


def picture(run: Path, output: Path) -> None:
    page = write_report(RunFolder(run))
    with browsing() as tab:
        tab.open(page.resolve().as_uri(), width=WIDTH, height=HEIGHT)
        tab.screenshot(output)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        picture(Path(sys.argv[2]) if len(sys.argv) > 2 else train_demo(Path(folder)), Path(sys.argv[1]))
