"""What a page says to its reader, found in its HTML: how it is made is nothing that a test knows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

VOID = {"meta", "img", "br", "link", "input", "hr"}
UNSEEN = {"style", "script"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    inside: list[Element | str] = field(default_factory=list)

    def below(self) -> Iterator[Element]:
        for one in self.inside:
            if isinstance(one, Element):
                yield one
                yield from one.below()

    def all(self, tag: str, named: str | None = None) -> list[Element]:
        """The elements below it, all of them or those of one class."""
        return [
            one for one in self.below() if one.tag == tag and (named is None or named == one.attributes.get("class"))
        ]

    def content(self) -> str:
        pieces = (one if isinstance(one, str) else one.content() for one in self.inside)
        return "" if self.tag in UNSEEN else " ".join(pieces)

    @property
    def text(self) -> str:
        """What a reader sees without a script, in one line."""
        return " ".join(self.content().split())


class Reader(HTMLParser):
    """Fails at a tag that closes what was not opened last."""

    def __init__(self) -> None:
        super().__init__()
        self.open = [Element("document", {})]

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attributes})
        self.open[-1].inside.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag, f"</{tag}> closes nothing, line {self.getpos()[0]}"

    def handle_data(self, data: str) -> None:
        self.open[-1].inside.append(data)


class Shown(Element):
    """A page of ours by its parts."""

    @property
    def notices(self) -> list[str]:
        return [one.text for one in self.all("p", "notice")]

    @property
    def findings(self) -> list[str]:
        return [one.text for box in self.all("ul", "findings") for one in box.all("li")]

    @property
    def tiles(self) -> dict[str, tuple[str, str]]:
        """By label: the value, and the note to judge it by."""
        found = {}
        for tile in self.all("dl", "tiles")[0].all("div") if self.all("dl", "tiles") else []:
            (label,), (strong,), (all_,) = tile.all("dt"), tile.all("strong"), tile.all("dd")
            found[label.text] = (strong.text, all_.text.removeprefix(strong.text).strip())
        return found

    @property
    def charts(self) -> dict[str, dict[str, Any]]:
        """By title: the numbers that are drawn, and under "values" what is read without a script."""
        found = {}
        for figure in self.all("figure", "chart"):
            (numbers,), (values,) = figure.all("script"), figure.all("p", "quiet values")
            found[figure.all("h3")[0].text] = json.loads(str(numbers.inside[0])) | {"values": values.text}
        return found

    def section(self, title: str) -> Element:
        """A part of the page by its heading, folded or not."""
        heads = {"section": "h2", "details": "summary"}
        parts = [one for one in self.below() if one.tag in heads]
        return next(one for one in parts if [head.text for head in one.all(heads[one.tag])][:1] == [title])

    def rows(self, title: str) -> list[list[str]]:
        """The cells of a table, by its caption or the heading above it; its head comes first."""
        tables = {text.text: table for table in self.all("table") for text in table.all("caption")}
        table = tables.get(title) or self.section(title).all("table")[0]
        return [[cell.text for cell in row.below() if cell.tag in ("th", "td")] for row in table.all("tr")]


def read_page(source: Path | str) -> Shown:
    reader = Reader()
    reader.feed(source if isinstance(source, str) else source.read_text(encoding="utf-8"))
    reader.close()
    (document,) = reader.open  # everything was closed
    return Shown("document", {}, document.inside)


def refuse_foreign(page: Element) -> None:
    """The page is one file: no script but its own and numbers, no attribute that runs one, nothing to fetch."""
    scripts = [one.attributes.get("type") for one in page.all("script")]
    assert scripts.count(None) == 1 and set(scripts) <= {None, "application/json"}
    for one in page.below():
        assert one.tag not in ("link", "iframe", "object", "base", "a", "form")
        assert not any(name.startswith("on") or name in ("href", "style") for name in one.attributes)
        assert one.attributes.get("src", "data:image/").startswith("data:image/") or not one.attributes["src"]
    styles = " ".join(str(one.inside) for one in page.all("style"))
    assert not re.search(r"@import|url\(", styles)
