"""Files as other programs write them: marks and encodings, base64, categories, numbers, img2dataset's folders."""

from __future__ import annotations

import base64
import csv
import json
import pickle
from pathlib import Path

import pytest

from neuclip.data.captions import strip_blanks, texts_in
from neuclip.data.fingerprint import fingerprint
from neuclip.data.open import open_source, open_training_data
from neuclip.data.sample import BadSample
from neuclip.data.tables.arrow import holds_images
from neuclip.data.tables.columns import ColumnChoice
from neuclip.data.tables.folder import open_folder
from neuclip.data.tables.listed import is_base64
from neuclip.errors import RunFailed, UserError
from neuclip.settings.sections import DataSettings
from tests.data.small_shards import contents, image_bytes, write_tar

MARK = b"\xef\xbb\xbf"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NEUCLIP_CACHE", str(tmp_path / "cache"))


def write_images(folder: Path, count: int, **partners: bytes) -> Path:
    """0.png and so on, each with files of these endings beside it; `{}` in one becomes the number."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (folder / f"{number}.png").write_bytes(image_bytes(number))
        for ending, content in partners.items():
            name = f"{number}.{ending.replace('_', '.')}"
            (folder / name).write_bytes(content.replace(b"{}", str(number).encode()))
    return folder


def reason_of(source, id: int) -> BadSample:
    with pytest.raises(BadSample) as caught:
        source[id]
    return caught.value


def test_a_mark_in_front_of_utf_8_is_no_part_of_a_caption_in_any_kind_of_file(tmp_path):
    folder = write_images(tmp_path / "folder", 2, txt=MARK + b"cap {}\r\n")
    rows = [[f"folder/{number}.png", f"\ufeffcap {number}"] for number in range(2)]
    with (tmp_path / "pairs.csv").open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows([["image", "caption"], *rows])
    (tmp_path / "pairs.jsonl").write_text(
        "".join(json.dumps(dict(zip(("image", "caption"), row, strict=True))) + "\n" for row in rows), "utf-8-sig"
    )
    texts = [(f"{number}.{ending}", content) for number in range(2) for ending, content in (
        ("png", image_bytes(number)), ("txt", MARK + f"cap {number}".encode()))]  # fmt: skip
    write_tar(tmp_path / "txt.tar", texts)
    objects = [(name.replace("txt", "json"), MARK + json.dumps({"caption": content[3:].decode()}).encode())
               if name.endswith("txt") else (name, content) for name, content in texts]  # fmt: skip
    write_tar(tmp_path / "json.tar", objects)
    sources = [open_source(str(folder)), *(open_source(str(tmp_path / name)) for name in (
        "pairs.csv", "pairs.jsonl", "txt.tar", "json.tar"))]  # fmt: skip
    assert [source.captions() for source in sources] == [["cap 0", "cap 1"]] * 5
    assert [source[1].captions for source in sources] == [("cap 1",)] * 5
    assert len({json.dumps(fingerprint(source)) for source in sources}) == 1
    assert strip_blanks("\ufeff \0a\ufeff") == "a"


def test_captions_lie_in_files_named_in_any_of_the_usual_ways(tmp_path):
    json_too = {"txt": b"cap {}", "json": b'{"caption": "other"}', "caption": b"third"}
    only_json = {"json": b'{"caption": "cap {}", "url": "http://x"}'}
    for number, ways in enumerate(
        [{"txt": b"cap {}"}, {"png_txt": b"cap {}"}, {"caption": b"cap {}"}, only_json, json_too]
    ):
        folder = write_images(tmp_path / str(number), 2, **ways)
        (folder / "stats.json").write_text("{}")
        source = pickle.loads(pickle.dumps(open_source(str(folder))))
        assert source.captions() == ["cap 0", "cap 1"] == [source[id].captions[0] for id in range(2)]
        assert source.faults == ()
    (folder / "9.caption").write_text("alone")
    assert [fault.where for fault in open_source(str(folder)).faults] == [str(folder / "9.caption")]


def test_several_captions_in_a_json_file_count_in_the_fingerprint_as_in_a_table(tmp_path):
    folder = write_images(tmp_path / "folder", 1, json=b'{"caption": ["one", "two"]}')
    (tmp_path / "pairs.jsonl").write_text('{"image": "folder/0.png", "caption": ["one", "two"]}')
    inside = open_source(str(folder))
    assert inside[0].captions == ("one", "two")
    assert fingerprint(inside) == fingerprint(open_source(str(tmp_path / "pairs.jsonl")))


def test_images_none_of_which_has_a_text_are_refused_whatever_else_lies_there(tmp_path):
    folder = write_images(tmp_path / "folder", 2)
    (folder / "00000_stats.json").write_text("{}")
    with pytest.raises(UserError, match="2 images but no captions"):
        open_source(str(folder))


def img2dataset_files(folder: Path) -> Path:
    """As `--output_format files` leaves it."""
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    for shard in ("00000", "00001"):
        write_images(folder / shard, 2, txt=b"cap {}", json=b'{"caption": "cap {}", "status": "success"}')
        table = {"url": ["http://x/1", "http://x/2"], "caption": ["a", "b"], "key": ["0", "1"], "width": [3, 4]}
        parquet.write_table(pyarrow.table(table), folder / f"{shard}.parquet")
        (folder / f"{shard}_stats.json").write_text('{"count": 2}')
    return folder


def test_the_folder_that_img2dataset_writes_is_one_of_images_and_its_table_of_addresses_is_none(tmp_path):
    folder = img2dataset_files(tmp_path / "fetched")
    assert not holds_images(folder / "00000.parquet", ColumnChoice())
    source = open_folder("fetched", folder, ColumnChoice())
    assert source.captions() == ["cap 0", "cap 1"] * 2 and source.faults == ()
    assert [source.where(id).removeprefix(f"{folder}/") for id in (0, 3)] == ["00000/0.png", "00001/1.png"]


def test_a_table_holds_images_if_a_column_has_their_bytes_or_paths(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")

    def holds(columns: dict, image_column: str = "") -> bool:
        parquet.write_table(pyarrow.table(columns), tmp_path / "x.parquet")
        return holds_images(tmp_path / "x.parquet", ColumnChoice(image_column))

    assert (
        holds({"image": [b"bytes"]}) and holds({"path": ["a.jpg"]}) and holds({"image": [{"bytes": b"", "path": ""}]})
    )
    assert holds({"odd": ["a.jpg"], "url": ["http://x"]}, "odd")
    assert not holds({"image": ["http://x/a.jpg", None, "https://x/b.jpg"]}) and not holds({"url": ["http://x"]})


def encoded(number: int, form: str) -> str:
    text = base64.b64encode(image_bytes(number, form)).decode()
    return text if number % 2 else f"data:image/{form};base64,{text}"


def write_base64(folder: Path) -> dict[str, Path]:
    rows = [(encoded(number, form), f"cap {number}") for number, form in enumerate(["png", "jpg", "webp", "gif"])]
    rows.append(("/9j/" + "A" * 100_001, "cap 4"))
    paths = {kind: folder / f"pairs.{kind}" for kind in ("csv", "tsv", "jsonl")}
    for kind, separator in (("csv", ","), ("tsv", "\t")):
        with paths[kind].open("w", newline="") as file:
            csv.writer(file, delimiter=separator).writerows([("image", "caption"), *rows])
    with paths["jsonl"].open("w") as file:
        file.writelines(json.dumps({"image": image, "caption": caption}) + "\n" for image, caption in rows)
    return paths


def check_base64(source) -> None:
    assert [source[id].image for id in range(4)] == [
        image_bytes(number, form) for number, form in enumerate(["png", "jpg", "webp", "gif"])
    ]
    bad = reason_of(source, 4)
    assert bad.reason == "image is not whole base64" and len(bad.where) < 300


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl"])
def test_images_in_base64_are_read_and_said(tmp_path, capsys, kind):
    path = write_base64(tmp_path)[kind]
    check_base64(open_training_data(DataSettings(train=str(path))))
    assert f"{path}: its images are base64 text" in capsys.readouterr().err


def test_images_in_base64_of_parquet_are_read_row_group_by_row_group(tmp_path, capsys):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [json.loads(line) for line in write_base64(tmp_path)["jsonl"].read_text().splitlines()]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "pairs.parquet")
    source = open_source(str(tmp_path / "pairs.parquet"))
    check_base64(source)
    assert not hasattr(source, "rows") and "base64" in capsys.readouterr().err


def test_a_path_is_not_taken_for_base64():
    paths = ["/9j/photos/of/my/holidays/in/two/thousand/a.jpg", "iVBORaa.png", "R0lGOD", "data:image/a.png", "UklGR/a"]
    assert not any(is_base64(path.encode()) for path in paths)


def test_a_name_as_long_as_a_page_is_shortened_wherever_it_is_said(tmp_path):
    page = "x" * 5000
    (tmp_path / "pairs.csv").write_text(f"image,caption\n{page},a caption\n")
    source = open_source(str(tmp_path / "pairs.csv"))
    assert len(reason_of(source, 0).where) < 500
    for attempt in (
        lambda: open_training_data(DataSettings(train=str(tmp_path / "pairs.csv"))),
        lambda: open_source(str(tmp_path / "odd.csv")),
    ):
        (tmp_path / "odd.csv").write_text(f"{page},{page}y\n")
        with pytest.raises(UserError) as caught:
            attempt()
        assert len(str(caught.value)) < 900


def types_of_columns(pyarrow):
    images, captions = [image_bytes(0), image_bytes(1), None], ["one", "two", "two"]
    views = hasattr(pyarrow, "binary_view")
    for bytes_ in (pyarrow.large_binary(), *([pyarrow.binary_view()] if views else [])):
        yield pyarrow.array(images, bytes_), pyarrow.array(captions, pyarrow.large_string())
    yield pyarrow.array(images).dictionary_encode(), pyarrow.array(captions).dictionary_encode()
    paths = ["0.png", "1.png", None]
    for text in (pyarrow.large_string(), *([pyarrow.string_view()] if views else [])):
        yield pyarrow.array(paths, text), pyarrow.array(captions, text)
    yield pyarrow.array(paths).dictionary_encode(), pyarrow.array(captions).dictionary_encode()


def test_parquet_columns_of_all_types_that_programs_write_are_read(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    write_images(tmp_path, 2)
    for images, captions in types_of_columns(pyarrow):
        parquet.write_table(pyarrow.table({"image": images, "caption": captions}), tmp_path / "pairs.parquet")
        source = open_source(str(tmp_path / "pairs.parquet"))
        assert source.captions() == ["one", "two", "two"], images.type
        assert [source[id].image for id in range(2)] == [image_bytes(0), image_bytes(1)], images.type
        assert reason_of(source, 2).reason == "no image"


def test_numbers_are_the_same_captions_in_every_kind_of_file(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    write_images(tmp_path, 2)
    rows = [{"image": "0.png", "caption": 1984}, {"image": "1.png", "caption": 7}]
    (tmp_path / "pairs.csv").write_text("image,caption\n0.png,1984\n1.png,7\n")
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "pairs.parquet")
    members = [member for number, row in enumerate(rows) for member in (
        (f"{number}.png", image_bytes(number)), (f"{number}.json", json.dumps(row).encode()))]  # fmt: skip
    write_tar(tmp_path / "pairs.tar", members)
    sources = [open_source(str(tmp_path / f"pairs.{kind}")) for kind in ("csv", "jsonl", "parquet", "tar")]
    assert [contents(source) for source in sources] == [[(image_bytes(0), ("1984",)), (image_bytes(1), ("7",))]] * 4
    assert len({json.dumps(fingerprint(source)) for source in sources}) == 1
    assert texts_in([float("nan"), float("inf"), None, True, 0.5, 10**400]) == ("0.5", str(10**400))


def test_paths_with_backslashes_lead_to_images_unless_a_file_is_called_so(tmp_path):
    write_images(tmp_path / "a", 1)
    (tmp_path / "b\\0.png").write_bytes(image_bytes(5))
    (tmp_path / "pairs.csv").write_text("image,caption\na\\0.png,one\nb\\0.png,two\n")
    (tmp_path / "pairs.jsonl").write_text('{"image": "a\\\\0.png", "caption": "one"}\n')
    assert contents(open_source(str(tmp_path / "pairs.csv"))) == [
        (image_bytes(0), ("one",)),
        (image_bytes(5), ("two",)),
    ]
    assert contents(open_training_data(DataSettings(train=str(tmp_path / "pairs.jsonl")))) == [
        (image_bytes(0), ("one",))
    ]


def test_a_table_that_is_empty_or_utf_16_is_called_so(tmp_path):
    (tmp_path / "pairs.csv").write_bytes(b"")
    with pytest.raises(UserError, match=r"pairs\.csv: is empty; "):
        open_source(str(tmp_path / "pairs.csv"))
    for encoding, told in {"utf-16": "is UTF-16; save it as UTF-8", "utf-16-le": "holds NUL bytes"}.items():
        (tmp_path / "pairs.jsonl").write_text('{"image": "0.png", "caption": "one"}\n', encoding)
        with pytest.raises(UserError, match=told):
            open_source(str(tmp_path / "pairs.jsonl"))


def test_a_parquet_file_that_disappears_ends_the_run_and_is_not_bad_data(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"image": [image_bytes(0)], "caption": ["one"]}), tmp_path / "pairs.parquet")
    source = open_source(str(tmp_path / "pairs.parquet"))
    (tmp_path / "pairs.parquet").unlink()
    with pytest.raises(RunFailed, match=r"pairs\.parquet row group 0: has gone; .*--resume"):
        source[0]
