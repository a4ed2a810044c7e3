"""Compares exact normalizers with their bare matrix products, and evaluation with clip_benchmark's.

clip_benchmark needs an environment of its own (numpy below 2.4). Its rows are measured if NEUCLIP_CLIP_BENCHMARK is the
path of the Python in such an environment. Each side is a process that imports its package and runs without autocast on
the same sets and weights; clip_benchmark loads the model once per set, as its command does. Figures must agree to two
images of a set; tests/evaluation compares every digit.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PEER = "NEUCLIP_CLIP_BENCHMARK"
MODEL, IMAGES, CLASSES, BATCH = "ViT-B-32", 100, 20, 64
CAPTIONS = ("{}", "a photo of {}", "a small picture of {} outside", "{}, seen from far away", "it is {}")
TEMPLATES = [
    f"{start} {kind} of {{c}}{end}"
    for start in ("a", "one", "this is a")
    for kind in ("drawing", "photo", "black picture", "sign")
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


def exact_normalizers() -> Iterator[Any]:
    import torch
    import torch.nn.functional as F

    from benchmarks.table import Row
    from neuclip.evaluation.normalizer_error import exact_log_normalizers

    for width, goal in ((128, 1.3), (512, 1.2)):
        anchors, candidates = F.normalize(torch.randn(2048, width)), F.normalize(torch.randn(16_384, width))
        positives, index = (anchors * candidates[:2048]).sum(dim=1), torch.arange(2048)

        def ours(anchors=anchors, positives=positives, candidates=candidates, index=index) -> None:
            exact_log_normalizers(anchors, positives, candidates, index, tau=0.05, eps=1e-6)

        def bare(anchors=anchors, candidates=candidates) -> None:
            for rows in anchors.split(512):
                for columns in candidates.split(2048):
                    rows @ columns.T

        yield Row(f"exact normalizers, d {width}", "their bare products", ours, bare, goal)


def against_clip_benchmark() -> Iterator[Any]:
    from benchmarks.table import Row

    if not (python := os.environ.get(PEER)):
        print(f"skipped the rows of clip_benchmark; set {PEER} to the path of a Python that has it", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory() as name:
        job = _write_job(Path(name))
        sides = {"neuclip": _run_side(sys.executable, "ours", job), "clip_benchmark": _run_side(python, "theirs", job)}
        _compare(*(side["figures"] for side in sides.values()))
        ours, theirs = (side["cpu"] for side in sides.values())
        what = f"evaluation, {MODEL}, {3 * IMAGES} images"
        yield Row(what, "clip_benchmark", lambda: ours, lambda: theirs, 0.4)


def _write_job(folder: Path) -> Path:
    """Write a random model and three sets: retrieval with five captions per image, and two zero-shot sets with the same
    classes."""
    import torch

    from benchmarks.photo_like import caption, photo_like
    from neuclip.models.build import build_model
    from neuclip.models.export import export_model

    torch.manual_seed(0)
    export_model(build_model(MODEL), folder / "model")
    pairs = []
    for number in range(IMAGES):
        captions = [text.format(caption(number)) for text in CAPTIONS]
        pairs.append({"jpg": photo_like(number), "txt": "\n".join(captions).encode()})
    sets = [("retrieval", _write_set(folder / "captions", pairs))]
    (folder / "captions" / "dataset_type.txt").write_text("retrieval\n")
    names = [caption(1000 + number)[:20] for number in range(CLASSES)]
    for part in (1, 2):
        images = [
            {"jpg": photo_like(part * IMAGES + number), "cls": str(number % CLASSES).encode()}
            for number in range(IMAGES)
        ]
        sets.append(("zero_shot", _write_set(folder / f"classes-{part}", images)))
        (folder / f"classes-{part}" / "classnames.txt").write_text("\n".join(names) + "\n")
        templates = folder / f"classes-{part}" / "zeroshot_classification_templates.txt"
        templates.write_text("\n".join(TEMPLATES) + "\n")
    job = folder / "job.json"
    job.write_text(json.dumps({"model": f"local-dir:{folder / 'model'}", "sets": sets}))
    return job


def _write_set(folder: Path, samples: list[dict[str, bytes]]) -> str:
    from neuclip.data.convert import write_shards

    write_shards(folder / "test", (tuple(members.items()) for members in samples), len(samples))
    (folder / "test" / "00000.tar").rename(folder / "test" / "0.tar")
    (folder / "test" / "nshards.txt").write_text("1\n")
    return str(folder)


def _run_side(python: str, name: str, job: Path) -> dict[str, Any]:
    done = subprocess.run([python, __file__, name, str(job)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{python} failed:\n{done.stderr[-3000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _compare(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Exit if figures differ by more than two images of a set. Rounding may change the rank of queries with nearly
    equal scores."""
    for path, figures in ours.items():
        for key, other in NAMES.items():
            if key in figures and other in theirs[path] and abs(figures[key] - theirs[path][other]) > 2 / IMAGES:
                raise SystemExit(f"{Path(path).name}: {key} is {figures[key]}, clip_benchmark's {theirs[path][other]}")


def our_side(job: dict[str, Any]) -> dict[str, Any]:
    """Evaluate all sets in one call of neuclip."""
    import neuclip

    paths = {kind: tuple(path for one, path in job["sets"] if one == kind) for kind in ("retrieval", "zero_shot")}
    by_set: dict[str, dict[str, float]] = {}
    for key, value in neuclip.evaluate(job["model"], batch_size=BATCH, **paths).items():
        path, _, metric = key.rpartition(".")
        by_set.setdefault(path, {})[metric] = value
    return by_set


def their_side(job: dict[str, Any]) -> dict[str, Any]:
    """Evaluate one set after the other, as clip_benchmark's command does."""
    _declare_missing_operators()
    import torch
    from clip_benchmark.datasets.builder import build_dataset
    from clip_benchmark.metrics import zeroshot_classification, zeroshot_retrieval
    from clip_benchmark.models import load_clip

    figures = {}
    for kind, path in job["sets"]:
        model, transform, tokenizer = load_clip("open_clip", job["model"], "", None, device="cpu")
        model.eval()
        task = "zeroshot_retrieval" if kind == "retrieval" else "zeroshot_classification"
        dataset = build_dataset(
            f"wds/{Path(path).name}", root=path, transform=transform, split="test", download=False, task=task
        )
        loader = torch.utils.data.DataLoader(dataset.batched(BATCH), batch_size=None, num_workers=0)
        if kind == "retrieval":
            figures[path] = zeroshot_retrieval.evaluate(
                model, loader, tokenizer, recall_k_list=[1, 5], device="cpu", amp=False
            )
        else:
            figures[path] = zeroshot_classification.evaluate(
                model, loader, tokenizer, dataset.classes, dataset.templates, device="cpu", amp=False
            )
    return figures


def _declare_missing_operators() -> None:
    """Declare torchvision's missing operators, as neuclip.models does, which the other environment does not have."""
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


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[2]).read_text())
    figures = (our_side if sys.argv[1] == "ours" else their_side)(job)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(one.ru_utime + one.ru_stime for one in used)
    print("\n" + json.dumps({"figures": figures, "cpu": cpu}, default=float))
