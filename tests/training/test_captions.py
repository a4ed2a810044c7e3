from __future__ import annotations

import torch

from neuclip.models import open_clip_module
from neuclip.training.batches import TruncatedCaptions, caption_ids

LENGTH = 8


def test_captions_share_a_number_exactly_when_their_tokens_are_equal():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, (400, 6), generator=generator)  # 729 possible rows, so many are equal
    numbers = caption_ids(tokens)
    equal = (tokens[:, None] == tokens[None]).all(dim=2)
    assert torch.equal(numbers[:, None] == numbers[None], equal)
    assert equal.sum() > 400 and numbers.dtype == torch.int64


def test_the_order_of_the_tokens_counts_and_their_type_does_not():
    tokens = torch.tensor([[49406, 5, 7, 49407], [49406, 7, 5, 49407]])
    first, second = caption_ids(tokens).tolist()
    assert first != second
    assert caption_ids(tokens.int()).tolist() == [first, second]


def padded_with_its_end(texts: list[str]) -> torch.Tensor:
    """Tokens as some tokenizers give them: no start, and padding with the end token (1)."""
    rows = [[5] * min(len(text.split()), LENGTH - 1) + [1] * LENGTH for text in texts]
    return torch.tensor([row[:LENGTH] for row in rows])


def test_captions_as_long_as_the_context_or_longer_are_counted():
    tokenizer = open_clip_module().SimpleTokenizer(context_length=LENGTH)  # start and end are two of the eight
    truncated = TruncatedCaptions(tokenizer)
    assert truncated.share is None
    truncated.add(tokenizer(["", "a b c d e", "a b c d e f", "a b c d e f g", "a " * 100]))
    truncated.add(tokenizer(["a", "b", "c"]))
    assert truncated.share == 3 / 8


def test_padding_with_the_end_token_hides_no_truncated_caption():
    truncated = TruncatedCaptions(padded_with_its_end)
    truncated.add(padded_with_its_end(["", "a b", "a b c d e f", "a b c d e f g", "a " * 100]))
    assert truncated.share == 2 / 5
