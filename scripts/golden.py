"""Records what a refactor must not change, and compares two records of the same machine.

    python scripts/golden.py OUT.json                    # record: two minutes on one core
    python scripts/golden.py NEW.json --compare OUT.json # record again, print differences; exit code 1 if any
    python scripts/golden.py OUT.json --icons            # with the sums of icons-30k's shards: some minutes
    python scripts/golden.py tests/golden/figures.json --figures  # the input of tests/test_golden.py: some seconds

A record has the losses of 200 steps per method; runs with BatchNorm, on stored features and on two ranks, with their
evaluation figures; the ids and bytes of every kind of source; the keys of a checkpoint; the files of a run; the help
pages and the public names. Losses are equal to the bit only on the same machine. Therefore the repository has only
figures: losses of 20 steps, which are compared with a tolerance, recall and ids.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import hashlib
import inspect
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import neuclip
from neuclip.cli.main import COMMANDS, main
from neuclip.data.mixture import order_of
from neuclip.data.open import open_source

STEPS, FEW_STEPS, BATCH, PAIRS = 200, 20, 8, 64
SMALL = {
    "embed_dim": 16,
    "vision_cfg": {"layers": 1, "width": 32, "head_width": 16, "patch_size": 16, "image_size": 32},
    "text_cfg": {"context_length": 8, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}
FEW = "--objective.num_prototypes 40"
RESTART = "--objective.restart_every"
METHODS = {
    "clip": "--objective clip",
    "minibatch": "--objective clip --objective.form minibatch",
    "siglip": "--objective siglip",
    "fastclip": "--objective fastclip",
    "amorlip": "--objective amorlip",
    "neuclip": f"{FEW} {RESTART} 25",
    "neuclip, rolling": f"{FEW} --objective.restart rolling --objective.inner_steps 0",
    "neuclip, mlp": "--objective.network mlp",
    "neuclip, separate": f"{FEW} --objective.fit separate",
    "neuclip, simultaneous": f"{FEW} --objective.update simultaneous",
    "neuclip, masked": f"{FEW} --objective.mask_duplicates true --objective.inner_steps 0",
    "neuclip, chunks": f"{FEW} --train.micro_batch_size 3",
}
LOCKED = "--model.image_tower locked --model.text_tower locked --data.crop_scale 1,1"
SHORT = f"--train.samples {12 * BATCH}"


def record(folder: Path, *, icons: bool) -> dict[str, Any]:
    write_data(folder)
    runs = {name: train(folder, name, flags) for name, flags in METHODS.items()}
    runs["BatchNorm"] = train(folder, "BatchNorm", f"{SHORT} {FEW} --model.name tiny --model.image_size 32")
    runs["stored features"] = train(folder, "stored features", f"{SHORT} {FEW} {LOCKED}")
    runs["two ranks"] = train(folder, "two ranks", f"{SHORT} {FEW} --run.device cpu", ranks=2)
    result = {
        "torch": torch.__version__,
        "runs": runs,
        "sources": sources(folder),
        "checkpoint": checkpoint_keys(run_folder(folder, "neuclip")),
        "files": run_files(run_folder(folder, "neuclip")),
        "names": {name: str(inspect.signature(getattr(neuclip, name))) for name in neuclip.__all__ if name[0] != "_"},
        "help": help_pages(),
    }
    return result | ({"icons": icon_sums(folder)} if icons else {})


def figures(folder: Path) -> dict[str, Any]:
    """For each method the first losses, the recalls in both directions and the normalizer errors; for each source its
    length and the first ids of its order."""
    write_data(folder)
    short = f"--train.samples {FEW_STEPS * BATCH}"
    few = {name: f"{flags} {short}".replace(f"{RESTART} 25", f"{RESTART} 7") for name, flags in METHODS.items()}
    runs = {name: train(folder, name, flags) for name, flags in few.items()}
    return {
        "runs": {
            name: {
                "losses": [float(f"{loss:.7g}") for loss in run["losses"]],
                "recall": [value for key, value in run["evaluation"].items() if "_recall_at_" in key],
                "error": {key: float(f"{value:.7g}") for key, value in run["error"].items()},
            }
            for name, run in runs.items()
        },
        "sources": {kind: [count, ids[:24]] for kind, (count, _, ids) in sources(folder).items()},
    }


def one_line_each(figures: dict[str, Any]) -> str:
    """JSON with one line per run or source, for readable diffs."""
    parts = [
        f"{json.dumps(part)}: {{\n"
        + ",\n".join(f"  {json.dumps(key)}: {json.dumps(one)}" for key, one in entries.items())
        for part, entries in figures.items()
    ]
    return "{\n" + "\n},\n".join(parts) + "\n}\n}\n"


def write_data(folder: Path) -> None:
    (folder / "small.json").write_text(json.dumps(SMALL))
    images = {f"{number:04d}.png": image_bytes(number) for number in range(PAIRS)}
    captions = [f"a shape of colour {number % 24} and size {number // 24}" for number in range(PAIRS)]
    for shard in range(2):
        (folder / "shards").mkdir(exist_ok=True)
        with tarfile.open(folder / "shards" / f"{shard}.tar", "w") as tar:
            for number, (name, image) in list(enumerate(images.items()))[shard::2]:
                for member, content in ((name, image), (name[:4] + ".txt", captions[number].encode())):
                    about = tarfile.TarInfo(member)
                    about.size = len(content)
                    tar.addfile(about, io.BytesIO(content))
    for kind in ("csv", "jsonl", "folder", "parquet"):
        (folder / kind).mkdir()
        for name, image in images.items():
            (folder / kind / name).write_bytes(image)
    rows = list(zip(images, captions, strict=True))
    with (folder / "csv" / "pairs.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("filepath", "title"), *rows])
    lines = [json.dumps({"image": name, "caption": [text, text[::-1]]}) for name, text in rows]
    (folder / "jsonl" / "pairs.jsonl").write_text("\n".join(lines))
    for name, text in rows:
        (folder / "folder" / name).with_suffix(".txt").write_text(text)
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(
        pyarrow.table({"image": list(images), "caption": captions}), folder / "parquet" / "pairs.parquet"
    )


def image_bytes(number: int) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).resize((40, 36), Image.Resampling.BICUBIC).save(stream, "PNG")
    return stream.getvalue()


def run_folder(folder: Path, name: str) -> Path:
    return folder / "runs" / name.replace(", ", "-").replace(" ", "-")


def train(folder: Path, name: str, flags: str, ranks: int = 1) -> dict[str, Any]:
    """Train with the command line; returns the losses and all figures of the evaluation."""
    run = run_folder(folder, name)
    fixed = f"""train --run.folder {run.parent} --run.name {run.name} --run.seed 1 --data.workers 0 --log.every 1
        --data.train {folder}/shards --model.name {folder}/small.json --train.batch_size {BATCH}
        --train.samples {STEPS * BATCH} --evaluation.every 0 --evaluation.retrieval {folder}/csv/pairs.csv
        --evaluation.zero_shot none --evaluation.error_anchors 20 --evaluation.gallery 0 --checkpoint.every_minutes 0"""
    arguments = [*fixed.split(), *([] if ranks > 1 else ["--run.threads", "1"]), *flags.split()]
    print(name, file=sys.stderr)
    if ranks > 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run([*launcher, "-m", "neuclip", *arguments], check=True, capture_output=True, env=environment)
    else:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as messages:
            if main(arguments) != 0:
                sys.exit(messages.getvalue())
    summary = json.loads((run / "summary.json").read_text())
    errors = summary.get("normalizer_error", {}).get("estimators", {})
    return {
        "losses": [json.loads(line)["loss"] for line in (run / "records.jsonl").read_text().splitlines()],
        "evaluation": {name.replace(str(folder), ""): value for name, value in summary["evaluation"].items()},
        "error": {name: values["mean"] for name, values in errors.items()},
    }


def sources(folder: Path) -> dict[str, Any]:
    """For each kind of source its length, a digest of ids, captions and images, and the first ids of the order."""
    import fsspec

    for shard in (folder / "shards").glob("*.tar"):
        fsspec.filesystem("memory").pipe_file(f"/pairs/{shard.name}", shard.read_bytes())
    paths = {
        "tar": f"{folder}/shards",
        "csv": f"{folder}/csv/pairs.csv",
        "jsonl": f"{folder}/jsonl/pairs.jsonl",
        "folder": f"{folder}/folder",
        "parquet": f"{folder}/parquet/pairs.parquet",
        "mixture": f"{folder}/shards,{folder}/csv/pairs.csv:2",
        "remote": "memory://pairs",
    }
    facts = {}
    for kind, path in paths.items():
        source, digest = open_source(path), hashlib.sha256()
        for id in range(len(source)):
            sample = source[id]
            digest.update(json.dumps([id, hashlib.sha256(sample.image).hexdigest(), sample.captions]).encode())
        facts[kind] = [len(source), digest.hexdigest()[:16], order_of(source, 3).ids(0, 3 * len(source)).tolist()]
    return facts


def checkpoint_keys(run: Path) -> dict[str, str]:
    """Every key of the last checkpoint, with the shape and type of its tensor."""
    file = max((run / "checkpoints").iterdir(), key=lambda path: path.name)
    state = torch.load(file if file.is_file() else next(file.glob("*.pt")), weights_only=True)

    def flat(value: Any, name: str) -> Iterator[tuple[str, str]]:
        if isinstance(value, dict):
            for key, inner in value.items():
                yield from flat(inner, f"{name}.{key}" if name else str(key))
        else:
            yield name, f"{list(value.shape)} {value.dtype}" if torch.is_tensor(value) else type(value).__name__

    return dict(flat(state, ""))


def run_files(run: Path) -> list[str]:
    return sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())


def help_pages() -> dict[str, list[str]]:
    pages = {}
    for command in ("", *COMMANDS):
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            main([*command.split(), "--help"])
        pages[command or "neuclip"] = text.getvalue().splitlines()
    return pages


def icon_sums(folder: Path) -> dict[str, str]:
    open_source("icons-30k")
    tars = sorted((folder / "cache").rglob("*.tar"))
    return {f"{tar.parent.name}/{tar.name}": hashlib.sha256(tar.read_bytes()).hexdigest()[:16] for tar in tars}


def differences(old: Any, new: Any, name: str = "") -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from differences(old.get(key), new.get(key), f"{name} > {key}" if name else key)
    elif numbers(old) and numbers(new) and len(old) == len(new):
        gaps = [abs(a - b) / max(abs(a), 1e-30) for a, b in zip(old, new, strict=True)]
        if max(gaps) > 0:
            first = next(place for place, gap in enumerate(gaps) if gap)
            yield f"{name}: differs from index {first} on, at most by {max(gaps):.1e}, at the end by {gaps[-1]:.1e}"
    elif old != new:
        yield f"{name}: {str(old)[:150]} -> {str(new)[:150]}"


def numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(number, float) for number in value)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--icons", action="store_true")
    parser.add_argument("--figures", action="store_true")
    flags = parser.parse_args()
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["NEUCLIP_CACHE"] = str(Path(temporary) / "cache")
        result = figures(Path(temporary)) if flags.figures else record(Path(temporary), icons=flags.icons)
    flags.out.write_text(one_line_each(result) if flags.figures else json.dumps(result, indent=1))
    if flags.compare:
        lines = list(differences(json.loads(flags.compare.read_text()), json.loads(flags.out.read_text())))
        print("\n".join(lines) or "equal")
        sys.exit(bool(lines))
