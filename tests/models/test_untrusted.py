"""A model that somebody else wrote cannot run code: real folders with real code, real commands, answers on stdin."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest
import torch

from neuclip.cli.main import main
from neuclip.errors import RunFailed, UserError
from neuclip.models.build import build_model
from neuclip.models.config import SHIPPED
from neuclip.models.export import export_model, write_text_files
from neuclip.records import RunFolder
from neuclip.runs.folder import write_settings
from neuclip.runs.load import open_target
from neuclip.settings.reading import read_settings
from tests.builders.images import write_shard
from tests.builders.models import write_bert
from tests.builders.processes import start

pytest.importorskip("transformers")

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


def write_code(folder: Path) -> None:
    """What transformers would import from a folder of a tokenizer or of a text tower."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "code.py").write_text(CODE)
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    tokenizer = {"auto_map": {"AutoTokenizer": [None, "code.Tokenizer"]}, "tokenizer_class": "Tokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    auto_map = {"AutoConfig": "code.Config", "AutoModel": "code.Model"}
    (folder / "config.json").write_text(json.dumps({"model_type": "harmless", "auto_map": auto_map}))


def write_config(file: Path, text: dict, *, vision: dict | None = None, top: dict | None = None) -> Path:
    config = json.loads((SHIPPED / "tiny.json").read_text()) | (top or {})
    config["text_cfg"] |= text
    config["vision_cfg"] |= vision or {}
    file.write_text(json.dumps({"model_cfg": config} if file.name == "open_clip_config.json" else config))
    return file


def exploit(way: str, folder: Path) -> str:
    """A model name whose folder holds code; `asks` is the way in which transformers asks on the terminal first."""
    write_code(folder)
    trusted = {"hf_tokenizer_name": str(folder), "tokenizer_kwargs": {"trust_remote_code": True}}
    if way == "local-dir":
        export_model(build_model("tiny"), folder)
        write_config(folder / "open_clip_config.json", trusted)
        return f"local-dir:{folder}"
    texts = {
        "config": trusted,
        "tokenizer asks": {"hf_tokenizer_name": str(folder)},
        "text tower asks": {"hf_model_name": str(folder), "hf_proj_type": "linear"},
    }
    return str(write_config(folder.with_suffix(".json"), texts[way]))


WAYS = ["local-dir", "config", "tokenizer asks", "text tower asks"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "way"),
    [("eval", "local-dir"), ("doctor", "config"), ("train", "config"), ("train", "text tower asks")],
)
def test_no_command_runs_the_code_of_a_model(command, way, tmp_path, pwned):
    name = exploit(way, tmp_path / "evil")
    data = str(write_shard(tmp_path / "x.tar", range(20)))
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
    field = "trust_remote_code" if way in ("local-dir", "config") else "hf_model_name" if "tower" in way else "hf_tok"
    assert field in ended.errors + ended.output


@pytest.mark.parametrize("way", WAYS)
def test_no_model_runs_its_code(way, tmp_path, pwned, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *question: "y")
    told = "comes with its own code, which is never run" if "asks" in way else "trust_remote_code"
    with pytest.raises(UserError, match=told):
        build_model(exploit(way, tmp_path / "evil"))
    assert not pwned.exists()


def test_a_pickle_with_code_is_refused(tmp_path, pwned):
    import pickle

    class Evil:
        def __reduce__(self):
            return (Path.touch, (pwned,))

    (tmp_path / "weights.pt").write_bytes(pickle.dumps({"state_dict": Evil()}))
    with pytest.raises((UserError, RunFailed), match=r"weights\.pt"):
        build_model("tiny", pretrained=str(tmp_path / "weights.pt"))
    assert not pwned.exists()


# What a checkpoint holds beside its model.
PARTS: dict[str, object] = {"step": 1, "samples": 8, "seconds": 1.0, "model_name": "hf-hub:evil/model", "order": ""}
PARTS |= {"objective_name": "clip", "data": {}, "objective": {}, "optimizer": {}, "random": {}}


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
    config = json.loads((SHIPPED / "tiny.json").read_text())
    if kind == "transformers":
        config["text_cfg"]["hf_tokenizer_name"] = str(write_bert(tmp_path / "bert"))
    (tmp_path / "mine.json").write_text(json.dumps(config))
    built = build_model(str(tmp_path / "mine.json"))
    folder = RunFolder(tmp_path / "run")
    folder.checkpoints.mkdir(parents=True)
    saved = built.saved_config
    saved["model_cfg"]["text_cfg"] |= {"hf_tokenizer_name": "evil/tokenizer"} if kind == "transformers" else {}
    state = PARTS | {"model": built.towers.model.state_dict(), "open_clip_config": saved}
    torch.save(state, folder.checkpoints / "samples-000000000008.pt")
    flags = [
        "--model.name",
        "hf-hub:evil/model",
        "--model.pretrained",
        "https://evil.example/x.pt",
        "--run.device",
        "cpu",
    ]
    write_settings(folder, read_settings(None, flags))
    if kind == "transformers":  # without the tokenizer it is refused, not fetched
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
    built, folder = build_model("tiny"), RunFolder(tmp_path)
    state = PARTS | {"model": built.towers.model.state_dict(), "open_clip_config": built.saved_config}
    change(state)
    folder.checkpoints.mkdir()
    torch.save(state, folder.checkpoints / "samples-000000000008.pt")
    write_settings(folder, read_settings(None, ["--model.name", "tiny"]))
    with pytest.raises(UserError, match=r"samples-000000000008\.pt.*; ") as caught:
        open_target(str(tmp_path))
    assert re.search(message, str(caught.value)) and "\n" not in str(caught.value)
