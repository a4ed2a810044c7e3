"""The images of a folder as they lie there now: what an index is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from neuclip.data.decoding import NOT_DECODED_REASON, decode
from neuclip.data.source import BadSample, Fault
from neuclip.data.tables.folder import list_images
from neuclip.data.tables.listed import read_image_file
from neuclip.errors import UserError


class ImageFile(NamedTuple):
    """Two files that are equal in all three are taken to hold the same image."""

    path: str  # from the folder
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class SearchedFolder:
    """`files[id]` is an image; ids are places in the sorted list, and hold as long as this object does."""

    path: Path
    files: tuple[ImageFile, ...]
    not_read: tuple[Fault, ...] = ()  # images of kinds that are not decoded

    @classmethod
    def open(cls, path: Path) -> SearchedFolder:
        images, _, others = list_images(path)
        if not images:
            raise UserError(f"{path}: no images in it or below; give a folder of JPEG, PNG, WebP or similar files")
        files = []
        for image in images:
            try:
                status = (path / image).stat()
            except OSError:  # a link to nowhere, or removed just now: reading it will say so
                files.append(ImageFile(image, -1, -1))
            else:
                files.append(ImageFile(image, status.st_size, status.st_mtime_ns))
        not_read = tuple(Fault(-1, NOT_DECODED_REASON, str(path / name)) for name in others)
        return cls(path, tuple(files), not_read)

    def read(self, id: int) -> Any:
        """The decoded image. Raises BadSample."""
        path = self.path / self.files[id].path
        return decode(read_image_file(path, str(path)), str(path))

    def pixels(self, id: int, transform: Callable[[Any], Tensor]) -> Tensor:  # -> (3, H, W)
        """What a model takes. Raises BadSample."""
        image = self.read(id)
        try:
            return transform(image)
        except (ValueError, OSError, ZeroDivisionError) as error:  # an image one pixel wide, for example
            raise BadSample("image cannot be transformed", f"{self.path / self.files[id].path} ({error})") from error
