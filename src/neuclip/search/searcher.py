"""One model over one folder: text or image in, the nearest images out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from neuclip.data.source import BadSample
from neuclip.errors import UserError
from neuclip.models.build import BuiltModel
from neuclip.search.folder import SearchedFolder
from neuclip.search.index import Index, open_index


class Match(NamedTuple):
    """An image of the folder and the cosine between its features and the query's."""

    id: int
    path: str  # from the folder
    score: float


@dataclass(frozen=True)
class Searcher:
    """>>> Searcher.open("first", built, folder).by_text("a dog", top=10)[0].path          # doctest: +SKIP"""

    name: str
    built: BuiltModel
    folder: SearchedFolder
    index: Index

    @classmethod
    def open(cls, name: str, built: BuiltModel, folder: SearchedFolder) -> Searcher:
        return cls(name, built, folder, open_index(built, folder, name))

    @torch.no_grad()
    def by_text(self, text: str, top: int) -> list[Match]:
        if not text.strip():
            raise UserError("the query is empty; give some words, or an image")
        tokens = self.built.tokenize([text]).to(self.built.towers.device)
        return self._best(self.built.towers.encode_text(tokens), top)

    @torch.no_grad()
    def by_image(self, image: Any, top: int) -> list[Match]:
        """`image`: as `decode` gives it."""
        try:
            pixels = self.built.transform(image)[None].to(self.built.towers.device)
        except (ValueError, OSError, ZeroDivisionError) as error:
            raise BadSample("image cannot be transformed", str(error)) from error
        return self._best(self.built.towers.encode_image(pixels), top)

    def _best(self, features: Tensor, top: int) -> list[Match]:  # (1, d)
        scores = self.index.scores(features[0].float().cpu().numpy())
        # A stable sort of the negative: equal scores come in order of their paths.
        best = np.argsort(-scores, kind="stable")[:top]
        return [Match(int(id), self.folder.files[id].path, float(scores[id])) for id in best if scores[id] > -np.inf]
