"""CLIP training with normalizers over the whole data set: NeuCLIP and the methods it was compared with.

>>> from neuclip import NeuCLIP
>>> objective = NeuCLIP(embed_dim=512)
>>> loss = objective(image_features, text_features, logit_scale)  # doctest: +SKIP
>>> loss.backward()  # doctest: +SKIP

Features have shape (batch, embed_dim) and rows of length 1; `logit_scale` is 1 / temperature. PyTorch is imported only
when one of the names below is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from neuclip.errors import extras_for

if TYPE_CHECKING:
    from neuclip.api import evaluate, load, train
    from neuclip.objectives.amorlip import AmorLIP
    from neuclip.objectives.clip import CLIP
    from neuclip.objectives.drrho import DRRho
    from neuclip.objectives.fastclip import FastCLIP
    from neuclip.objectives.neuclip import NeuCLIP
    from neuclip.objectives.scent import SCENT
    from neuclip.objectives.siglip import SigLIP
    from neuclip.training.large_batch import LargeBatch

__version__ = "0.1.0"
__all__ = [
    "CLIP",
    "SCENT",
    "AmorLIP",
    "DRRho",
    "FastCLIP",
    "LargeBatch",
    "NeuCLIP",
    "SigLIP",
    "__version__",
    "evaluate",
    "load",
    "train",
]

HOMES = {
    "AmorLIP": "neuclip.objectives.amorlip",
    "CLIP": "neuclip.objectives.clip",
    "DRRho": "neuclip.objectives.drrho",
    "FastCLIP": "neuclip.objectives.fastclip",
    "LargeBatch": "neuclip.training.large_batch",
    "NeuCLIP": "neuclip.objectives.neuclip",
    "SCENT": "neuclip.objectives.scent",
    "SigLIP": "neuclip.objectives.siglip",
    "evaluate": "neuclip.api",
    "load": "neuclip.api",
    "train": "neuclip.api",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'neuclip' has no attribute {name!r}; it has {', '.join(__all__)}")
    with extras_for(f"neuclip.{name}"):
        value = getattr(import_module(HOMES[name]), name)
    globals()[name] = value  # later accesses find it without this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
