"""`neuclip search`"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from neuclip.cli.command import check_target, print_json
from neuclip.errors import UserError
from neuclip.formatting import plural
from neuclip.progress import waiting

if TYPE_CHECKING:
    from neuclip.search.index import Match, Searcher

TOP, PAGE_TOP = 10, 24
NAMED = 5  # bad images that a message names
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")


def search(
    target: str,
    folder: str,
    query: str | None = None,
    *,
    top: Annotated[int | None, {"at_least": 1}] = None,
    with_: str = "",
    page: bool = False,
    json: bool = False,
) -> int:
    """neuclip search RUN|CHECKPOINT|MODEL FOLDER [QUERY]

    Finds the images in a folder that are most similar to a text, or to an image if QUERY is the path of an image.
    The first search embeds all images of the folder; later searches embed only new and changed ones. The score of an
    image is its cosine similarity to the query, at most 1.

    --top: number of images to show [default: 10, or 24 on the page]
    --with: second run or model, to see the results of both side by side
    --page: search on a page in the browser instead; only this machine can open it

    neuclip search runs/first photos 'a red bicycle'
    neuclip search runs/first photos --page --with runs/second
    """
    targets = [target, *([with_] if with_ else [])]
    for one in targets:
        check_target(one)
    if query is not None and not query.strip():
        raise UserError("the query is empty; give some words, or the path of an image")
    if query and query.lower().endswith(IMAGE_SUFFIXES) and not Path(query).is_file():
        raise UserError(f"{query} does not exist; give the path of an image file, or words")
    if page and (query or json):
        raise UserError("--page has its own search box; leave out the query and --json")
    if not Path(folder).is_dir():
        what = "is not a folder" if Path(folder).exists() else "does not exist"
        raise UserError(f"{folder} {what}; give a folder of images")
    searchers = open_searchers(targets, Path(folder))
    if page:
        return serve_page(searchers, top or PAGE_TOP)
    matches = [[] for _ in searchers] if query is None else find_matches(searchers, query, top or TOP)
    if json:
        return print_json(json_object(searchers, matches, query or ""))
    if query is None:
        count = plural(len(searchers[0].ids), "image")
        print(f"{count} embedded; now search: neuclip search {target} {folder} 'QUERY'")
    print_matches(searchers, matches)
    return 0


def open_searchers(targets: list[str], path: Path) -> list[Searcher]:
    """Open each model on the folder. The folder is listed before a model is loaded, so that a folder without images is
    an error at once."""
    with waiting("loading torch"):
        from neuclip.runs.load import open_target
        from neuclip.search.index import Folder, Searcher

    folder = Folder.open(path)
    searchers = [Searcher.open(target, open_target(target)[0], folder) for target in targets]
    bad_images = describe_bad_images(searchers)
    if not any(len(searcher.ids) for searcher in searchers):
        raise UserError(f"no image in {path} can be searched: {bad_images}; give another folder")
    if bad_images:
        print(bad_images, file=sys.stderr)
    return searchers


def describe_bad_images(searchers: Sequence[Searcher]) -> str:
    """A line with the number of bad images, the reasons and the first paths; "" if all images are good."""
    faults = {str(one.folder.path / path): why for one in searchers for path, why in one.faults.items()}
    if not faults:
        return ""
    reasons = ", ".join(f"{count:,} x {reason}" for reason, count in Counter(faults.values()).most_common())
    more = f" and {len(faults) - NAMED:,} more" if len(faults) > NAMED else ""
    first = ", ".join(list(faults)[:NAMED])
    return f"{plural(len(faults), 'image')} could not be used ({reasons}): {first}{more}"


def find_matches(searchers: Sequence[Searcher], query: str, top: int) -> list[list[Match]]:
    """The matches of each searcher. A query that is the path of a file is read as an image."""
    from neuclip.data.decoding import decode
    from neuclip.data.source import BadSample

    if not Path(query).is_file():
        return [searcher.by_text(query, top) for searcher in searchers]
    try:
        image = decode(Path(query).read_bytes(), query)
        return [searcher.by_image(image, top) for searcher in searchers]
    except BadSample as bad:
        raise UserError(f"{query}: {bad.reason}; give a JPEG, PNG, WebP or similar file") from bad
    except OSError as error:
        raise UserError(f"{query} cannot be read ({error.strerror}); give the path of an image file") from error


def print_matches(searchers: Sequence[Searcher], matches: list[list[Match]]) -> None:
    for searcher, best in zip(searchers, matches, strict=True):
        if len(searchers) > 1 and best:
            print(searcher.name)
        for match in best:
            print(f"{match.score:6.3f}  {searcher.folder.path / match.path}")


def json_object(searchers: Sequence[Searcher], matches: list[list[Match]], query: str) -> dict[str, Any]:
    folder = searchers[0].folder.path
    return {
        "folder": str(folder),
        "query": query,
        "models": [
            {
                "model": searcher.name,
                "images": len(searcher.ids),
                "skipped": [{"path": str(folder / path), "reason": why} for path, why in searcher.faults.items()],
                "matches": [{"path": str(folder / match.path), "score": match.score} for match in best],
            }
            for searcher, best in zip(searchers, matches, strict=True)
        ],
    }


def serve_page(searchers: list[Searcher], top: int) -> int:
    """Serve the search page until Ctrl-C."""
    from neuclip.search.server import Page

    with Page(searchers, top) as page:
        print(
            f"{page.address}\nOpen this whole address in a browser on this machine. Press Ctrl-C to stop.", flush=True
        )
        page.serve_forever()
    return 0
