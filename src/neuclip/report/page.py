"""Pages: a title, notices and sections of blocks (tables, charts, tiles, notes, galleries) as one HTML file.

Reports, comparisons and doctor's page are all rendered here. A table can also be rendered as text for the terminal, as
Markdown and as LaTeX.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from neuclip import files
from neuclip.errors import RunFailed
from neuclip.formatting import format_count
from neuclip.report.charts import Chart

if TYPE_CHECKING:
    from jinja2 import Environment

LATEX_LETTERS = str.maketrans(
    {letter: f"\\{letter}" for letter in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"±": r"$\pm$", "−": r"$-$", "–": "--", "\n": " "}
)
MARKDOWN_LETTERS = str.maketrans({"\\": "\\\\", "|": "\\|", "\n": " "})
EMBEDDED_IMAGE = re.compile(r"data:image/(?:png|jpeg|webp|gif);base64,[A-Za-z0-9+/=]+")


class Cell(NamedTuple):
    """A cell of a table: a text, a smaller note below it, and a tooltip."""

    text: str
    note: str = ""
    hover: str = ""
    strong: bool = False  # the note is set in bold
    link: str = ""  # file name of a page in the same folder

    def __str__(self) -> str:
        return f"{self.text} ({self.note})" if self.note else self.text


@dataclass(frozen=True)
class Table:
    """The first `text_columns` columns are text, the others numbers.

    >>> table = Table("Recall", ["set", "recall@1"], [["new", Cell("12.3 %", "chance 0.10 %")]])
    >>> print(text_table(table), end="")
    set  recall@1
    new    12.3 %
    """

    kind: ClassVar[str] = "table"
    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    text_columns: int = 1
    notes: Sequence[str] = ()

    @property
    def cells(self) -> list[list[Cell]]:
        return [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in self.rows]


@dataclass(frozen=True)
class Tiles:
    """The figures at the top: label, value, and a note to judge it by."""

    kind: ClassVar[str] = "tiles"
    tiles: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class Charts:
    kind: ClassVar[str] = "charts"
    charts: Sequence[Chart]


@dataclass(frozen=True)
class Notes:
    """Sentences, as paragraphs or as a list."""

    kind: ClassVar[str] = "notes"
    sentences: Sequence[str]
    as_list: bool = False


class Match(NamedTuple):
    caption: str
    image: str  # data: URI; empty if there is no image
    score: float
    right: bool


class Query(NamedTuple):
    """A query with the rank of its right answer and its best matches; or, without matches, a pair to look at."""

    caption: str
    image: str = ""
    rank: float | None = None
    matches: Sequence[Match] = ()


@dataclass(frozen=True)
class Gallery:
    kind: ClassVar[str] = "gallery"
    title: str
    queries: Sequence[Query]


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Table | Tiles | Charts | Notes | Gallery]
    folded: bool = False


@dataclass(frozen=True)
class Page:
    what: str  # "training run"
    title: str
    facts: Sequence[str] = ()
    notices: Sequence[str] = ()
    sections: Sequence[Section] = field(default_factory=list)


def render_html(page: Page) -> str:
    """The whole document. Its policy allows the browser no request and no script other than the page's own."""
    script, style = own_file("chart.js"), own_file("style.css")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    text = templates().get_template("page.html").render(page=page, style=style, script=script, policy=policy)
    return text.lstrip()  # the macros leave empty lines before the document


@cache
def templates() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("neuclip.report")
    jinja = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    jinja.filters |= {"format_count": format_count, "embedded_image": embedded_image}
    return jinja


def own_file(name: str) -> str:
    """The text of a file in the folder `templates`."""
    return resources.files("neuclip.report").joinpath("templates", name).read_text(encoding="utf-8")


def embedded_image(source: str) -> str:
    """The source of an image if it is a data: URI, otherwise "", because the page must not fetch anything."""
    return source if EMBEDDED_IMAGE.fullmatch(source) else ""


def text_table(table: Table, *, notes: bool = False) -> str:
    """The table as text for the terminal, with aligned columns; `notes` adds the notes of the cells in parentheses."""
    cells = [[str(cell) if notes else cell.text for cell in row] for row in table.cells]
    rows = [list(table.head), *cells]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            cell.ljust(width) if index < table.text_columns else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "".join(f"{line.rstrip()}\n" for line in lines)


def markdown_table(table: Table) -> str:
    """The table in GitHub's Markdown, with the notes below it."""
    head, *rows = escaped_rows(table, lambda text: text.translate(MARKDOWN_LETTERS), "**{}**")
    rule = ["---" if index < table.text_columns else "---:" for index in range(len(head))]
    notes = "".join(f"\n{note.translate(MARKDOWN_LETTERS)}\n" for note in table.notes if note)
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, rule, *rows)) + notes


def latex_table(table: Table) -> str:
    """The table as a LaTeX tabular with booktabs, with the notes as comments above it."""
    rows = escaped_rows(table, lambda text: text.translate(LATEX_LETTERS), r"\textbf{{{}}}")
    head, *body = [" & ".join(row) + r" \\" for row in rows]
    columns = "".join("l" if index < table.text_columns else "r" for index in range(len(table.head)))
    notes = [f"% {' '.join(note.split())}" for note in (r"\usepackage{booktabs}", *table.notes) if note]
    lines = [*notes, rf"\begin{{tabular}}{{{columns}}}", r"\toprule", head, r"\midrule", *body, r"\bottomrule"]
    return "\n".join([*lines, r"\end{tabular}"]) + "\n"


def escaped_rows(table: Table, escape: Callable[[str], str], strong: str) -> list[list[str]]:
    """Head and rows with escaped texts; `strong` is a format for bold cells, such as '**{}**'."""
    rows = [
        [strong.format(escape(str(cell))) if cell.strong else escape(str(cell)) for cell in row] for row in table.cells
    ]
    return [[escape(cell) for cell in table.head], *rows]


def write_page(path: Path, text: str) -> Path:
    """Write a page or table and return its path. Raises RunFailed if the file cannot be written."""
    try:
        files.write_text(path, text)
    except OSError as error:
        raise RunFailed(f"cannot write {path}: {error.strerror}; free some space or change the permissions") from error
    return path
