"""Captions as files hold them, made clean by one rule for all sources."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from neuclip.data.sample import BadSample

DEFAULT_KEY = "caption"
# All that str.strip() takes away, and the zeros that a hole in a file leaves; no blank lies beyond U+3000.
BLANKS = "\0" + "".join(letter for letter in map(chr, range(0x3001)) if letter.isspace())


def captions_from_json(raw: bytes, key: str = DEFAULT_KEY) -> tuple[str, ...]:
    """What a key of a JSON object holds: one text or a list of them; nothing if it holds neither.

    Several keys between commas give several captions.

    >>> captions_from_json(b'{"caption": ["one", "two"], "alt": "three"}', "caption,alt")
    ('one', 'two', 'three')
    """
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return ()
    if not isinstance(found, dict):
        return ()
    keys = [key] if key in found else [name.strip() for name in key.split(",")]
    return tuple(text for name in keys for text in texts_in(found.get(name)))


def texts_in(value: Any) -> tuple[str, ...]:
    """A text, or the texts of a list. Half a character, which JSON may spell ("\\ud800"), becomes a question mark."""
    values = value if isinstance(value, list) else [value]
    return tuple(text.encode(errors="replace").decode() for text in values if isinstance(text, str))


def stripped(text: str) -> str:
    """Without blanks and zeros around it, in whatever order they come: stripping again changes nothing."""
    return text.strip(BLANKS)


def usable_captions(found: Iterable[str | bytes], where: str) -> tuple[str, ...]:
    """Those that are text and not blank, stripped. Raises BadSample with the first one's reason if there is none."""
    usable, reason = [], ""
    for caption in found:
        try:
            text = stripped(caption.decode() if isinstance(caption, bytes) else caption)
        except UnicodeDecodeError:
            reason = reason or "caption is not UTF-8"
            continue
        if text:
            usable.append(text)
        reason = reason or "caption is empty"
    if not usable:
        raise BadSample(reason or "caption is missing", where)
    return tuple(usable)


def first_caption(found: Iterable[str | bytes]) -> str:
    """The first usable one, "" if there is none."""
    try:
        return usable_captions(found, "")[0]
    except BadSample:
        return ""
