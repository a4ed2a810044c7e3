"""The search page in a real browser: words, images, a drop, a phone, a dark page, a keyboard, mistakes."""

from __future__ import annotations

import base64

import pytest

from tests.builders.images import image_bytes
from tests.search.serving import page_of

pytestmark = pytest.mark.slow

FOUND = "document.querySelectorAll('.model .matches img').length === {}"
LOADED = "[...document.images].filter((image) => image.src).every((image) => image.naturalWidth)"
MEASURE = """(() => ({
  width: document.documentElement.scrollWidth,
  wide: [...document.querySelectorAll("main *")].filter((one) => one.getBoundingClientRect().right > innerWidth + 0.5)
    .map((one) => one.tagName + "." + one.className),
  small: [...document.querySelectorAll("button, .pick, .like, input[type=search]")]
    .filter((one) => one.getBoundingClientRect().height < 36).length,
  broken: [...document.querySelectorAll("form *")].filter((one) => one.getBoundingClientRect().height > 60).length,
  nameless: [...document.querySelectorAll(".matches img, .like")].filter((one) => !(one.alt || one.ariaLabel)).length,
  columns: new Set([...document.querySelectorAll(".model")].map((one) => one.getBoundingClientRect().left)).size,
  ground: getComputedStyle(document.body).backgroundColor,
}))()"""
STATUS = "document.getElementById('status').textContent"
ERROR = "document.getElementById('error').hidden ? '' : document.getElementById('error').textContent"
PATHS = "[...document.querySelectorAll('.model')[0].querySelectorAll('.path')].map((one) => one.textContent)"
BOX = "document.getElementById('text').value"


@pytest.fixture
def page(built, photos, tab):
    (photos / f"a very long name without any space in it that goes {'on_and_' * 20}.png").write_bytes(image_bytes(9))
    tab.complaints = []
    with page_of({"first": built, "second with a long name": built}, photos, top=4) as page:
        yield page
        complaints, tab.complaints = tab.complaints, []
        assert complaints == []


def enter(tab, words: str) -> None:
    """The box has the focus, with what was in it selected."""
    tab.evaluate("document.getElementById('text').select()")
    tab.type(words)
    tab.press("Enter", code=13, text="\r")


@pytest.mark.parametrize(("width", "columns"), [(360, 1), (1280, 2)])
def test_the_page_fits_and_shows_both_models(tab, page, width, columns):
    tab.open(f"{page.address}#a%20red%20circle", width=width)
    tab.until(FOUND.format(8))
    tab.evaluate("document.querySelectorAll('img').forEach((image) => { image.loading = 'eager'; })")
    tab.until(LOADED)
    measured = tab.evaluate(MEASURE)
    assert measured["width"] <= width and measured["wide"] == []
    assert measured["small"] == measured["broken"] == measured["nameless"] == 0 and measured["columns"] == columns
    assert tab.evaluate(STATUS).startswith("The nearest 4 images to “a red circle”.")


def test_a_dark_browser_gets_a_dark_page(tab, page):
    grounds = []
    for dark in (False, True):
        tab.open(page.address, dark=dark)
        grounds.append(tab.evaluate(MEASURE)["ground"])
    assert grounds == ["rgb(251, 250, 247)", "rgb(20, 23, 27)"]


def test_words_and_enter_are_enough_and_going_back_finds_the_earlier_words(tab, page):
    tab.open(page.address)
    tab.type("a red circle")  # without a click
    tab.press("Enter", code=13, text="\r")
    tab.until(f"{STATUS}.includes('“a red circle”')")
    enter(tab, "blue <b>bar</b> /7")
    tab.until(f"{STATUS}.includes('“blue <b>bar</b> /7”')")
    tab.evaluate("history.back()")
    tab.until(f"{STATUS}.includes('“a red circle”') && {BOX} === 'a red circle'")
    tab.open(f"{page.address}#100%")  # not what a browser would write
    tab.until(f"{STATUS}.includes('“100%”')")


def test_the_page_begins_with_images_of_the_folder_and_more_like_one_survives_reload_and_back(tab, page):
    tab.open(page.address)
    assert tab.evaluate(STATUS).startswith("Describe an image, or start from one of these.")
    assert tab.evaluate("document.querySelectorAll('#first li').length") == 12
    assert tab.evaluate("getComputedStyle(document.querySelector('.model')).display") == "none"
    path = tab.evaluate("document.querySelectorAll('#first .path')[3].textContent")
    tab.evaluate("document.querySelectorAll('#first .like')[3].click()")
    tab.until(f"{STATUS}.includes({path!r})")
    assert tab.evaluate(PATHS)[0] == path and tab.evaluate("document.querySelectorAll('#first li').length") == 0
    following = tab.evaluate(PATHS)[1]
    tab.evaluate("document.querySelectorAll('.model .like')[1].click()")
    tab.until(f"{STATUS}.includes({following!r})")
    address = tab.evaluate("location.href")
    tab.evaluate("history.back()")
    tab.until(f"{STATUS}.includes({path!r})")
    tab.evaluate("history.back()")
    tab.until("document.querySelectorAll('#first li').length === 12")
    assert tab.evaluate("document.getElementById('shown').hidden")
    tab.open(address)
    tab.until(f"{STATUS}.includes({following!r}) && document.getElementById('shown').naturalWidth")


def test_an_image_is_searched_by_choosing_it_and_by_dropping_it(tab, page, tmp_path):
    query = tmp_path / "query.png"
    query.write_bytes(image_bytes(5))
    tab.open(f"{page.address}#red")
    tab.until(FOUND.format(8))
    tab.choose_file("#file", query)
    tab.until(f"{STATUS}.includes('query.png')")
    assert tab.evaluate(PATHS)[0].startswith("05 ") and tab.evaluate(BOX) == ""
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
    assert tab.evaluate(PATHS)[0].startswith("07 ")
    tab.evaluate("history.back()")
    tab.until(f"{STATUS}.includes('“red”')")


def test_an_answer_that_comes_after_a_later_search_is_not_shown(tab, page):
    late = """{ const send = fetch; let first; window.fetch = async (...given) => {
      const answer = await send(...given);
      if (!first) await new Promise((done) => { first = done; });
      else setTimeout(() => { first(); setTimeout(() => { window.late = true; }, 50); }, 50);
      return answer; }; }"""
    with tab.script(late):
        tab.open(f"{page.address}#first%20words")
    tab.evaluate("location.hash = '#later%20words'")
    tab.until("window.late")
    assert "“later words”" in tab.evaluate(STATUS)


def test_a_file_that_is_no_image_or_too_large_shows_an_error_and_the_page_still_works(tab, page, tmp_path):
    (tmp_path / "words.png").write_text("not an image")
    (tmp_path / "large.png").touch()
    (tmp_path / "large.png").open("r+b").truncate((64 << 20) + 1)
    tab.open(f"{page.address}#red")
    tab.until(FOUND.format(8))
    tab.choose_file("#file", tmp_path / "large.png")
    tab.until(ERROR)
    assert tab.evaluate(ERROR) == "The search failed: large.png is larger than 64 MB."
    tab.choose_file("#file", tmp_path / "words.png")
    tab.until(f"({ERROR}).includes('decode')")
    assert tab.evaluate(ERROR).startswith("The search failed: image does not decode; give a JPEG")
    assert tab.evaluate(PATHS) == []
    tab.complaints.clear()  # the browser notes the answer 400
    tab.evaluate("document.getElementById('query').requestSubmit()")
    tab.until(f"{STATUS}.startsWith('Describe')")  # the words were replaced by the image
    enter(tab, "red")
    tab.until(FOUND.format(8))
    assert tab.evaluate(ERROR) == ""


def test_a_page_whose_server_has_stopped_shows_an_error(tab, built, photos):
    with page_of({"first": built}, photos) as page:
        tab.open(page.address)
    enter(tab, "red")
    tab.until(ERROR)
    assert tab.evaluate(ERROR) == "No answer: is neuclip search still running?"
    tab.complaints.clear()
