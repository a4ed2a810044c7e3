from __future__ import annotations

import torch
from neuclip.training.caption_ids import caption_ids


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
