"""open_clip's tokenizers, for captions of any length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from neuclip.models import open_clip_module

LONG_WORD = 256  # characters that an ordinary word never has
RAW_SHARE = 20  # raw characters per cleaned one, generously: entities such as &eacute; become one, blanks are joined


class CaptionLimit:
    """Cleans a caption and leaves out what cannot reach the context. Picklable.

    A token is at most `longest` characters, and one blank may precede it: `context_length` tokens lie within the first
    context_length * (longest + 1) characters. The word at that place is kept whole if it is an ordinary one, because a
    part of a word has other tokens. Without a limit, byte-pair encoding of one word takes quadratic time: 39 seconds
    for 20,000 letters.
    """

    def __init__(self, clean: Callable[[str], str], context_length: int, longest: int):
        self.clean = clean
        self.limit = context_length * (longest + 1)

    def __call__(self, caption: str) -> str:
        text = self.clean(caption[: RAW_SHARE * self.limit])
        if len(text) <= self.limit:
            return text
        end = text.find(" ", self.limit, self.limit + LONG_WORD)
        return text[: end if end >= 0 else self.limit + LONG_WORD]


def load_tokenizer(known_name: str) -> Any:
    """open_clip's tokenizer of a model, with a limit for captions; what it gives for ordinary ones is unchanged."""
    tokenizer = open_clip_module().get_tokenizer(known_name)
    if hasattr(tokenizer, "encoder"):  # open_clip's own: byte-pair encoding
        longest = max(len(token.removesuffix("</w>")) for token in tokenizer.encoder)
    else:  # WordPiece has one token for any word it does not know, and compiled tokenizers are fast
        longest = max(LONG_WORD, *map(len, tokenizer.tokenizer.get_vocab()))
    tokenizer.clean_fn = CaptionLimit(tokenizer.clean_fn, tokenizer.context_length, longest)
    return tokenizer
