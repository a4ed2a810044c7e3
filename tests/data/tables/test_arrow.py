"""Parquet files, and data sets that Hugging Face saved."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import sys

import pytest
from neuclip.data.tables.columns import ColumnChoice

from neuclip.data.open import open_source
from neuclip.data.tables.arrow import holds_images
from neuclip.errors import RunFailed
from tests.data.small_shards import contents, image_bytes
from tests.data.small_tables import NUMBERS, fault_of, outcomes, refusal, write_images, write_parquet, write_table
from tests.images import photo


def test_bad_rows_of_a_parquet_file_are_bad_alone(tmp_path):
    images = [photo(0), None, b"", photo(3), photo(4)]
    captions = ["good", "x", "empty image", None, " "]
    write_table(tmp_path / "a.parquet", {"image": images, "caption": captions})
    assert outcomes(open_source(str(tmp_path / "a.parquet"))) == [
        "good", "no image", "empty image", "caption is missing", "caption is empty",
    ]  # fmt: skip


def test_row_groups_are_read_on_demand_and_forgotten(tmp_path, monkeypatch):
    path = write_parquet(tmp_path, groups=2)
    source = open_source(str(path))
    read = []
    whole = type(source).read_block
    monkeypatch.setattr(type(source), "read_block", lambda self, b, c: read.append(b.group) or whole(self, b, c))
    monkeypatch.setattr(type(source), "cache_bytes", 1)
    for id in (0, 1, 4, 0):
        assert source[id].image == photo(NUMBERS[id])
    assert read == [0, 2, 0] and len(source._tables) == 1


def test_a_forked_worker_reads_parquet_that_its_parent_has_open(tmp_path):
    source = open_source(str(write_parquet(tmp_path)))
    before = contents(source)
    context = multiprocessing.get_context("fork")
    with context.Pool(1) as pool:
        assert pool.apply(contents, (source,)) == before
    assert contents(source) == before


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install 'neuclip[parquet]'" in refusal(tmp_path / "a.parquet")


def test_arrow_files_beside_a_state_are_one_data_set(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="the extra neuclip[parquet] is not installed")
    for part in range(2):
        numbers = range(part * 3, part * 3 + 3)
        images = [{"bytes": photo(number), "path": None} for number in numbers]
        rows = pyarrow.table({"image": images, "caption": [f"photo {number}" for number in numbers]})
        with pyarrow.ipc.new_stream(str(tmp_path / f"{part}.arrow"), rows.schema) as stream:
            stream.write_table(rows)
    (tmp_path / "dataset_info.json").write_text("{}")
    state = {"_data_files": [{"filename": "0.arrow"}, {"filename": "1.arrow"}]}
    (tmp_path / "state.json").write_text(json.dumps(state))
    source = pickle.loads(pickle.dumps(open_source(str(tmp_path))))
    assert contents(source) == [(photo(number), (f"photo {number}",)) for number in range(6)]
    assert (source.kind, source.where(4)) == ("saved data set", f"{tmp_path / '1.arrow'} row 2")
    for text, message in (("{}", "names no data files"), ("[", "is not a JSON file")):
        (tmp_path / "state.json").write_text(text)
        assert message in refusal(tmp_path)


def test_a_saved_hugging_face_data_set_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets", reason="the library datasets is not installed")
    rows = {
        "image": [{"bytes": photo(number), "path": None} for number in range(5)],
        "caption": [["a", f"b {number}"] for number in range(5)],
    }
    whole = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
    datasets.DatasetDict(train=whole, test=whole.select([3, 1])).save_to_disk(str(tmp_path / "set"))
    assert str(tmp_path / "set" / "train") in refusal(tmp_path / "set")
    source = open_source(str(tmp_path / "set" / "test"))
    assert contents(source) == [(photo(number), ("a", f"b {number}")) for number in (3, 1)]
    assert contents(pickle.loads(pickle.dumps(source))) == contents(source)
    assert source.captions() == ["a", "a"]
    (tmp_path / "set" / "test" / "state.json").write_text('{"_data_files": [{"filename": "../train/x.arrow"}]}')
    assert "outside of its folder" in refusal(tmp_path / "set" / "test")


def test_messages_of_parquet_files_say_what_to_do(tmp_path):
    write_table(tmp_path / "number.parquet", {"image": [1], "caption": ["x"]})
    write_table(tmp_path / "words.parquet", {"url": ["a"], "words": ["x"]})
    whole = write_parquet(tmp_path / "whole")
    (tmp_path / "cut.parquet").write_bytes(whole.read_bytes()[:-20])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.parquet").write_bytes(whole.read_bytes())
    (tmp_path / "other" / "b.parquet").write_bytes((tmp_path / "words.parquet").read_bytes())
    assert "int64" in refusal(tmp_path / "number.parquet")
    assert "url, words" in refusal(tmp_path / "words.parquet")
    assert "fetch or write it again" in refusal(tmp_path / "cut.parquet")
    assert "b.parquet: has no column 'image'" in refusal(tmp_path / "other")


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
        assert fault_of(source, 2).reason == "no image"


def test_a_parquet_file_that_disappears_ends_the_run_and_is_not_bad_data(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"image": [image_bytes(0)], "caption": ["one"]}), tmp_path / "pairs.parquet")
    source = open_source(str(tmp_path / "pairs.parquet"))
    (tmp_path / "pairs.parquet").unlink()
    with pytest.raises(RunFailed, match=r"pairs\.parquet row group 0: has gone; .*--resume"):
        source[0]
