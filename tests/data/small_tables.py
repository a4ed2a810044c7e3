"""The same small pairs written in every kind of file, and how tests ask what became of them."""

from __future__ import annotations

import csv
import gzip
import io
import json
import tarfile
from pathlib import Path

import pytest

from neuclip.data.open import open_source
from neuclip.data.source import BadSample
from neuclip.errors import UserError
from tests.data.small_shards import image_bytes
from tests.images import photo

COUNT = 11


def caption(number: int) -> str:
    return f'photo {number}, with a comma; «été» "quoted"'


def name(number: int) -> str:
    return f"{'ab'[number % 2]}/{number:03d}.jpg"


NUMBERS = sorted(range(COUNT), key=name)  # ids follow names


def refusal(address: object, **columns: str) -> str:
    with pytest.raises(UserError) as caught:
        open_source(str(address), **columns)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def outcomes(source) -> list[str]:
    """Of each id its first caption, or the reason why it is bad."""
    results = []
    for id in range(len(source)):
        try:
            results.append(source[id].captions[0])
        except BadSample as bad:
            results.append(bad.reason)
    return results


def fault_of(source, id: int) -> BadSample:
    with pytest.raises(BadSample) as caught:
        source[id]
    return caught.value


def table(folder: Path, text: str | bytes, name: str = "pairs.csv") -> Path:
    """A table beside the images a.jpg and b.jpg."""
    for image in ("a.jpg", "b.jpg"):
        (folder / image).write_bytes(photo(0))
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder / name


def write_photos(folder: Path) -> None:
    for number in NUMBERS:
        (folder / name(number)).parent.mkdir(parents=True, exist_ok=True)
        (folder / name(number)).write_bytes(photo(number))


def write_tars(folder: Path, *, cuts: tuple[int, ...] = (COUNT,), packed: bool = False) -> Path:
    """Shards of the pairs up to each cut; equal cuts make an empty one."""
    folder.mkdir(parents=True)
    for shard, (first, last) in enumerate(zip((0, *cuts), cuts, strict=False)):
        plain = io.BytesIO()
        with tarfile.open(fileobj=plain, mode="w") as tar:
            for number in NUMBERS[first:last]:
                for member, content in (
                    (name(number), photo(number)),
                    (name(number).replace(".jpg", ".txt"), caption(number).encode()),
                ):
                    information = tarfile.TarInfo(member)
                    information.size = len(content)
                    tar.addfile(information, io.BytesIO(content))
        content = plain.getvalue()
        (folder / f"{shard}.tar{'.gz' if packed else ''}").write_bytes(gzip.compress(content) if packed else content)
    return folder


def write_csv(folder: Path, separator: str = ",", ending: str = "csv") -> Path:
    write_photos(folder)
    with (folder / f"pairs.{ending}").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=separator)
        writer.writerows([["path", "text"], *([name(number), caption(number)] for number in NUMBERS)])
    return folder / f"pairs.{ending}"


def write_jsonl(folder: Path) -> Path:
    write_photos(folder)
    rows = [json.dumps({"file_name": name(number), "caption": caption(number)}) for number in NUMBERS]
    (folder / "pairs.jsonl").write_text("\n".join(rows))
    return folder / "pairs.jsonl"


def write_folder(folder: Path) -> Path:
    write_photos(folder)
    for number in NUMBERS:
        (folder / name(number)).with_suffix(".txt").write_text(caption(number) + "\n", encoding="utf-8")
    (folder / ".hidden.jpg").write_bytes(b"x")
    return folder


def write_listed_folder(folder: Path) -> Path:
    write_csv(folder, "\t", "tsv").rename(folder / "captions.tsv")
    return folder


def write_table(path: Path, columns: dict[str, list], **options: int) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the extra neuclip[parquet] is not installed")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table(columns), path, **options)


def write_parquet(folder: Path, images: str = "bytes", groups: int = 4) -> Path:
    write_photos(folder)
    values: list[object] = [photo(number) for number in NUMBERS]
    if images == "paths":
        values = [name(number) for number in NUMBERS]
    elif images == "struct":
        values = [{"bytes": photo(number) if number % 2 else None, "path": name(number)} for number in NUMBERS]
    columns = {"image": values, "caption": [caption(number) for number in NUMBERS]}
    write_table(folder / "pairs.parquet", columns, row_group_size=groups)
    return folder / "pairs.parquet"


def write_parquet_folder(folder: Path) -> Path:
    (folder / "data").mkdir(parents=True)
    for part in range(3):
        numbers = NUMBERS[part * 4 : part * 4 + 4]
        columns = {"image": [photo(number) for number in numbers], "caption": [caption(number) for number in numbers]}
        write_table(folder / "data" / f"train-{part:05d}-of-00003.parquet", columns)
    return folder / "data"


KINDS = {
    "tar": write_tars,
    "tars, one of them empty": lambda folder: write_tars(folder, cuts=(4, 4, COUNT)),
    "tar.gz": lambda folder: write_tars(folder, packed=True),
    "csv": write_csv,
    "semicolons": lambda folder: write_csv(folder, ";"),
    "tsv": lambda folder: write_csv(folder, "\t", "tsv"),
    "jsonl": write_jsonl,
    "folder": write_folder,
    "folder with a captions file": write_listed_folder,
    "parquet with bytes": write_parquet,
    "parquet with paths": lambda folder: write_parquet(folder, "paths"),
    "parquet with structs": lambda folder: write_parquet(folder, "struct"),
    "folder of parquet": write_parquet_folder,
}


def write_images(folder: Path, count: int, **partners: bytes) -> Path:
    """0.png and so on, each with files of these endings beside it; `{}` in one becomes the number."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (folder / f"{number}.png").write_bytes(image_bytes(number))
        for ending, content in partners.items():
            name = f"{number}.{ending.replace('_', '.')}"
            (folder / name).write_bytes(content.replace(b"{}", str(number).encode()))
    return folder
