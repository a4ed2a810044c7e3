"""Every method on locked towers: product photos with their titles, features stored once, under a minute per run.

Both towers of lite0-minilm stay as they are, and two matrices of width 256 train on 39,325 pairs. Of each method six
configurations are tried at batch 128, judged by 1,000 training pairs that are held out: three rates (more, where the
best is at the edge), then three other courses of the temperature (comparison/methods.py) at the best rate. Batch 32
takes what was best, by the same rules as there. The final runs choose nothing; recall is over the different titles of
the test photos. Runs that exist are not repeated.

Usage: python -m benchmarks.locked_photos PHOTOS FOLDER [--samples 192000] [--seeds 3] [--methods clip,...]
       PHOTOS has train/ and test/, with tar shards.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

from benchmarks.comparison.methods import METHODS, TEMPERATURE_RATE, TUNED_BATCH, Flags, Method, rho
from neuclip import api
from neuclip.data.loader import read_images
from neuclip.data.open import open_source
from neuclip.evaluation.embedding import EmbeddedPairs
from neuclip.evaluation.retrieval import recall
from neuclip.models.build import build_model
from neuclip.models.modes import apply_modes
from neuclip.models.towers import Towers
from neuclip.settings.reading import read_settings
from neuclip.settings.sections import ModelSettings

MODEL = ModelSettings(name="lite0-minilm", image_tower="locked", text_tower="locked", image_size=112)
NAMES = ("clip", "minibatch", "siglip", "fastclip", "amorlip", "neuclip-paper", "neuclip-tuned", "rolling", "queue")
RATES = (2.5e-4, 1e-3, 4e-3)
TUNING_SEED = 10
SELECTION = tuple(
    f"{way}_recall_at_{k}" for way in ("image_to_different_text", "different_text_to_image") for k in (1, 10)
)


class HeldOut:
    """Photos and titles behind the locked trunks: what is left to do for each run is two matrix products."""

    def __init__(self, data: Path, file: Path):
        if not file.exists():
            torch.save(trunk_features(data), file)
        stored = torch.load(file, weights_only=True)
        self.image, self.text, self.text_of, self.texts = (stored[key] for key in ("image", "text", "text_of", "texts"))

    @torch.no_grad()
    def recalls(self, run: Path) -> dict[str, float]:
        towers = Towers(api.load(f"local-dir:{run / 'model'}")[0]).eval()
        number = torch.arange(len(self.image))
        image, text = towers.image_head(self.image), towers.text_head(self.text)
        return recall(EmbeddedPairs(image, text, self.texts, number, self.text_of, number, ()))


def trunk_features(data: Path) -> dict[str, Tensor | list[str]]:
    built = build_model(MODEL.name, image_size=MODEL.image_size)
    apply_modes(built.towers, MODEL)
    towers, images, titles = built.towers.eval(), [], []
    for batch in read_images(open_source(str(data)), transform=built.transform, batch_size=256, workers=1):
        images.append(towers.trunk_features("image", batch.images))
        titles += [captions[0] for captions in batch.captions]
    texts = {title: row for row, title in enumerate(dict.fromkeys(titles))}
    text = towers.trunk_features("text", built.tokenize(list(texts)))
    return {
        "image": torch.cat(images),
        "text": text,
        "text_of": torch.tensor([texts[t] for t in titles]),
        "texts": list(texts),
    }


class Laboratory:
    def __init__(self, photos: Path, folder: Path, samples: int):
        self.photos, self.folder, self.samples = photos, folder, samples
        folder.mkdir(parents=True, exist_ok=True)
        self.test = HeldOut(photos / "test", folder / "test.pt")

    def train(self, name: str, flags: Flags) -> Path:
        run = self.folder / name
        if not (run / "summary.json").exists():
            common = {
                "data.train": str(self.photos / "train"),
                "data.hold_out": "0",
                "model.image_size": str(MODEL.image_size),
                "train.samples": str(self.samples),
                "evaluation.every": "0",
                "evaluation.error_anchors": "0",
                "evaluation.gallery": "0",
                "checkpoint.keep": "1",
                "run.threads": "1",
                "run.folder": str(self.folder),
                "run.name": name,
            }
            given = [part for key, value in (common | flags).items() for part in (f"--{key}", value)]
            api.train(read_settings(Path("locked"), given))
        return run

    def tune(self, method: Method) -> tuple[int, float]:
        """The place in `tried` and the rate that are best together."""
        rates = {rate: self.tuning_score(method, 1, rate) for rate in RATES}
        while (best := max(rates, key=rates.__getitem__)) in (min(rates), max(rates)):  # at the edge: go on
            rate = best / 4 if best == min(rates) else best * 4
            rates[rate] = self.tuning_score(method, 1, rate)
        results = {(1, best): rates[best]}
        results |= {(choice, best): self.tuning_score(method, choice, best) for choice in (0, 2, 3)}
        return max(results, key=results.__getitem__)

    def tuning_score(self, method: Method, choice: int, rate: float) -> float:
        flags = flags_of(method, choice, rate, TUNED_BATCH, TUNING_SEED) | {"data.hold_out": "1000"}
        run = self.train(f"tune-{method.name}-{choice}-{rate:g}", flags)
        figures = json.loads((run / "summary.json").read_text())["evaluation"]
        score = mean(value for key, value in figures.items() if key.rpartition(".")[2] in SELECTION)
        print(f"{run.name}: {100 * score:.2f}", flush=True)
        return score

    def final(self, method: Method, choice: int, rate: float, batch_size: int, seed: int) -> dict[str, float]:
        run = self.train(f"final-{method.name}-{batch_size}-{seed}", flags_of(method, choice, rate, batch_size, seed))
        summary = json.loads((run / "summary.json").read_text())
        return {**self.test.recalls(run), "calibration": summary["calibration"], "seconds": summary["seconds"]}


def method_of(name: str) -> Method:
    """Of comparison/methods.py. Methods with a normalizer over the data set get other values of rho: with those there,
    meant for shorter runs, the temperature falls to its minimum."""
    method = next(method for method in METHODS if method.name == name)
    of_data_set = name.startswith(("neuclip", "fastclip", "rolling", "queue"))
    return replace(method, tried=rho(2.5, 3.5, 4.5, 4.0)) if of_data_set else method


def flags_of(method: Method, choice: int, rate: float, batch_size: int, seed: int) -> Flags:
    """For a smaller batch rates shrink with its root, as in comparison/plan.py."""
    shrink = (batch_size / TUNED_BATCH) ** 0.5
    flags = {TEMPERATURE_RATE: "2e-3"} | method.fixed | method.tried[choice] | method.small_batch(choice, batch_size)
    flags[TEMPERATURE_RATE] = f"{float(flags[TEMPERATURE_RATE]) * shrink:g}"
    return flags | {
        "optimizer.learning_rate": f"{rate * shrink:g}",
        "train.batch_size": str(batch_size),
        "run.seed": str(seed),
    }


def main(asked: argparse.Namespace) -> None:
    laboratory = Laboratory(asked.photos, asked.folder, asked.samples)
    methods = [method_of(name) for name in asked.methods.split(",")]
    chosen = {method.name: laboratory.tune(method) for method in methods}
    for batch_size in (TUNED_BATCH, 32):
        print(f"\nBatch {batch_size}\n\n| method | choice, rate | {' | '.join(COLUMNS)} |")
        print("| --- " * (len(COLUMNS) + 2) + "|")
        for method in methods:
            seeds = [laboratory.final(method, *chosen[method.name], batch_size, seed) for seed in range(asked.seeds)]
            cells = [cell([one[key] for one in seeds], 100 if "recall" in key else 1) for key in COLUMNS.values()]
            choice, rate = chosen[method.name]
            print(f"| {method.name} | {choice}, {rate:g} | {' | '.join(cells)} |", flush=True)


def cell(values: list[float | None], factor: int) -> str:
    """Every seed, and their mean."""
    known = [factor * value for value in values if value is not None]
    return f"{', '.join(f'{value:.3g}' for value in known)} (**{mean(known):.3g}**)" if known else "–"


COLUMNS = {
    "i→t @1": SELECTION[0],
    "@10": SELECTION[1],
    "t→i @1": SELECTION[2],
    "t→i @10": SELECTION[3],
    "calibration": "calibration",
    "seconds": "seconds",
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--samples", type=int, default=192_000, help="of each run: 4.9 epochs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", default=",".join(NAMES))
    main(parser.parse_args())
