"""Captions as files hold them, made clean by one rule for all sources."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from neuclip.data.sample import BadSample

DEFAULT_KEY = "caption"
USUAL_KEYS = ("text", "title", "description", "alt", "alt_text", "captions", "txt")  # where others have their captions
SHOWN_KEYS = 12
# All that str.strip() takes away (no blank lies beyond U+3000), the zeros that a hole in a file leaves, and the mark
# that some editors put in front of UTF-8.
BLANKS = "\0\ufeff" + "".join(letter for letter in map(chr, range(0x3001)) if letter.isspace())


def captions_from_json(raw: bytes, key: str = DEFAULT_KEY) -> tuple[str, ...]:
    """What a key of a JSON object holds: one text or a list of them; nothing if it holds neither.

    Several keys between commas give several captions.

    >>> captions_from_json(b'{"caption": ["one", "two"], "alt": "three"}', "caption,alt")
    ('one', 'two', 'three')
    """
    found = _object(raw)
    keys = [key] if key in found else [name.strip() for name in key.split(",")]
    return tuple(text for name in keys for text in texts_in(found.get(name)))


def other_keys(raw: bytes) -> str:
    """Of a JSON object without a caption under the key asked for: which keys it has, and how to name one.

    >>> other_keys(b'{"url": "http://x", "text": "a cat"}')
    'its keys are url, text: name one with --data.caption_key text'
    """
    found = _object(raw)
    likely = [key for key in USUAL_KEYS if texts_in(found.get(key))] or [key for key in found if texts_in(found[key])]
    if not likely:
        return "no key of it holds a text"
    listed = ", ".join([*found][:SHOWN_KEYS]) + (" ..." if len(found) > SHOWN_KEYS else "")
    return f"its keys are {listed}: name one with --data.caption_key {likely[0]}"


def _object(raw: bytes) -> dict[str, Any]:
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def texts_in(value: Any) -> tuple[str, ...]:
    """A text, or the texts of a list. Half a character, which JSON may spell ("\\ud800"), becomes a question mark.

    Numbers are texts too, for in a CSV they are; no number (NaN, as pandas writes what is missing) is nothing.

    >>> texts_in(["a cat", 1984, 0.5, float("nan"), None])
    ('a cat', '1984', '0.5')
    """
    values = value if isinstance(value, list) else [value]
    return tuple(text for text in map(_text, values) if text is not None)


def _text(value: Any) -> str | None:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
        return None
    return str(value) if isinstance(value, int | float) else None


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
