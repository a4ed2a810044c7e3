"""Figures of a saved open_clip model by clip_benchmark, for the environment it runs in; it needs nothing of ours.

    PYTHON clip_benchmark_figures.py MODEL_FOLDER SET...

prints a JSON object: the metrics of each set, and the seconds it took. Tested with clip_benchmark 1.6.2, numpy 2.3.5,
webdataset 0.2.86, requests and torch 2.13.0; docs/guide.md says what differs.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

try:
    import torchvision  # noqa: F401
except RuntimeError:  # built for CUDA beside a torch without: its two operators are never called
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import open_clip
from clip_benchmark.datasets.builder import build_wds_dataset, image_captions_collate_fn
from clip_benchmark.metrics import zeroshot_classification, zeroshot_retrieval


def figures(model, transform, tokenizer, folder: Path) -> dict[str, float]:
    dataset = build_wds_dataset(folder.name, transform, data_dir=str(folder))
    options = {"batch_size": 64, "num_workers": 0}
    if dataset.classes is None:
        loader = torch.utils.data.DataLoader(dataset, collate_fn=image_captions_collate_fn, **options)
        return zeroshot_retrieval.evaluate(model, loader, tokenizer, "cpu", amp=False, recall_k_list=[1, 5, 10])
    loader = torch.utils.data.DataLoader(dataset, **options)
    classes, templates = dataset.classes, dataset.templates
    return zeroshot_classification.evaluate(model, loader, tokenizer, classes, templates, "cpu", amp=False)


def main() -> None:
    name = f"local-dir:{sys.argv[1]}"
    model, _, transform = open_clip.create_model_and_transforms(name)
    tokenizer = open_clip.get_tokenizer(name)
    model.eval()
    found = {}
    for folder in map(Path, sys.argv[2:]):
        started = time.monotonic()
        measured = figures(model, transform, tokenizer, folder)
        found[folder.name] = {key: float(value) for key, value in measured.items()} | {
            "seconds": time.monotonic() - started
        }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
