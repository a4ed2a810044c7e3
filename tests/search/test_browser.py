"""The search page in a real browser: words, images, a drop, a phone, a dark page, a keyboard, mistakes."""

from __future__ import annotations

import base64

import pytest

from tests.builders.images import image_bytes
from tests.search.serving import page_of

pytestmark = pytest.mark.slow

FOUND = "document.querySelectorAll('.matches img').length === {}"
LOADED = "[...document.images].filter((image) => image.src).every((image) => image.naturalWidth)"
MEASURE = """(() => ({
  width: document.documentElement.scrollWidth,
  wide: [...document.querySelectorAll("main *")].filter((one) => one.getBoundingClientRect().right > innerWidth + 0.5)
    .map((one) => one.tagName + "." + one.className),
  small: [...document.querySelectorAll("button, .pick, input[type=search]")]
    .filter((one) => one.getBoundingClientRect().height < 36).length,
  nameless: [...document.querySelectorAll(".matches img, .matches button")]
    .filter((one) => !(one.alt || one.ariaLabel)).length,
  columns: new Set([...document.querySelectorAll("section")].map((one) => one.getBoundingClientRect().left)).size,
  ground: getComputedStyle(document.body).backgroundColor,
}))()"""
STATUS = "document.getElementById('status').textContent"
ERROR = "document.getElementById('error').hidden ? '' : document.getElementById('error').textContent"
PATHS = "[...document.querySelectorAll('section:first-child .path')].map((one) => one.textContent)"


@pytest.fixture
def address(built, photos, tab):
    (photos / "a very long name without any space in it that goes on and on_and_on_and_on.png").write_bytes(
        image_bytes(9)
    )
    tab.complaints = []
    with page_of({"first": built, "second with a long name": built}, photos, top=4) as address:
        yield address
        complaints, tab.complaints = tab.complaints, []
        assert complaints == []


@pytest.mark.parametrize(("width", "columns"), [(360, 1), (1280, 2)])
def test_the_page_fits_and_shows_both_models(tab, address, width, columns, tmp_path):
    tab.open(f"{address}#a%20red%20circle", width=width)
    tab.until(f"{FOUND.format(8)}")
    tab.evaluate("document.querySelectorAll('img').forEach((image) => { image.loading = 'eager'; })")
    tab.until(LOADED)
    measured = tab.evaluate(MEASURE)
    assert measured["width"] <= width and measured["wide"] == []
    assert measured["small"] == measured["nameless"] == 0 and measured["columns"] == columns
    assert tab.evaluate(STATUS).startswith("The nearest 4 for “a red circle”")
    tab.screenshot(tmp_path / "page.png")


def test_a_dark_browser_gets_a_dark_page(tab, address):
    grounds = []
    for dark in (False, True):
        tab.open(address, dark=dark)
        grounds.append(tab.evaluate(MEASURE)["ground"])
    assert grounds == ["rgb(251, 250, 247)", "rgb(20, 23, 27)"]


def test_words_and_enter_are_enough_and_going_back_finds_the_earlier_words(tab, address):
    tab.open(address)
    assert tab.evaluate(STATUS) == "Type what you are looking for, or choose an image."
    tab.type("a red circle")  # the box has the focus
    tab.press("Enter", code=13, text="\r")
    tab.until(f"{STATUS}.includes('a red circle')")
    tab.evaluate("document.getElementById('text').select()")
    tab.type("blue <b>bar</b>")
    tab.press("Enter", code=13, text="\r")
    tab.until(f"{STATUS}.includes('blue <b>bar</b>')")
    tab.evaluate("history.back()")
    tab.until(f"{STATUS}.includes('a red circle') && document.getElementById('text').value === 'a red circle'")


def test_an_image_is_searched_by_choosing_it_by_dropping_it_and_by_its_own_button(tab, address, tmp_path):
    query = tmp_path / "query.png"
    query.write_bytes(image_bytes(5))
    tab.open(address)
    tab.choose_file("#file", query)
    tab.until(f"{STATUS}.includes('query.png')")
    assert tab.evaluate(PATHS)[0].startswith("05 ")
    assert tab.evaluate("document.getElementById('shown').naturalWidth") == 32
    dropped = base64.b64encode(image_bytes(7)).decode()
    tab.evaluate(
        f"""(() => {{
          const bytes = Uint8Array.from(atob("{dropped}"), (letter) => letter.charCodeAt(0));
          const dataTransfer = new DataTransfer();
          dataTransfer.items.add(new File([bytes], "dropped.png", {{ type: "image/png" }}));
          dispatchEvent(new DragEvent("drop", {{ dataTransfer, cancelable: true }}));
        }})()"""
    )
    tab.until(f"{STATUS}.includes('dropped.png')")
    paths = tab.evaluate(PATHS)
    assert paths[0].startswith("07 ")
    tab.evaluate("document.querySelectorAll('section:first-child .like')[1].click()")
    tab.until(f"{STATUS}.includes({paths[1]!r})")
    assert tab.evaluate(PATHS)[0] == paths[1]


def test_what_is_no_image_is_said_and_the_page_goes_on(tab, address, tmp_path):
    (tmp_path / "words.png").write_text("not an image")
    tab.open(f"{address}#red")
    tab.until(FOUND.format(8))
    tab.choose_file("#file", tmp_path / "words.png")
    tab.until(ERROR)
    assert tab.evaluate(ERROR).startswith("That did not work: image does not decode")
    assert tab.evaluate(PATHS) == []
    tab.complaints.clear()  # the browser notes the answer 400
    tab.evaluate("document.getElementById('query').requestSubmit()")
    tab.until(f"{STATUS}.startsWith('Type what')")  # the words were replaced by the image
    assert tab.evaluate("document.getElementById('asked').hidden")
    tab.type("red")
    tab.press("Enter", code=13, text="\r")
    tab.until(FOUND.format(8))
    assert tab.evaluate(ERROR) == ""


def test_a_page_whose_server_has_ended_says_so(tab, built, photos):
    with page_of({"first": built}, photos) as address:
        tab.open(address)
    tab.type("red")
    tab.press("Enter", code=13, text="\r")
    tab.until(ERROR)
    assert tab.evaluate(ERROR) == "No answer: is neuclip search still running?"
    tab.complaints.clear()
