"""A model that somebody else wrote cannot run code: real folders with real code, real commands, answers on stdin."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from neuclip.cli.main import main
from neuclip.errors import RunFailed, UserError
from neuclip.models.config import SHIPPED, find_config
from neuclip.models.export import export_model
from neuclip.models.facts import model_facts, token_counter
from neuclip.models.towers import build_model
from tests.builders.images import write_shard
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


@pytest.mark.parametrize(
    ("use", "way"),
    [
        *((build_model, way) for way in WAYS),
        (model_facts, "local-dir"),
        (model_facts, "text tower asks"),
        (token_counter, "config"),
        (token_counter, "tokenizer asks"),
    ],
)
def test_no_function_runs_the_code_of_a_model(use, way, tmp_path, pwned, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *question: "y")
    with pytest.raises(UserError, match=r"trust_remote_code|hf_model_name|hf_tokenizer_name"):
        use(exploit(way, tmp_path / "evil"))
    assert not pwned.exists()


@pytest.mark.parametrize(
    ("section", "change"),
    [
        ("text_cfg.tokenizer_kwargs.trust_remote_code", {"tokenizer_kwargs": {"trust_remote_code": False}}),
        ("text_cfg.tokenizer_kwargs.tokenizer_file", {"tokenizer_kwargs": {"tokenizer_file": "/etc/passwd"}}),
        ("text_cfg.tokenizer_kwargs.reduction_mask", {"tokenizer_kwargs": {"reduction_mask": "syntax"}}),
        ("text_cfg.tokenizer_kwargs", {"tokenizer_kwargs": [["trust_remote_code", True]]}),
        ("text_cfg.norm_kwargs.device", {"norm_kwargs": {"device": "cuda"}}),
        ("text_cfg.hf_model_config", {"hf_model_config": {"auto_map": {}}}),
        ("text_cfg.heads", {"heads": {"auto_map": 4}}),
    ],
)
def test_a_config_passes_on_only_what_is_listed(section, change, tmp_path):
    file = write_config(tmp_path / "mine.json", change)
    with pytest.raises(UserError, match=f"mine.json.*{section} "):
        find_config(str(file))


@pytest.mark.parametrize("name", ["hf-hub:somebody/something", "local-dir:/tmp", "somebody/something", "/tmp/x"])
def test_an_image_tower_is_a_plain_name_of_timm(name, tmp_path):
    file = write_config(tmp_path / "mine.json", {}, vision={"timm_model_name": name})
    with pytest.raises(UserError, match=r"vision_cfg\.timm_model_name"):
        find_config(str(file))


@pytest.mark.parametrize("key", ["output_dict", "cast_dtype", "pretrained_image_path", "device"])
def test_arguments_of_open_clip_itself_are_no_config(key, tmp_path):
    file = write_config(tmp_path / "mine.json", {}, top={key: "x"})
    with pytest.raises(UserError, match=f"{key} "):
        find_config(str(file))


def test_every_config_of_open_clip_itself_passes_the_check(tmp_path):
    """As the file of somebody else, which it is after an export."""
    from neuclip.models import open_clip_module

    open_clip = open_clip_module()
    file = tmp_path / "mine.json"  # one name for all: open_clip remembers it for the rest of the process
    for name in open_clip.list_models():
        file.write_text(json.dumps(open_clip.get_model_config(name)))
        assert find_config(str(file))[1]["embed_dim"]


def test_a_name_that_makes_open_clip_download_a_tokenizer_is_refused(tmp_path):
    file = write_config(tmp_path / "my-siglip.json", {})
    with pytest.raises(UserError, match="hf_tokenizer_name"):
        build_model(str(file))


def test_a_pickle_with_code_is_refused(tmp_path, pwned):
    import pickle

    class Evil:
        def __reduce__(self):
            return (Path.touch, (pwned,))

    (tmp_path / "weights.pt").write_bytes(pickle.dumps({"state_dict": Evil()}))
    with pytest.raises((UserError, RunFailed), match=r"weights\.pt"):
        build_model("tiny", pretrained=str(tmp_path / "weights.pt"))
    assert not pwned.exists()
