"""Any model of open_clip is built as open_clip builds it: names, weights, transforms, tokenizers."""

from __future__ import annotations

import json
import logging
import pickle
import random
import string

import pytest
import torch
from PIL import Image

from neuclip.errors import UserError
from neuclip.models import build, open_clip_module
from neuclip.models.build import LONG_WORD, build_model, construct, encode_once, load_tokenizer
from neuclip.models.config import SHIPPED, find_model
from neuclip.models.transforms import normalize_batch
from tests.builders.models import timm_and_bert, write_bert
from tests.builders.processes import run


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_a_shipped_model_gives_unit_rows_of_its_embedding_width(name):
    built = build_model(name)
    images = torch.stack([built.transform(Image.new("RGB", (70, 50), "red"))] * 2)
    assert images.dtype == torch.uint8
    image, text = built.towers(images, built.tokenize(["a red thing", "a very long caption " * 40]))[:2]
    assert image.shape == text.shape == (2, built.embed_dim)
    assert torch.allclose(torch.cat([image, text]).norm(dim=1), torch.ones(4), atol=1e-5)


def meta_state(model: torch.nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()}


def same_as_open_clip(name: str) -> None:
    logging.disable(logging.ERROR)  # open_clip says of each that it is random
    with torch.device("meta"):
        ours = construct(find_model(name), "")
        theirs = open_clip_module().create_model(name, load_weights=False, pretrained_text=False, device="meta")
    logging.disable(logging.NOTSET)
    assert type(ours) is type(theirs) and meta_state(ours) == meta_state(theirs), name
    assert [type(one) for one in ours.modules()] == [type(one) for one in theirs.modules()], name
    assert ours.visual.image_size == theirs.visual.image_size, name


@pytest.mark.parametrize("name", ["RN50", "ViT-B-16-quickgelu", "coca_ViT-B-32", "convnext_base", "ViT-B-16-SigLIP"])
def test_a_model_is_built_as_open_clip_builds_it(name):
    same_as_open_clip(name)


@pytest.mark.slow
def test_every_model_of_open_clip_is_built_as_open_clip_builds_it():
    """But those whose text tower is on the hub."""
    models = open_clip_module().list_models()
    here = [name for name in models if "hf_model_name" not in open_clip_module().get_model_config(name)["text_cfg"]]
    assert len(here) > 100
    for name in here:
        same_as_open_clip(name)


def test_random_weights_are_those_that_open_clip_draws():
    file = SHIPPED / "tiny.json"
    open_clip_module().add_model_config(file)
    torch.manual_seed(5)
    theirs = open_clip_module().create_model("tiny").state_dict()
    torch.manual_seed(5)
    ours = build_model("tiny").towers.model.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(x, theirs[name]) for name, x in ours.items())


@pytest.mark.parametrize("name", ["tiny", "RN50"])
def test_bytes_normalized_as_a_batch_are_open_clips_floats_to_the_bit(name):
    """Also for the training transform, whose crop is drawn from torch's generator."""
    open_clip = open_clip_module()
    built = build_model(name, crop_scale=(0.5, 1.0))
    originals = [Image.effect_noise(size, 90) for size in ((64, 64), (50, 90))]
    train_transform = open_clip.image_transform(built.image_size, is_train=True, aug_cfg={"scale": (0.5, 1.0)})
    for ours, theirs in ((built.transform, built.float_transform), (built.train_transform, train_transform)):
        torch.manual_seed(3)
        want = torch.stack([theirs(original) for original in originals])
        torch.manual_seed(3)
        images = torch.stack([ours(original) for original in originals])
        assert torch.equal(normalize_batch(images, built.towers.mean, built.towers.std), want)


@pytest.mark.parametrize(("name", "size"), [("ViT-B-32", 8), ("tiny", 16)])
def test_an_image_size_that_does_not_fit_is_one_line(name, size):
    with pytest.raises(UserError, match=f"give another --model.image_size than {size}"):
        build_model(name, image_size=size)


def test_a_context_that_a_text_tower_cannot_take_is_one_line(tmp_path):
    (tmp_path / "mine.json").write_text(json.dumps(timm_and_bert(write_bert(tmp_path / "bert"))))  # of 16 tokens
    with pytest.raises(UserError, match=r"give another --model.context_length than 99"):
        build_model(str(tmp_path / "mine.json"), context_length=99)


def test_another_context_length_is_that_of_the_tokens_and_of_the_saved_config(tmp_path):
    """Positions of trained weights are resized."""
    trained = build_model("tiny")
    torch.save(trained.towers.model.state_dict(), tmp_path / "weights.pt")
    built = build_model("tiny", pretrained=str(tmp_path / "weights.pt"), context_length=24)
    assert built.tokenize(["a " * 50]).shape == (1, 24) and built.config["text_cfg"]["context_length"] == 24
    positions, old = (one.towers.model.positional_embedding for one in (built, trained))
    assert positions.shape[0] == 24 and torch.allclose(positions[0], old[0], atol=0.01)
    assert build_model("tiny").config["text_cfg"]["context_length"] == 16


def test_a_bug_of_ours_keeps_its_traceback(monkeypatch):
    """Only what open_clip, timm and transformers raise is about the model's name."""

    def bug(*arguments: object, **named: object) -> None:
        raise ZeroDivisionError("a bug")

    for name in ("Towers", "without_normalization", "with_sizes", "load_weights", "partial"):
        with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
            patched.setattr(build, name, bug)
            build_model("tiny")


def test_trying_a_model_once_draws_no_random_number_and_changes_no_statistics():
    built = build_model("tiny")
    model, state = built.towers.model, torch.random.get_rng_state()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    encode_once(model, built.tokenize)
    assert model.training and torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


WORDS = ["a", "photo", "of", "the", "international", "Zwölf", "Boxkämpfer", "naïve", "&eacute;&amp;amp;", "3.14"]
WORDS += ["----", "猫が好き", "кошка", "😂😂😂😂😂😂😂😂", "it's", "https://example.com/a_b?c=1", "=" * 40, "\t\n  "]
WORDS += ["don’t", "Ã©", "x" * 60]
BLANKS = [" ", " ", " ", "  ", "\n", ", ", ""]


def wild_captions(count: int) -> list[str]:
    draw = random.Random(0)
    lengths = draw.choices([1, 5, 20, 80, 300, 2000], k=count)
    words = ["".join(draw.choice(WORDS) + draw.choice(BLANKS) for _ in range(length)) for length in lengths]
    letters = string.ascii_letters + string.digits + string.punctuation + " " * 20
    words += ["".join(draw.choices(letters, k=draw.choice([10, 500, 5000]))) for _ in range(count // 3)]
    return [*words, "the cat " * 5000, "many    blanks" + " " * 3000 + "and a cat", "---- " * 3000, "猫" * 400]


@pytest.mark.parametrize("name", ["tiny", "ViT-B-32"])
def test_ordinary_captions_of_any_length_have_the_tokens_of_open_clip(name):
    ours, captions = load_tokenizer(find_model(name)), wild_captions(60)
    theirs = open_clip_module().SimpleTokenizer(context_length=ours.context_length)
    assert max(map(len, captions)) > ours.clean_fn.args[1]  # some are cut
    assert torch.equal(ours(captions), theirs(captions))


@pytest.mark.parametrize("where", [-1, 0, 1, LONG_WORD - 1])
def test_captions_of_the_longest_tokens_are_not_cut_too_early(where):
    """Here all tokens of a context are as long as tokens of letters can be, and a long word may follow."""
    ours, theirs = load_tokenizer(find_model("tiny")), open_clip_module().SimpleTokenizer(context_length=16)
    words = {token.removesuffix("</w>") for token in theirs.encoder if token.endswith("</w>")}
    word = max((word for word in words if word.isascii() and word.isalpha()), key=len)
    assert len(word) > 20 and len(theirs.encode(word)) == 1
    captions = [(word + " ") * count + "x" * max(0, where) + " end" for count in (13, 14, 15, 16, 17, 100)]
    assert torch.equal(ours(captions), theirs(captions))


def tokenize_letters() -> None:
    caption = "".join(random.Random(0).choices(string.ascii_lowercase, k=900_000))
    words = " ".join(caption[start : start + 5000] for start in range(0, 90_000, 5000))
    assert (load_tokenizer(find_model("tiny"))([caption, words]) != 0).all()


def test_letters_without_a_blank_do_not_hang_and_go_to_workers():
    """Many minutes without a limit: the process would be killed."""
    ended = run(tokenize_letters)
    assert ended.code == 0, ended.errors
    tokenize = load_tokenizer(find_model("tiny"))
    assert torch.equal(pickle.loads(pickle.dumps(tokenize))(["a circle " * 900]), tokenize(["a circle " * 900]))


def test_a_tokenizer_of_transformers_is_open_clips_and_has_a_limit_too(tmp_path):
    bert = write_bert(tmp_path / "bert")
    config = json.loads((SHIPPED / "tiny.json").read_text())
    config["text_cfg"]["hf_tokenizer_name"] = str(bert)
    (tmp_path / "mine.json").write_text(json.dumps(config))
    ours = load_tokenizer(find_model(str(tmp_path / "mine.json")))
    theirs = open_clip_module().tokenizer.HFTokenizer(str(bert), context_length=16)
    captions = ["a red circle", "a " * 90_000, "q" * 200 + " a" * 9000, "blue " * 5000]
    assert torch.equal(ours(captions), theirs(captions)) and ours(captions[:1])[0, 1] == 5
    assert len(ours.clean_fn("a " * 90_000)) < 10_000
