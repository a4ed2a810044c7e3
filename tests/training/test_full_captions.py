from __future__ import annotations

import torch

from neuclip.models import open_clip_module
from neuclip.training.full_captions import FullCaptions

LENGTH = 8


def filled_up_with_its_end(texts: list[str]) -> torch.Tensor:
    """Tokens as some tokenizers give them: no start, and the end token (1) also fills up."""
    rows = [[5] * min(len(text.split()), LENGTH - 1) + [1] * LENGTH for text in texts]
    return torch.tensor([row[:LENGTH] for row in rows])


def test_captions_as_long_as_the_context_or_longer_are_counted():
    tokenizer = open_clip_module().SimpleTokenizer(context_length=LENGTH)  # start and end are two of the eight
    full = FullCaptions(tokenizer)
    assert full.share is None
    full.note(tokenizer(["", "a b c d e", "a b c d e f", "a b c d e f g", "a " * 100]))
    full.note(tokenizer(["a", "b", "c"]))
    assert full.share == 3 / 8


def test_an_end_token_that_also_fills_up_hides_nothing():
    full = FullCaptions(filled_up_with_its_end)
    full.note(filled_up_with_its_end(["", "a b", "a b c d e f", "a b c d e f g", "a " * 100]))
    assert full.share == 2 / 5
