"""Makes the images in the documents: the top of a run's report, and one case on the page of an experiment.

    python scripts/picture.py docs/report.png         # trains the demo first: some minutes
    python scripts/picture.py docs/report.png RUN     # the report of an existing run
    python scripts/picture.py docs/comparison.png comparison 'photos, batch 32'      # from results/

It needs chromium, like the tests of the pages.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from neuclip.experiments.definition import read_experiment  # noqa: E402
from neuclip.experiments.perform import Request, write_pages  # noqa: E402
from neuclip.records import RunFolder  # noqa: E402
from neuclip.report.run_report import write_report  # noqa: E402
from tests.builders.browser import browsing  # noqa: E402

SIZE, SIZE_OF_CASE = (1100, 950), (1300, 1190)  # with the first row of charts
ONLY = "document.querySelectorAll('header, section').forEach(one => one.innerText.startsWith({}) || one.remove())"


def train_demo(folder: Path) -> Path:
    command = [sys.executable, "-m", "neuclip", "train", "--run.folder", str(folder), "--run.name", "demo"]
    subprocess.run(command, check=True)
    return folder / "demo"


def picture(run: Path, output: Path) -> None:
    photograph(write_report(RunFolder(run)), output, SIZE)


def picture_of_case(name: str, case: str, output: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        page, *_ = write_pages([read_experiment(name)], Request("laptop", results=ROOT / "results"), Path(folder))
        photograph(page, output, SIZE_OF_CASE, ONLY.format(repr(case)))


def photograph(page: Path, output: Path, size: tuple[int, int], script: str = "") -> None:
    with browsing() as tab:
        tab.open(page.resolve().as_uri(), width=size[0], height=size[1])
        tab.evaluate(script)
        tab.screenshot(output)


if __name__ == "__main__":
    output, *of = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        if len(of) == 2:
            picture_of_case(*of, Path(output))
        else:
            picture(Path(*of) if of else train_demo(Path(folder)), Path(output))
