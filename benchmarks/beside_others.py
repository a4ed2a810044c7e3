"""Training speed alone and beside two other busy runs, with CPU threads that spin while they wait and that sleep.

libgomp's threads spin by default; `neuclip` makes them sleep unless the user chose (src/neuclip/cli/main.py). Every
figure is the median over the steps of a real `neuclip train` with torch's default number of threads; both ways take
turns in every round, and the median over rounds counts. The neighbours spin in both cases.

Usage: python benchmarks/beside_others.py [rounds] [samples of each run]
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from PIL import Image

from neuclip.records import RunFolder, read_lines

IMAGES, PIXELS, WARM_UP = 512, 64, 3
NEIGHBOURS = 2
SPIN = {"GOMP_SPINCOUNT": "300000"}  # libgomp's own default for as many threads as cores
SLEEP: dict[str, str] = {}  # what the command chooses
POLICIES = {"spin": SPIN, "sleep": SLEEP}


def main(rounds: int, samples: int) -> None:
    rates: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_pairs(folder)
        for number in range(rounds):
            for policy, environment in POLICIES.items():
                run = f"{policy}-{number}"
                rates.setdefault(("alone", policy), []).append(
                    samples_per_second(folder, f"{run}-alone", samples, environment)
                )
                with neighbours(folder, run):
                    rates.setdefault(("beside", policy), []).append(
                        samples_per_second(folder, f"{run}-beside", samples, environment)
                    )
    print("| samples/s | threads spin | threads sleep | ratio |\n| --- | --- | --- | --- |")
    for place, label in (("alone", "alone"), ("beside", f"beside {NEIGHBOURS} busy runs")):
        spin, sleep = (median(rates[place, policy]) for policy in POLICIES)
        print(f"| {label} | {spin:,.0f} | {sleep:,.0f} | {sleep / spin:.2f}x |")


def write_pairs(folder: Path) -> None:
    """Noise with a number as caption: what is learned does not matter here."""
    rows = ["filepath,title"]
    for number in range(IMAGES):
        Image.effect_noise((PIXELS, PIXELS), 80).convert("RGB").save(folder / f"{number}.png")
        rows.append(f"{number}.png,picture number {number}")
    (folder / "pairs.csv").write_text("\n".join(rows) + "\n")


def samples_per_second(folder: Path, name: str, samples: int, environment: dict[str, str]) -> float:
    process = start(folder, name, samples, environment)
    if process.wait():
        raise SystemExit(f"the run {name} failed; see {folder / name}.log")
    records = read_lines(RunFolder(folder / name).records)
    return median(record["samples_per_second"] for record in records[WARM_UP:])


@contextmanager
def neighbours(folder: Path, name: str) -> Iterator[None]:
    """Runs that train without end while the block is measured."""
    names = [f"{name}-neighbour-{number}" for number in range(NEIGHBOURS)]
    processes = [start(folder, name, 10**7, SPIN) for name in names]
    try:
        while not all(RunFolder(folder / name).records.exists() for name in names):
            if any(process.poll() is not None for process in processes):
                raise SystemExit(f"a neighbour failed; see {folder}/{name}-neighbour-*.log")
            time.sleep(0.5)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def start(folder: Path, name: str, samples: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    chosen = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS")
    inherited = {key: value for key, value in os.environ.items() if key not in chosen}
    flags = f"""--data.train {folder}/pairs.csv --run.folder {folder} --run.name {name} --train.samples {samples}
        --log.every 1 --data.workers 1 --evaluation.every 0 --evaluation.error_anchors 0 --checkpoint.every_minutes 0"""
    command = [sys.executable, "-m", "neuclip", "train", *flags.split()]
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env={**inherited, **environment})


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the neighbours must not outlive this script
    given = [int(number) for number in sys.argv[1:]]
    main(*[*given, *(3, 3840)[len(given) :]])
