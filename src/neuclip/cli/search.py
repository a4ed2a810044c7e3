"""`neuclip search`"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuclip.cli.eval import check_target
from neuclip.cli.flags import JSON, Command, Flag
from neuclip.cli.tables import print_json
from neuclip.errors import UserError
from neuclip.formatting import plural
from neuclip.progress import waiting

if TYPE_CHECKING:
    from neuclip.search.index import Match, Searcher

TOP = 10
PAGE_TOP = 24
NAMED = 5  # bad images

COMMAND = Command(
    usage="search RUN|CHECKPOINT|MODEL FOLDER [QUERY]",
    about="""Finds the images of a folder that are nearest to a text, or to an image where QUERY is the path of one.
The folder is embedded once; later only what is new or changed is. A score is a cosine: 1 is the same direction.""",
    flags=(
        Flag("image", str, "search by this image file"),
        Flag("top", int, f"how many images [default: {TOP}, on the page {PAGE_TOP}]", at_least=1),
        Flag("with", str, "a second run or model, to see both side by side"),
        Flag("page", bool, "a page in the browser instead, on this machine only"),
        JSON,
    ),
    examples=(
        "neuclip search runs/first photos 'a red bicycle'",
        "neuclip search runs/first photos --page --with runs/second",
    ),
    fewest=2,
    most=3,
)


def run(arguments: Sequence[str]) -> int:
    (target, folder, *query), values = COMMAND.parse(arguments)
    targets = [target, *([values["with"]] if "with" in values else [])]
    text, image, top = query[0] if query else "", values.get("image", ""), values.get("top", TOP)
    if query and not text.strip():
        raise UserError("the query is empty; give some words, or an image")
    for one in targets:
        check_target(one)
    if values.get("page") and (text or image or values.get(JSON.name)):
        raise UserError("--page has its own search box; leave out the query, --image and --json")
    if text and image:
        raise UserError(f"a query ({text}) and --image {image} are given; leave one out")
    if text and Path(text).is_file():
        text, image = "", text
    if not Path(folder).is_dir():
        what = "is not a folder" if Path(folder).exists() else "is not there"
        raise UserError(f"{folder} {what}; give a folder of images")
    searchers = open_searchers(targets, Path(folder))
    if values.get("page"):
        return serve_page(searchers, values.get("top", PAGE_TOP))
    found = find(searchers, text, image, top)
    if values.get(JSON.name):
        print_json(as_plain(searchers, found, text or image))
    elif text or image:
        print_matches(searchers, found)
    else:
        count = plural(len(searchers[0].ids), "image")
        print(f"{count} embedded; now search: neuclip search {target} {folder} 'QUERY'")
    return 0


def open_searchers(targets: list[str], path: Path) -> list[Searcher]:
    """The folder is listed before any model is opened: one without images is found at once."""
    with waiting("loading torch"):
        from neuclip.runs.target import open_target
        from neuclip.search.index import Folder, Searcher

    folder = Folder.open(path)
    searchers = [Searcher.open(target, open_target(target)[0], folder) for target in targets]
    bad_images = describe_bad_images(searchers)
    if not any(len(searcher.ids) for searcher in searchers):
        raise UserError(f"{path} has no image to search: {bad_images}; give another folder")
    if bad_images:
        print(bad_images, file=sys.stderr)
    return searchers


def describe_bad_images(searchers: Sequence[Searcher]) -> str:
    """One line, with the first of them; "" if there are none."""
    faults = {str(one.folder.path / path): why for one in searchers for path, why in one.faults.items()}
    if not faults:
        return ""
    reasons = ", ".join(f"{count:,} x {reason}" for reason, count in Counter(faults.values()).most_common())
    more = f" and {len(faults) - NAMED:,} more" if len(faults) > NAMED else ""
    first = ", ".join(list(faults)[:NAMED])
    return f"{plural(len(faults), 'image')} could not be used ({reasons}): {first}{more}"


def find(searchers: Sequence[Searcher], text: str, image: str, top: int) -> list[list[Match]]:
    """By searcher; nothing where neither a text nor an image is given."""
    from neuclip.data.decoding import decode
    from neuclip.data.source import BadSample

    if not image:
        return [searcher.by_text(text, top) if text else [] for searcher in searchers]
    try:
        decoded = decode(Path(image).read_bytes(), image)
        return [searcher.by_image(decoded, top) for searcher in searchers]
    except BadSample as bad:
        raise UserError(f"{image}: {bad.reason}; give a JPEG, PNG, WebP or similar file") from bad
    except OSError as error:
        raise UserError(f"{image} cannot be read ({error.strerror}); give the path of an image file") from error


def print_matches(searchers: Sequence[Searcher], found: list[list[Match]]) -> None:
    for searcher, matches in zip(searchers, found, strict=True):
        if len(searchers) > 1:
            print(searcher.name)
        for match in matches:
            print(f"{match.score:6.3f}  {searcher.folder.path / match.path}")


def as_plain(searchers: Sequence[Searcher], found: list[list[Match]], query: str) -> dict[str, Any]:
    folder = searchers[0].folder.path
    return {
        "folder": str(folder),
        "query": query,
        "models": [
            {
                "model": searcher.name,
                "images": len(searcher.ids),
                "skipped": [{"path": str(folder / path), "reason": why} for path, why in searcher.faults.items()],
                "matches": [{"path": str(folder / match.path), "score": match.score} for match in matches],
            }
            for searcher, matches in zip(searchers, found, strict=True)
        ],
    }


def serve_page(searchers: list[Searcher], top: int) -> int:
    """Until Ctrl-C."""
    from neuclip.search.server import Page

    with Page(searchers, top) as page:
        print(f"{page.address}\nOnly this machine can open it, with the whole address. Ctrl-C ends it.", flush=True)
        page.serve_forever()
    return 0
