"""Evaluation beside clip_benchmark, on the same local sets and weights: time, memory, and whether the numbers agree.

The sets are written in the webdataset layout from icons-30k: retrieval with five captions per image, and two zero-shot
sets that share their class names, as ImageNet and its variants do. Each side is a process of its own that starts with
importing its package; clip_benchmark loads the model once per set, as its command does. Both run without autocast, and
take turns in every round; medians count. clip_benchmark needs an environment of its own (numpy below 2.4):

Usage: python benchmarks/evaluation.py OTHER_PYTHON [--model ViT-B-32] [--images 200] [--classes 50] [--rounds 3]
       [--workers 1] [--batch-size 64] [--retrieval FOLDER ...] [--zero-shot FOLDER ...]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

CAPTIONS = ("{c}", "an icon of {c}", "a small black drawing of {c} on white", "{c}, drawn with few lines", "it is {c}")
TEMPLATES = [
    f"{start} {kind} of {{c}}{end}"
    for start in ("a", "one", "this is a")
    for kind in ("drawing", "small icon", "black picture", "sign")
    for end in (".", " on white ground.")
]  # 24; ImageNet has 80
NAMES = {  # ours: clip_benchmark's
    "text_to_image_recall_at_1": "image_retrieval_recall@1",
    "text_to_image_recall_at_5": "image_retrieval_recall@5",
    "image_to_text_recall_at_1": "text_retrieval_recall@1",
    "image_to_text_recall_at_5": "text_retrieval_recall@5",
    "top1": "acc1",
    "top5": "acc5",
    "mean_per_class": "mean_per_class_recall",
}
Sets = list[tuple[str, str]]  # "retrieval" or "zero_shot", and the folder


def main(asked: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        export_random_model(asked.model, folder / "model")
        sets = [*write_sets(folder, asked.images, asked.classes)]
        sets += [("retrieval", path) for path in asked.retrieval] + [("zero_shot", path) for path in asked.zero_shot]
        job = folder / "job.json"
        job.write_text(json.dumps({**vars(asked), "folder": str(folder / "model"), "sets": sets}))
        programs = {"neuclip": sys.executable, "clip_benchmark": asked.other_python}
        results: dict[str, list[dict[str, Any]]] = {name: [] for name in programs}
        for _ in range(asked.rounds):
            for name, python in programs.items():
                results[name].append(measure([python, __file__, f"--side={name}", str(job)]))
    print_costs(results)
    for kind, path in sets:
        compare_figures(f"{kind} {Path(path).name}", *(results[name][0]["figures"][path] for name in programs))


def export_random_model(name: str, folder: Path) -> None:
    import torch

    from neuclip.models.build import build_model
    from neuclip.models.export import export_model

    torch.manual_seed(0)
    export_model(build_model(name), folder)


def write_sets(folder: Path, images: int, classes: int) -> Sets:
    """The first drawings of icons-30k; the zero-shot sets are drawings of the most frequent captions."""
    from neuclip.data.open import open_source

    source = open_source("icons-30k/new-drawings")
    pairs = []
    for id in range(min(images, len(source))):
        captions = [caption.format(c=source[id].captions[0]) for caption in CAPTIONS]
        # Both read this file: clip_benchmark the txt, with a caption per line, neuclip the json.
        texts = {"txt": "\n".join(captions).encode(), "json": json.dumps({"caption": captions}).encode()}
        pairs.append({"png": source[id].image, **texts})
    write_tar(folder / "captions", pairs)
    (folder / "captions" / "dataset_type.txt").write_text("retrieval\n")
    train = open_source("icons-30k")
    captions = train.captions()
    names = sorted(name for name, _ in Counter(captions).most_common(classes))
    drawn = [(id, names.index(caption)) for id, caption in enumerate(captions) if caption in names][: 2 * images]
    sets: Sets = [("retrieval", str(folder / "captions"))]
    for part, own in (("names", drawn[::2]), ("names-2", drawn[1::2])):
        labelled = [{"png": train[id].image, "cls": str(label).encode()} for id, label in own]
        write_tar(folder / part, labelled)
        (folder / part / "classnames.txt").write_text("\n".join(names) + "\n")
        (folder / part / "zeroshot_classification_templates.txt").write_text("\n".join(TEMPLATES) + "\n")
        sets.append(("zero_shot", str(folder / part)))
    return sets


def write_tar(folder: Path, samples: list[dict[str, bytes]]) -> None:
    import io
    import tarfile

    (folder / "test").mkdir(parents=True)
    (folder / "test" / "nshards.txt").write_text("1\n")
    with tarfile.open(folder / "test" / "0.tar", "w") as tar:
        for number, members in enumerate(samples):
            for ending, content in members.items():
                member = tarfile.TarInfo(f"s{number:07d}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def measure(command: list[str]) -> dict[str, Any]:
    """A side's answer, with the wall time of its whole process."""
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return {"wall": seconds, **json.loads(done.stdout.splitlines()[-1])}


def our_side(job: dict[str, Any]) -> dict[str, Any]:
    """One call for all sets."""
    from neuclip import api

    asked = {kind: tuple(path for own, path in job["sets"] if own == kind) for kind in ("retrieval", "zero_shot")}
    flat = api.evaluate(f"local-dir:{job['folder']}", batch_size=job["batch_size"], **asked)
    by_set: dict[str, dict[str, float]] = {}
    for key, value in flat.items():
        path, _, metric = key.rpartition(".")
        by_set.setdefault(path, {})[metric] = value
    return by_set


def other_side(job: dict[str, Any]) -> dict[str, Any]:
    """Set by set, as clip_benchmark's command does it."""
    declare_missing_operators()
    import torch
    from clip_benchmark.datasets.builder import build_dataset
    from clip_benchmark.metrics import zeroshot_classification, zeroshot_retrieval
    from clip_benchmark.models import load_clip

    figures = {}
    for kind, path in job["sets"]:
        model, transform, tokenizer = load_clip(
            model_type="open_clip", model_name=f"local-dir:{job['folder']}", pretrained="", cache_dir=None, device="cpu"
        )
        model.eval()
        task = "zeroshot_retrieval" if kind == "retrieval" else "zeroshot_classification"
        dataset = build_dataset(
            dataset_name=f"wds/{Path(path).name}",
            root=path,
            transform=transform,
            split="test",
            download=False,
            task=task,
        )
        batches = dataset.batched(job["batch_size"])
        loader = torch.utils.data.DataLoader(batches, batch_size=None, shuffle=False, num_workers=job["workers"])
        if kind == "retrieval":
            figures[path] = zeroshot_retrieval.evaluate(
                model, loader, tokenizer, recall_k_list=[1, 5], device="cpu", amp=False
            )
        else:
            figures[path] = zeroshot_classification.evaluate(
                model, loader, tokenizer, dataset.classes, dataset.templates, device="cpu", amp=False
            )
    return figures


def declare_missing_operators() -> None:
    """As models/__init__.py, which the other environment has not."""
    import torch

    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in [module for module in sys.modules if module.startswith("torchvision")]:
            del sys.modules[name]
        global _library
        _library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def run_side(name: str, job: dict[str, Any]) -> None:
    start = time.perf_counter()
    figures = (our_side if name == "neuclip" else other_side)(job)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(one.ru_utime + one.ru_stime for one in used)
    answer = {"figures": figures, "cpu": cpu, "memory": used[0].ru_maxrss / 1e6, "inside": time.perf_counter() - start}
    print("\n" + json.dumps(answer, default=float))


def print_costs(results: dict[str, list[dict[str, Any]]]) -> None:
    ours, others = results["neuclip"], results["clip_benchmark"]
    print("| all sets | neuclip | clip_benchmark | factor |\n| --- | --- | --- | --- |")
    for key, unit in (("wall", "s wall"), ("cpu", "s CPU"), ("memory", "GB peak")):
        own, other = (median(one[key] for one in side) for side in (ours, others))
        print(f"| {unit} | {own:,.1f} | {other:,.1f} | {other / own:.2f}x |")


def compare_figures(name: str, ours: dict[str, float], others: dict[str, float]) -> None:
    """Equal to 1/N: one query on the edge between two ranks may fall to either side by rounding."""
    print(f"\n{name}: {ours['images']:,.0f} images")
    for key, other_key in NAMES.items():
        if key in ours and other_key in others:
            queries = ours["captions"] if key.startswith("text_to_image") else ours["images"]
            is_mean = key == "mean_per_class"  # one image of the smallest class counts more than 1/N
            equal = abs(ours[key] - others[other_key]) <= (2 * ours["classes"] if is_mean else 1) / queries + 1e-9
            print(f"  {key:28} {ours[key]:.5f}  {others[other_key]:.5f}  {'equal' if equal else 'DIFFERENT'}")


if __name__ == "__main__":
    if sys.argv[1].startswith("--side="):
        run_side(sys.argv[1].removeprefix("--side="), json.loads(Path(sys.argv[2]).read_text()))
    else:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("other_python", help="of an environment with clip_benchmark")
        parser.add_argument("--model", default="ViT-B-32")
        parser.add_argument("--images", type=int, default=200, help="of each set")
        parser.add_argument("--classes", type=int, default=50, help="of the zero-shot sets")
        parser.add_argument("--rounds", type=int, default=3)
        parser.add_argument("--workers", type=int, default=1)
        parser.add_argument("--batch-size", type=int, default=64)
        parser.add_argument("--retrieval", nargs="*", default=[], help="further folders in the webdataset layout")
        parser.add_argument("--zero-shot", nargs="*", default=[], dest="zero_shot")
        main(parser.parse_args())
