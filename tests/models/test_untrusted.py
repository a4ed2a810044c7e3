"""Models that somebody else wrote, or that are damaged: each mistake is one line that says where and what to do, and no
code of a model ever runs: real folders with real code, real commands, answers on stdin."""

from __future__ import annotations

import json
import pickle
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from neuclip.cli.main import main
from neuclip.errors import RunFailed, UserError
from neuclip.models import open_clip_module
from neuclip.models.build import build_model
from neuclip.models.export import export_model, write_text_files
from neuclip.records import RunFolder
from neuclip.runs.folder import write_settings
from neuclip.runs.load import open_target
from neuclip.settings.reading import read_settings
from tests.builders.images import write_shard
from tests.builders.models import TINY, build_kind, timm_and_bert, tiny_with, write_bert
from tests.builders.processes import start

pytest.importorskip("transformers")

CONFIG, WEIGHTS = "open_clip_config.json", "open_clip_model.safetensors"
Prepare = Callable[[Path], dict[str, Any]]  # from an empty folder to the arguments of build_model


# Mistakes.


def write(file: Path, content: Any) -> str:
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(file)


def config(content: Any) -> Prepare:
    return lambda folder: {"model": write(folder / "mine.json", content)}


def saved(content: Any) -> Prepare:
    """A folder with weights and this config."""

    def prepare(folder: Path) -> dict[str, Any]:
        save_file({"x": torch.zeros(3)}, folder / WEIGHTS)
        write(folder / CONFIG, content)
        return {"model": f"local-dir:{folder}"}

    return prepare


def exported(damage: Callable[[Path], object], *, named: bool = True, kind: str = "ResNet") -> Prepare:
    def prepare(folder: Path) -> dict[str, Any]:
        export_model(build_kind(kind, folder), folder / "model")
        damage(folder / "model")
        return {"model": f"local-dir:{folder}/model" if named else f"{folder}/model"}

    return prepare


def weights(content: Any, name: str = "weights.pt") -> Prepare:
    """A file of these bytes, or with this content, for `tiny`."""

    def prepare(folder: Path) -> dict[str, Any]:
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            torch.save(content() if callable(content) else content, folder / name)
        return {"model": "tiny", "pretrained": str(folder / name)}

    return prepare


def given(**arguments: Any) -> Prepare:
    return lambda folder: {key: str(x).replace("FOLDER", str(folder)) for key, x in arguments.items()}


def image_weights(change: Callable[[dict], dict]) -> Prepare:
    """For the timm tower of a pair, whose weights were changed."""

    def prepare(folder: Path) -> dict[str, Any]:
        import timm

        save_file(change(timm.create_model("test_vit").state_dict()), folder / "vit.safetensors")
        model = write(folder / "mine.json", timm_and_bert(write_bert(folder / "bert")))
        return {"model": model, "pretrained": f"image={folder}/vit.safetensors"}

    return prepare


def deeper(state: dict) -> dict:
    """A deeper model of the same family has every tensor."""
    return state | {f"blocks.99.{name[9:]}": x.clone() for name, x in state.items() if name.startswith("blocks.0.")}


def two_weights(folder: Path) -> dict[str, Any]:
    return exported(lambda _: None)(folder) | {"pretrained": str(folder / "model" / WEIGHTS)}


def no_words(folder: Path) -> dict[str, Any]:
    model = write(folder / "mine.json", timm_and_bert(write_bert(folder / "bert")))
    remove("tokenizer.json", "vocab.txt")(folder / "bert")
    return {"model": model}


def long_context(folder: Path) -> dict[str, Any]:
    model = write(folder / "mine.json", timm_and_bert(write_bert(folder / "bert")))  # of 16 tokens
    return {"model": model, "context_length": 99}


def remove(*names: str) -> Callable[[Path], object]:
    return lambda folder: [(folder / name).unlink() for name in names]


def replace_config(model: dict, **preprocess: Any) -> Callable[[Path], object]:
    return lambda folder: write(folder / CONFIG, {"model_cfg": model, "preprocess_cfg": preprocess})


def cut(name: str, length: int) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:length])


DAMAGED, NO_TOKENIZER = (
    "is damaged or has the wrong format",
    r"/model has no files of the tokenizer .*tokenizer\.json",
)
TOKENIZER, PAIR = "tokenizer_kwargs", "timm and transformers"
MISTAKES: dict[str, tuple[Prepare, str]] = {
    # Configs.
    "not JSON": (config("{,}"), rf"mine\.json: {DAMAGED} \(JSONDecodeError"),
    "nested too deep": (config("[" * 100_000), rf"mine\.json: {DAMAGED} \(RecursionError"),
    "a list": (config("[]"), "holds no JSON object"),
    "no text tower": (config({"embed_dim": 8, "vision_cfg": {}}), "has no text_cfg"),
    "a config of a folder": (config({"model_cfg": TINY}), "local-dir:"),
    "a section of another kind": (config(TINY | {"vision_cfg": 3}), "vision_cfg is 3"),
    "a width in words": (config(TINY | {"embed_dim": "wide"}), "embed_dim is 'wide'"),
    "an unknown field": (config(tiny_with(text_cfg={"contxt_length": 8})), "text_cfg.contxt_length"),
    "heads that do not divide": (config(tiny_with(text_cfg={"heads": 7})), "correct"),
    "a field of another kind": (config(tiny_with(text_cfg={"width": "wide"})), "mine.json"),
    "a vocabulary too small": (config(tiny_with(text_cfg={"vocab_size": 100})), "mine.json"),
    "an unknown pooling": (config(tiny_with(text_cfg={"pool_type": "nothing"})), "mine.json"),
    "an unknown image tower": (config(tiny_with(vision_cfg={"timm_model_name": "resnet51"})), "resnet51"),
    "an unknown cleaning": (config(tiny_with(text_cfg={TOKENIZER: {"clean": "soap"}})), "mine.json"),
    "an image size of zero": (config(tiny_with(vision_cfg={"image_size": 0})), "mine.json"),
    "a decoder without its text tower": (config(TINY | {"multimodal_cfg": {"width": 8}}), "mine.json"),
    # What open_clip would hand on to torch, timm or transformers, where it may mean "run this code".
    "a tokenizer's argument": (config(tiny_with(text_cfg={TOKENIZER: {"trust_remote_code": False}})), "trust_remote"),
    "a tokenizer's file": (config(tiny_with(text_cfg={TOKENIZER: {"tokenizer_file": "x"}})), "tokenizer_file"),
    "pairs as arguments": (config(tiny_with(text_cfg={TOKENIZER: [["trust_remote_code", True]]})), TOKENIZER),
    "a norm's argument": (config(tiny_with(text_cfg={"norm_kwargs": {"device": "cuda"}})), "norm_kwargs.device "),
    "a field of transformers": (config(tiny_with(text_cfg={"hf_model_config": {"auto_map": {}}})), "hf_model_config "),
    "an object for a number": (config(tiny_with(text_cfg={"heads": {"auto_map": 4}})), r"text_cfg\.heads "),
    "an image tower of the hub": (config(tiny_with(vision_cfg={"timm_model_name": "hf-hub:a/b"})), "timm_model_name"),
    "an image tower of a path": (config(tiny_with(vision_cfg={"timm_model_name": "/tmp/x"})), "timm_model_name"),
    "an argument of open_clip": (config(TINY | {"pretrained_image_path": "x"}), "pretrained_image_path "),
    # Names and sizes.
    "a misspelled name": (given(model="ViT-B32"), r"did you mean .*ViT-B-32"),
    "a name that is near to one": (given(model="tinny"), r"did you mean tiny\?|did you mean tiny or (?!tiny)"),
    "a name of nothing": (given(model="qqqqqqqq"), "list_models"),
    "no config there": (given(model="nowhere.json"), "no such file"),
    "no folder there": (given(model="local-dir:nowhere"), "open_clip_config.json"),
    "no folder given": (given(model="local-dir:"), "give the folder"),
    "an image size for no tower": (lambda _: {"model": "tiny", "image_size": 16}, "--model.image_size than 16"),
    "a context for no tower": (long_context, r"give another --model\.context_length than 99"),
    # Folders.
    "a folder's config that is none": (saved("no"), rf"{CONFIG}: {DAMAGED}"),
    "no section": (saved(TINY), "has no model_cfg"),
    "a field that is none": (saved({"model_cfg": TINY | {"x": 1}}), f"{CONFIG}: x is not a field"),
    "no preparation": (saved({"model_cfg": TINY, "preprocess_cfg": 3}), f"{CONFIG}: preprocess_cfg is 3"),
    "two numbers": (saved({"model_cfg": TINY, "preprocess_cfg": {"std": [1, 2]}}), r"preprocess_cfg\.std is \[1, 2\]"),
    "an interpolation": (exported(replace_config(TINY, interpolation=3)), CONFIG),
    "a folder without its prefix": (exported(lambda _: None, named=False), "give --model.name local-dir:"),
    "no weights": (exported(remove(WEIGHTS)), "/model has no weights"),
    "truncated weights": (exported(cut(WEIGHTS, 5000)), WEIGHTS),
    "other tensors": (saved({"model_cfg": TINY}), WEIGHTS),
    # transformers makes one that knows no word, without complaint: recall@10 was 25 % instead of 97.5 %.
    "no tokenizer": (exported(remove("tokenizer.json"), kind=PAIR), NO_TOKENIZER),
    "no tokenizer at all": (exported(remove("tokenizer.json", "tokenizer_config.json"), kind=PAIR), NO_TOKENIZER),
    "a cut tokenizer": (exported(cut("tokenizer.json", 1), kind=PAIR), rf"model/tokenizer\.json: {DAMAGED}"),
    "a cut config of it": (exported(cut("tokenizer_config.json", 1), kind=PAIR), rf"tokenizer_config\.json: {DAMAGED}"),
    "a cut text tower": (exported(cut("config.json", 1), kind=PAIR), rf"model/config\.json: {DAMAGED}"),
    "a text tower without tokenizer": (no_words, "/bert has no files of the tokenizer"),
    # Weights.
    "of another width": (weights(lambda: build_model("small").towers.model.state_dict()), "weights.*width changed"),
    "no checkpoint": (weights(b"these are no weights"), "weights.pt"),
    "an empty file": (weights(b"", "weights.safetensors"), "weights.safetensors"),
    "an array": (weights(b"PK", "weights.npz"), "weights.npz"),
    "pickled objects": (weights(pickle.dumps(Path("x"))), "weights.pt"),
    "an empty dictionary": (weights({}), "weights.pt"),
    "a list of numbers": (weights([1, 2]), "weights.pt"),
    "numbers instead of tensors": (weights({"logit_scale": 1.0}), "weights.pt"),
    "no temperature": (weights({"text_projection": torch.zeros(128, 128)}), "weights.pt"),
    "a folder": (given(model="tiny", pretrained="FOLDER"), "is a folder"),
    "no file": (given(model="tiny", pretrained="FOLDER/x.pt"), "neither a file nor a tag"),
    "a folder's weights and others": (two_weights, "remove --model.pretrained"),
    "an unknown tag": (given(model="ViT-B-32", pretrained="opnai"), "such as .*openai"),
    "another activation": (given(model="ViT-B-32", pretrained="openai"), "give ViT-B-32-quickgelu"),
    "no weights of this tower": (image_weights(lambda state: {"stem": torch.zeros(3)}), "vit.*: .*Missing key"),
    "of a deeper tower": (image_weights(deeper), r"no weights of the image tower .*Unexpected key.* \"blocks.99"),
    "no tower of timm": (given(model="tiny", pretrained="image=x"), "needs an image tower of timm"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_that_says_where_it_is_and_what_to_do(mistake, tmp_path):
    prepare, message = MISTAKES[mistake]
    arguments = prepare(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        build_model(**arguments)
    line = str(caught.value)
    assert "\n" not in line and "; " in line and len(line) < 600


def test_every_config_of_open_clip_itself_passes_the_check(tmp_path):
    """As the file of somebody else, which it is after an export. None is built: each fails at what comes after."""
    for name in open_clip_module().list_models():
        model = write(tmp_path / "mine.json", open_clip_module().get_model_config(name))
        with pytest.raises(UserError, match="neither a file nor a tag of"):
            build_model(model, pretrained="no-such-weights")


# Code.

CODE = """
import os, pathlib
pathlib.Path(os.environ["PWNED"]).touch()
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast
class Tokenizer(PreTrainedTokenizerFast): pass
class Config(BertConfig): model_type = "harmless"
class Model(BertModel): config_class = Config
"""


@pytest.fixture
def pwned(tmp_path, monkeypatch) -> Path:
    """The file that appears if the folder's code runs."""
    monkeypatch.setenv("PWNED", str(tmp_path / "pwned"))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    return tmp_path / "pwned"


def exploit(way: str, folder: Path) -> str:
    """A model name whose folder holds code; `asks` is the way in which transformers asks on the terminal first."""
    folder.mkdir()
    (folder / "code.py").write_text(CODE)
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    tokenizer = {"auto_map": {"AutoTokenizer": [None, "code.Tokenizer"]}, "tokenizer_class": "Tokenizer"}
    write(folder / "tokenizer_config.json", tokenizer)
    auto_map = {"AutoConfig": "code.Config", "AutoModel": "code.Model"}
    write(folder / "config.json", {"model_type": "harmless", "auto_map": auto_map})
    text = {
        "tokenizer asks": {"hf_tokenizer_name": str(folder)},
        "text tower asks": {"hf_model_name": str(folder), "hf_proj_type": "linear"},
    }.get(way, {"hf_tokenizer_name": str(folder), TOKENIZER: {"trust_remote_code": True}})
    if way != "local-dir":
        return write(folder.with_suffix(".json"), tiny_with(text_cfg=text))
    export_model(build_model("tiny"), folder)
    write(folder / CONFIG, {"model_cfg": tiny_with(text_cfg=text)})
    return f"local-dir:{folder}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "way", "field"),
    [
        ("eval", "local-dir", "trust_remote_code"),
        ("doctor", "config", "trust_remote_code"),
        ("train", "tokenizer asks", "hf_tokenizer_name"),
        ("train", "text tower asks", "hf_model_name"),
    ],
)
def test_no_command_runs_the_code_of_a_model(command, way, field, tmp_path, pwned):
    name, data = exploit(way, tmp_path / "evil"), str(write_shard(tmp_path / "x.tar", range(20)))
    settings = ["--model.name", name, "--train.batch_size", "4", "--train.samples", "8", "--data.workers", "0"]
    arguments = {
        "doctor": ["doctor", data, *settings],
        "train": ["train", "--data.train", data, *settings, "--run.folder", str(tmp_path / "runs")],
        "eval": ["eval", name, "--retrieval", data],
    }[command]
    child = start(main, arguments)
    child.stdin.write("y\n" * 9)
    ended = child.wait()
    assert not pwned.exists()
    assert ended.code in (1, 2) and "Traceback" not in ended.errors, ended.errors
    assert field in ended.errors + ended.output


@pytest.mark.parametrize("way", ["local-dir", "config", "tokenizer asks", "text tower asks"])
def test_no_model_runs_its_code(way, tmp_path, pwned, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *question: "y")
    message = "comes with its own code, which is never run" if "asks" in way else "trust_remote_code"
    with pytest.raises(UserError, match=message):
        build_model(exploit(way, tmp_path / "evil"))
    assert not pwned.exists()


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("import os, pathlib; pathlib.Path(os.environ['PWNED']).touch()",))


def test_a_pickle_with_code_is_refused(tmp_path, pwned):
    (tmp_path / "weights.pt").write_bytes(pickle.dumps({"state_dict": Evil()}))
    with pytest.raises((UserError, RunFailed), match=r"weights\.pt"):
        build_model("tiny", pretrained=str(tmp_path / "weights.pt"))
    assert not pwned.exists()


# Runs of a stranger.

PARTS: dict[str, object] = {"step": 1, "samples": 8, "seconds": 1.0, "model_name": "hf-hub:evil/model", "order": ""}
PARTS |= {"objective_name": "clip", "data": {}, "objective": {}, "optimizer": {}, "random": {}}  # beside its model


def write_run(folder: RunFolder, built: Any, change: Callable[[dict], object]) -> None:
    """A run with one checkpoint, whose settings name addresses of a stranger."""
    state = PARTS | {"model": built.towers.model.state_dict(), "open_clip_config": built.saved_config}
    change(state)
    folder.checkpoints.mkdir(parents=True)
    torch.save(state, folder.checkpoints / "samples-000000000008.pt")
    flags = ["--model.name", "hf-hub:evil/model", "--model.pretrained", "https://evil.example/x.pt"]
    write_settings(folder, read_settings(None, [*flags, "--run.device", "cpu"]))


@pytest.fixture
def no_network(monkeypatch) -> list[object]:
    """Every attempt to reach another machine."""
    attempts: list[object] = []

    def refuse(*address: object, **named: object) -> None:
        attempts.append(address)
        raise OSError("there is no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return attempts


@pytest.mark.parametrize("kind", ["open_clip", "transformers"])
def test_a_run_of_a_stranger_is_opened_without_asking_any_address_in_its_settings(kind, tmp_path, no_network):
    """Its checkpoint and its folder are all that counts: not model.name, model.pretrained, nor a tokenizer's name."""
    own = {"hf_tokenizer_name": str(write_bert(tmp_path / "bert"))} if kind == "transformers" else {}
    named = {"hf_tokenizer_name": "evil/tokenizer"} if own else {}
    built = build_model(write(tmp_path / "mine.json", tiny_with(text_cfg=own)))
    folder = RunFolder(tmp_path / "run")
    write_run(folder, built, lambda state: state["open_clip_config"]["model_cfg"]["text_cfg"].update(named))
    if own:  # without the tokenizer it is refused, not fetched
        with pytest.raises(RunFailed, match=r"evil/tokenizer .*not on this machine; download them once"):
            open_target(str(folder.path))
        write_text_files(built, folder.model)
    opened, _ = open_target(str(folder.path))
    assert torch.equal(opened.tokenize(["a red circle"]), built.tokenize(["a red circle"]))
    assert opened.towers.weights_sha256() == built.towers.weights_sha256()
    assert no_network == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("open_clip_config"), "open_clip_config"),
        (lambda state: state.update(open_clip_config=3), "samples-"),
        (lambda state: state["open_clip_config"]["model_cfg"].update(device="cuda"), "device is not a field"),
        (lambda state: state["open_clip_config"].update(preprocess_cfg={"mean": [1]}), "preprocess_cfg.mean"),
        (lambda state: state.update(model={"x.parametrizations.weight.original": torch.zeros(2)}), "samples-"),
        (lambda state: state.update(model={"x": torch.zeros(2)}), "samples-.*cannot be loaded"),
    ],
)
def test_a_checkpoint_that_is_none_is_one_line_that_names_it(change, message, tmp_path):
    write_run(RunFolder(tmp_path / "run"), build_model("tiny"), change)
    with pytest.raises(UserError, match=r"samples-000000000008\.pt.*; ") as caught:
        open_target(str(tmp_path / "run"))
    assert re.search(message, str(caught.value)) and "\n" not in str(caught.value)
