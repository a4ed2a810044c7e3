"""DataComp's tasks from command to file: metrics against a brute force; what is kept, repeated, refused, renamed."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from PIL import Image

from neuclip import api
from neuclip.cli.main import main
from neuclip.models.build import build_model
from neuclip.models.export import export_model
from neuclip.records import read_lines
from tests.builders.data import CLASSNAMES, TEMPLATES, Member, encoded, image_bytes, npy, write_tar, write_task
from tests.builders.models import SMALL_FILE, build, timm_and_bert, write_bert
from tests.builders.processes import main_on_ranks

CIFAR, CLEVR, FMOW = "wds_cifar10_test", "wds_vtab-clevr_closest_object_distance_test", "wds_wilds-fmow_test"
FLICKR, WINOGAVIL = "wds_flickr30k_test", "winogavil"
NAMES = ["cat", "dog", "bird", "cow", "fish", "horse"]
REGIONS = [0, 0, 1, 1, 5, 2, 2, 0, 1, 2, 0, 1]
PUZZLE = [f"thing{number}" for number in range(10)]
RIGHT = PUZZLE[2:5]


def export_small(folder: Path, seed: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    built = build_model(str(SMALL_FILE))
    with torch.no_grad():
        for weights in built.towers.model.parameters():
            if weights.ndim > 1:
                weights.normal_(std=0.4)
    export_model(built, folder / "model")
    return folder


def fmow_members(*without_image: str) -> list[Member]:
    members = [(f"{name}.cls", b"1") for name in without_image]
    for number, region in enumerate(REGIONS):
        members += [(f"s{number}.png", image_bytes(number)), (f"s{number}.cls", str(number % 6).encode())]
        members += [(f"s{number}.npy", npy(region, 2000, number, 0))]
    return members


def write_root(root: Path) -> Path:
    """CIFAR-10 and CLEVR Distance (with its empty class name) of 34 images, FMoW of 12, Flickr of 6, one puzzle."""
    write_task(root / CIFAR, classnames=NAMES)
    write_task(root / CLEVR)
    write_task(root / FMOW, sizes=(1,), classnames=NAMES)
    write_tar(root / FMOW / "test" / "0.tar", fmow_members())
    pairs = [[(f"s{n}.png", image_bytes(n)), (f"s{n}.txt", f"picture {n}\nnumber {n}".encode())] for n in range(6)]
    write_tar(root / FLICKR / "test" / "0.tar", [member for pair in pairs for member in pair])
    (root / FLICKR / "test" / "nshards.txt").write_text("1\n")
    (root / FLICKR / "dataset_type.txt").write_text("retrieval\n")
    (root / WINOGAVIL / "images").mkdir(parents=True)
    for number, name in enumerate(PUZZLE):
        (root / WINOGAVIL / "images" / f"{name}.png").write_bytes(image_bytes(50 + number))
    line = {"cue": "Apple", "candidates": PUZZLE, "associations": RIGHT}
    (root / WINOGAVIL / "puzzles.jsonl").write_text(json.dumps(line) + "\n")
    return root


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = export_small(tmp_path_factory.mktemp("tasks"))
    write_root(folder / "root")
    return folder


@pytest.fixture
def copy(place, tmp_path, monkeypatch) -> Path:
    """A place of its own, which is the working folder too."""
    shutil.copytree(place, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return tmp_path / "copy"


def measure(place: Path, **options) -> dict[str, dict]:
    options = {"data": place / "root", "output": place / "results.jsonl"} | options
    results = api.measure_datacomp(f"local-dir:{place / 'model'}", **options)
    assert not results.failed
    return {line["dataset"]: line for line in results.lines}


@pytest.fixture(scope="module")
def lines(place) -> dict[str, dict]:
    return measure(place, output=place / "module.jsonl")


class Oracle:
    """Features of the bare open_clip model in double precision, one image and one text at a time."""

    def __init__(self, place: Path):
        self.model, self.transform, self.tokenize = api.load(f"local-dir:{place / 'model'}")
        self.model.double()

    def unit(self, features: torch.Tensor) -> np.ndarray:
        vector = features[0].detach().numpy()
        return vector / np.linalg.norm(vector)

    def image(self, content: bytes) -> np.ndarray:
        pixels = self.transform(Image.open(io.BytesIO(content)).convert("RGB"))
        return self.unit(self.model.encode_image(pixels[None].double()))

    def text(self, text: str) -> np.ndarray:
        return self.unit(self.model.encode_text(self.tokenize([text])))

    def right(self, images: int, classnames: list[str]) -> list[bool]:
        rows = [np.mean([self.text(one.replace("{c}", name)) for one in TEMPLATES], axis=0) for name in classnames]
        classifier = np.array([row / np.linalg.norm(row) for row in rows])
        return [int(np.argmax(classifier @ self.image(image_bytes(n)))) == n % 6 for n in range(images)]


def test_metrics_equal_a_brute_force_in_double_precision(place, lines):
    oracle = Oracle(place)
    assert lines["CIFAR-10"]["metrics"]["main_metric"] == pytest.approx(np.mean(oracle.right(34, NAMES)))
    right, regions = np.array(oracle.right(12, NAMES)), np.array(REGIONS)
    shares = {region: right[regions == region].mean() for region in (0, 1, 2, 5)}
    fmow = lines["FMoW"]["metrics"]
    assert {region: fmow[f"region:{region}"] for region in shares} == pytest.approx(shares)
    assert fmow["main_metric"] == fmow["acc_worst_region"] == pytest.approx(min(shares.values()))
    assert fmow["acc_worst_region_without_other"] == pytest.approx(min(shares[one] for one in (0, 1, 2)))
    kept = [name for name in CLASSNAMES if name]
    clevr = lines["CLEVR Distance"]["metrics"]
    assert clevr["main_metric"] == pytest.approx(np.mean(oracle.right(34, kept)))
    assert clevr["acc1_blank_classnames_keep"] == pytest.approx(np.mean(oracle.right(34, list(CLASSNAMES))))
    scores = [oracle.image(image_bytes(50 + n)) @ oracle.text("An apple") for n in range(10)]
    hits = len({PUZZLE[n] for n in np.argsort(scores)[-3:]} & set(RIGHT))
    assert lines["WinoGAViL"]["metrics"]["main_metric"] == pytest.approx(hits / (6 - hits))
    flickr = lines["Flickr"]["metrics"]
    texts = [(n, oracle.text(text)) for n in range(6) for text in (f"picture {n}", f"number {n}")]
    pictures = np.array([oracle.image(image_bytes(n)) for n in range(6)])
    found = np.mean([int(np.argmax(pictures @ text)) == n for n, text in texts])
    assert flickr["image_retrieval_recall@1"] == pytest.approx(found)
    best = [int(np.argmax([text @ picture for _, text in texts])) for picture in pictures]
    own = np.mean([texts[one][0] == n for n, one in enumerate(best)])
    assert flickr["main_metric"] == pytest.approx((own + found) / 2)


def test_lines_have_what_datacomps_aggregation_reads_and_where_they_come_from(place, lines):
    table = pandas.read_json(place / "module.jsonl", lines=True)
    assert len(table) == 5 and table["metrics"].map(lambda metrics: metrics["main_metric"]).notna().all()
    assert set(table["dataset"]) == {"CIFAR-10", "CLEVR Distance", "FMoW", "Flickr", "WinoGAViL"}
    meta = lines["CLEVR Distance"]["meta"]
    assert {len(meta[name]) for name in ("weights", "data", "templates")} == {64}
    assert (meta["precision"], meta["images"], meta["classes"], meta["skipped"]) == ("float32", 34, 6, 0)
    assert lines["Flickr"]["meta"]["captions"] == 12 and lines["WinoGAViL"]["meta"]["puzzles"] == 1


def measured_again(first: dict[str, dict], second: dict[str, dict]) -> set[str]:
    return {name for name in second if second[name]["meta"]["seconds"] != first[name]["meta"]["seconds"]}


def pixels(first: int) -> bytes:
    """A PNG whose length does not depend on its pixels."""
    values = np.arange(first, first + 12, dtype=np.uint8).reshape(2, 2, 3)
    return encoded(Image.fromarray(values), compress_level=0)


def in_a_shard(place: Path, first: int) -> None:
    write_task(place / "root" / CIFAR, sizes=(1,))
    write_tar(place / "root" / CIFAR / "test" / "0.tar", [("s0.png", pixels(first)), ("s0.cls", b"0")])


def in_a_folder(place: Path, first: int) -> None:
    for name in ("cat", "dog"):
        (place / "root" / CIFAR / name).mkdir(parents=True, exist_ok=True)
    (place / "root" / CIFAR / "cat" / "1.png").write_bytes(pixels(first))


def of_a_template(place: Path, first: int) -> None:
    in_a_shard(place, 0)
    templates = place / "root" / CIFAR / "zeroshot_classification_templates.txt"
    templates.write_text("a drawing of a {c}\n" if first else "{c}\n")


@pytest.mark.parametrize("write", [in_a_shard, in_a_folder, of_a_template])
def test_tasks_with_a_result_are_not_measured_again_unless_something_changed(copy, write):
    shutil.rmtree(copy / "root" / CIFAR)
    write(copy, 0)
    first, text = measure(copy), (copy / "results.jsonl").read_text()
    assert measure(copy) == first and (copy / "results.jsonl").read_text() == text
    write(copy, 12)
    assert measured_again(first, measure(copy)) == {"CIFAR-10"} and len(read_lines(copy / "results.jsonl")) == 5


def swap_words(tokenizer: dict) -> None:
    words = tokenizer["model"]["vocab"]
    words["red"], words["blue"] = words["blue"], words["red"]


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("tokenizer.json", swap_words),
        ("config.json", lambda config: config.update(hidden_act="relu")),
        ("open_clip_config.json", lambda config: config["preprocess_cfg"].update(mean=[0.0] * 3, std=[0.1] * 3)),
    ],
)
def test_the_same_weights_with_another_tokenizer_text_config_or_pixels_are_another_model(copy, file, change):
    pytest.importorskip("transformers")
    export_model(build(copy, timm_and_bert(write_bert(copy / "bert"))), copy / "model")
    write_task(copy / "root" / CIFAR, classnames=("red", "blue", "circle", "square", "a", "red circle"))
    first = measure(copy, tasks="cifar10,fmow")
    content = json.loads((copy / "model" / file).read_text())
    change(content)
    (copy / "model" / file).write_text(json.dumps(content))
    second = measure(copy, tasks="cifar10")
    assert second["CIFAR-10"]["meta"]["weights"] == first["CIFAR-10"]["meta"]["weights"]
    assert measured_again(first, second) == {"CIFAR-10"} and len(read_lines(copy / "results.jsonl")) == 1


def test_a_task_with_broken_data_is_reported_at_the_end_and_the_others_are_kept(copy, capsys):
    shard = copy / "root" / CIFAR / "test" / "1.tar"
    shard.unlink()
    flags = ["--data", str(copy / "root"), "--tasks", "cifar10,fmow,flickr", "--output", "out/results.jsonl"]
    assert main(["eval", f"local-dir:{copy / 'model'}", *flags]) == 1
    printed = capsys.readouterr()
    last = printed.err.splitlines()[-1]
    assert last.startswith("neuclip: 1 task not measured: CIFAR-10: ") and "1.tar" in last
    assert [line["dataset"] for line in read_lines(Path("out/results.jsonl"))] == ["Flickr", "FMoW"]
    assert "Datacomp Average" in printed.out and "2 of 38" in printed.out


def test_a_file_holds_one_model_and_that_of_another_is_renamed(copy, capsys):
    first = measure(copy)
    export_small(copy, seed=1)
    second = measure(copy, tasks="cifar10")
    assert second["CIFAR-10"]["meta"]["weights"] != first["CIFAR-10"]["meta"]["weights"]
    (aside,) = copy.glob("results-*.jsonl")
    assert len(read_lines(aside)) == 5 and len(read_lines(copy / "results.jsonl")) == 1
    assert f"results of other weights; they are now in {aside}" in capsys.readouterr().err
    export_small(copy)
    assert measure(copy) == first  # its file got its name back: the seconds are those of the first time
    (aside,) = copy.glob("results-*.jsonl")
    assert read_lines(aside) == [*second.values()]


def test_a_line_that_a_kill_cut_off_costs_only_its_own_task(copy):
    first, file = measure(copy), copy / "results.jsonl"
    file.write_text(file.read_text()[:-100])
    second = measure(copy)
    assert len(measured_again(first, second)) == 1 and len(read_lines(file)) == 5
    assert all(second[name]["metrics"] == line["metrics"] for name, line in first.items())


def test_a_weights_file_of_a_named_architecture_is_that_model(copy):
    weights = copy / "model" / "open_clip_model.safetensors"
    results = api.measure_datacomp(f"{SMALL_FILE}:{weights}", data=copy / "root", tasks="fmow")
    assert results.lines[0]["metrics"] == measure(copy, tasks="fmow")["FMoW"]["metrics"]
    assert results.file.parent.name == "evaluations" and results.file.is_file()


def complaint(capsys, *arguments: str) -> str:
    code = main(["eval", *arguments])
    text = capsys.readouterr().err
    assert text.startswith("neuclip: ") and text.count("\n") == 1
    return f"{code} {text}"


MODEL, ROOT = "local-dir:model", "--data=root"
MISTAKES = {
    f"{MODEL} {ROOT} --tasks cifr10": "did you mean cifar10",
    f"{MODEL} --data=model": "has no data of these tasks",
    f"{MODEL} {ROOT} --tasks mnist": "has no data of these tasks",
    f"{MODEL} {ROOT} --tasks ,": "2 neuclip: --tasks names no task",
    f"{MODEL} {ROOT} --output model": "model is a folder; give a file",
    f"{MODEL} {ROOT} --output model/open_clip_config.json/results.jsonl": "results.jsonl cannot be created",
    f"{MODEL} --tasks mnist": "give another folder with --data, or download",
    f"tiny:model/open_clip_model.safetensors {ROOT}": "cannot be loaded into tiny",
    f"ViT-B-32-quickgelu:openai {ROOT}": "1 neuclip: ViT-B-32-quickgelu:openai is not on this machine",
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_mistakes_are_one_line(copy, capsys, monkeypatch, arguments):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert MISTAKES[arguments] in complaint(capsys, *arguments.split())


@pytest.mark.parametrize(
    "content",
    [
        b"no results\n",
        b"\x80\xff\n",
        b"[]\n",
        b"[" * 20_000 + b"\n",
        b'{"key": "cifar10", "metrics": {"main_metric": 0.5}}\n',  # of another program: nobody knows of which weights
        b'{"key": "cifar10", "metrics": 5, "meta": {"weights": "a"}}\n',
        b'{"key": "cifar10", "metrics": {"main_metric": "0.5"}, "meta": {"weights": "a"}}\n',
        b'{"key": ["cifar10"], "metrics": {"main_metric": 0.5}, "meta": {"weights": "a"}}\n',
    ],
)
def test_a_damaged_file_of_results_is_one_line_that_names_it_and_stays(copy, capsys, content):
    (copy / "notes.jsonl").write_bytes(content)
    flags = [f"--data={copy / 'root'}", "--tasks", "cifar10", "--output", str(copy / "notes.jsonl")]
    text = complaint(capsys, f"local-dir:{copy / 'model'}", *flags)
    assert f"2 neuclip: {copy / 'notes.jsonl'}: is damaged or has the wrong format (" in text
    assert text.endswith(", or move it away\n")
    assert (copy / "notes.jsonl").read_bytes() == content


def test_the_table_shows_chance_what_is_counted_otherwise_and_what_is_missing(copy, capsys):
    assert main(["eval", f"local-dir:{copy / 'model'}", "--data", str(copy / "root")]) == 0
    shown = capsys.readouterr().out
    assert "acc worst region without other" in shown and "acc1 blank classnames keep" in shown
    assert "Without data (neuclip data get NAME): caltech101, cifar100" in shown
    assert "CIFAR-10: measured on 34 of 10,000" in shown and "5 of 38" in shown
    (kept,) = Path("evaluations").glob("*.jsonl")
    assert f"Results: {kept}" in shown and len(read_lines(kept)) == 5
    assert main(["eval", f"local-dir:{copy / 'model'}", "--data", str(copy / "root"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert len(printed["tasks"]) == 5 and len(printed["missing"]) == 33 and printed["averages"][0]["value"] is None


def test_own_data_and_tasks_are_measured_together(copy, capsys):
    flags = ["--data", str(copy / "root"), "--tasks", "flickr", "--retrieval", str(copy / "root" / FLICKR), "--json"]
    assert main(["eval", f"local-dir:{copy / 'model'}", *flags]) == 0
    printed = json.loads(capsys.readouterr().out)
    own = printed["figures"][f"{copy / 'root' / FLICKR}.text_to_image_recall_at_1"]
    assert own == printed["tasks"][0]["metrics"]["image_retrieval_recall@1"]


def test_bad_samples_are_counted_up_to_a_share_and_captions_are_never_joined(copy, capsys):
    write_tar(copy / "root" / FMOW / "test" / "0.tar", fmow_members("s99"))
    assert measure(copy, tasks="fmow", max_bad_share=0.1)["FMoW"]["meta"]["skipped"] == 1
    (copy / "root" / WINOGAVIL / "images" / f"{PUZZLE[0]}.png").write_bytes(b"no image")
    write_tar(copy / "root" / FMOW / "test" / "0.tar", fmow_members("s98", "s99"))
    options = {"data": copy / "root", "tasks": "fmow,winogavil,flickr", "output": copy / "results.jsonl"}
    results = api.measure_datacomp(f"local-dir:{copy / 'model'}", **options)
    assert results.failed.keys() == {"FMoW", "WinoGAViL"} and "2 of 14 samples cannot be used" in results.failed["FMoW"]
    assert [line["dataset"] for line in results.lines] == ["Flickr"]  # an older line of FMoW is of other data
    puzzles = measure(copy, tasks="winogavil", max_bad_share=0.1)["WinoGAViL"]
    assert puzzles["meta"]["puzzles"] == 0 and puzzles["metrics"]["main_metric"] is None
    (copy / "root" / FLICKR / "dataset_type.txt").unlink()
    flags = ["--data", str(copy / "root"), "--tasks", "flickr"]
    assert main(["eval", f"local-dir:{copy / 'model'}", *flags]) == 1
    assert "dataset_type.txt: does not say retrieval; write this word into it" in capsys.readouterr().err


@pytest.mark.slow
def test_two_ranks_measure_what_one_measures(copy):
    (copy / "results.jsonl").unlink(missing_ok=True)
    first, second = main_on_ranks(2, ["eval", f"local-dir:{copy / 'model'}", "--data", str(copy / "root"), "--json"])
    assert first.code == second.code == 0, first.errors + second.errors
    assert second.output == ""
    both = {line["dataset"]: line["metrics"] for line in json.loads(first.output)["tasks"]}
    alone = measure(copy, batch_size=5)
    assert both == {name: pytest.approx(line["metrics"]) for name, line in alone.items()}
