"""A caption of any length is tokenized at once, and every ordinary one exactly as open_clip does."""

from __future__ import annotations

import pickle
import random
import string

import pytest
import torch

from neuclip.models import open_clip_module
from neuclip.models.facts import token_counter
from neuclip.models.tokenizer import LONG_WORD, load_tokenizer
from neuclip.models.towers import build_model
from tests.builders.processes import run

WORDS = ["a", "photo", "of", "the", "international", "Zwölf", "Boxkämpfer", "naïve", "&eacute;&amp;amp;", "3.14"]
WORDS += ["----", "猫が好き", "кошка", "😂😂😂😂😂😂😂😂", "it's", "https://example.com/a_b?c=1", "=" * 40, "\t\n  "]
WORDS += ["don’t", "Ã©", "x" * 60]
BLANKS = [" ", " ", " ", "  ", "\n", ", ", ""]


def random_caption(draw: random.Random) -> str:
    count = draw.choice([1, 5, 20, 80, 300, 2000])
    return "".join(draw.choice(WORDS) + draw.choice(BLANKS) for _ in range(count))


@pytest.mark.parametrize("name", ["tiny", "ViT-B-32"])
def test_random_captions_have_the_tokens_of_open_clip(name):
    draw, ours = random.Random(0), load_tokenizer(build_model("tiny") and name)
    theirs = open_clip_module().get_tokenizer(name)
    captions = [random_caption(draw) for _ in range(300)]
    letters = string.ascii_letters + string.digits + string.punctuation + " " * 20
    captions += ["".join(draw.choices(letters, k=draw.choice([10, 500, 5000]))) for _ in range(100)]
    captions += ["the cat " * 5000, "many    blanks" + " " * 3000 + "and a cat", "---- " * 3000, "猫" * 400]
    assert max(map(len, captions)) > ours.clean_fn.limit  # some are cut
    assert torch.equal(ours(captions), theirs(captions))


@pytest.mark.parametrize("where", [-1, 0, 1, LONG_WORD - 1])
def test_the_word_at_the_limit_is_kept_whole(where):
    """A part of it would have other tokens: here all tokens are as long as tokens can be."""
    ours, theirs = build_model("tiny").tokenize, open_clip_module().get_tokenizer("tiny")
    words = {token.removesuffix("</w>") for token in theirs.encoder if token.endswith("</w>")}
    word = max((word for word in words if word.isascii() and word.isalpha()), key=len)
    assert len(word) > 20 and len(theirs.encode(word)) == 1
    captions = [(word + " ") * count + "x" * max(0, where) + " end" for count in (13, 14, 15, 16, 17, 100)]
    assert torch.equal(ours(captions), theirs(captions))


def tokenize_letters(name: str) -> None:
    caption = "".join(random.Random(0).choices(string.ascii_lowercase, k=100_000))
    words = " ".join(caption[start : start + 5000] for start in range(0, len(caption), 5000))
    tokenize = load_tokenizer(build_model("tiny") and name)
    assert tokenize([caption, words, "&amp;" * 20_000]).shape == (3, tokenize.context_length)
    assert (tokenize([caption, words]) != 0).all()
    for usual in (False, True):
        assert min(token_counter(name, usual=usual)([caption, words])) > tokenize.context_length


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny", "ViT-B-32"])
def test_letters_without_a_blank_do_not_hang(name):
    """Many minutes without a limit: the process would be killed."""
    ended = run(tokenize_letters, name)
    assert ended.code == 0, ended.errors


def test_a_limited_tokenizer_goes_to_workers():
    tokenize = build_model("tiny").tokenize
    again = pickle.loads(pickle.dumps(tokenize))
    assert torch.equal(again(["a red circle " * 900]), tokenize(["a red circle " * 900]))


def test_a_long_ordinary_caption_is_counted_to_its_end():
    count = token_counter("tiny")
    assert count is not None and count(["word " * 3000]) == [3002]


def test_a_tokenizer_of_transformers_has_a_limit_too(tmp_path):
    transformers = pytest.importorskip("transformers")
    import json

    from neuclip.models.config import SHIPPED

    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "##dish"]))
    transformers.BertTokenizerFast.from_pretrained(tmp_path).save_pretrained(tmp_path)
    config = json.loads((SHIPPED / "tiny.json").read_text())
    config["text_cfg"]["hf_tokenizer_name"] = str(tmp_path)
    (tmp_path / "bert.json").write_text(json.dumps(config))
    ours = build_model(str(tmp_path / "bert.json")).tokenize
    theirs = open_clip_module().get_tokenizer("bert")
    captions = ["a reddish red", "a " * 90_000, "q" * 200 + " a" * 9000, "reddish " * 5000]
    assert torch.equal(ours(captions), theirs(captions))
    assert len(ours.clean_fn("a " * 90_000)) < 10_000
