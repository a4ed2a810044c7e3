"""Facts of a model without its weights: sizes, parameters, activations, and a counter of tokens."""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from neuclip.models import open_clip_module
from neuclip.models.config import find_config, text_tower_of_folder
from neuclip.models.failures import explain_failures
from neuclip.models.hub import offline_hub
from neuclip.models.tokenizer import LONG_WORD
from neuclip.models.tower_modes import apply_modes
from neuclip.models.towers import Towers, image_shape, silence_open_clip
from neuclip.settings.sections import ModelSettings

COUNTED = 20_000  # characters of a caption whose tokens are counted
PROBE = 2  # pairs sent through the empty model; BatchNorm does not take one


@dataclass(frozen=True)
class ModelFacts:
    """Of a model as open_clip would build it; no memory was allocated to find them."""

    embed_dim: int
    image_size: tuple[int, int]  # height, width
    context_length: int
    parameters: int
    state_bytes: int  # parameters and buffers, as a checkpoint holds them
    activation_bytes: int  # float32, per pair: what backward needs
    usual_tokenizer: bool = False  # open_clip's own, unchanged
    batch_norm: bool = False  # which cannot train on one image at a time
    locked: int = 0  # of the parameters, those that do not train


def model_facts(
    name: str, *, image_size: int = 0, gradient_checkpointing: bool = False, modes: ModelSettings | None = None
) -> ModelFacts:
    """Builds the model on the meta device, which has shapes and no numbers. `modes`: what of each tower trains.

    >>> model_facts("tiny").context_length
    16
    """
    known_name, config = find_config(name)
    with silence_open_clip(), explain_failures(name, image_size=image_size), offline_hub(name, config):
        model = open_clip_module().create_model(
            known_name,
            load_weights=False,
            pretrained_text=False,
            device="meta",
            force_image_size=image_size or None,
            output_dict=False,
            **text_tower_of_folder(name, config),
        )
        if gradient_checkpointing:
            model.set_grad_checkpointing()
        height, width = image_shape(model)
        # A text tower of transformers says how many tokens it could take, the config how many it gets.
        context = int(config["text_cfg"].get("context_length") or getattr(model, "context_length", 77))
        activation_bytes = _activation_bytes(model, height, width, context)
        batch_norm = any(isinstance(module, _BatchNorm) for module in model.modules())
        if modes:
            apply_modes(Towers(model), modes)
    return ModelFacts(
        embed_dim=config["embed_dim"],
        image_size=(height, width),
        context_length=context,
        parameters=sum(p.numel() for p in model.parameters()),
        state_bytes=sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values()),
        activation_bytes=activation_bytes,
        usual_tokenizer=not ({"hf_tokenizer_name", "tokenizer_kwargs"} & config["text_cfg"].keys()),
        batch_norm=batch_norm,
        locked=sum(p.numel() for p in model.parameters() if not p.requires_grad),
    )


def token_counter(name: str, *, usual: bool = False) -> Callable[[Sequence[str]], list[int]] | None:
    """Counts the tokens of captions before they are truncated, start and end included; None for a tokenizer that
    cannot. Raises NotHere where the tokenizer's files are not on this machine. `usual`: as in ModelFacts."""
    tokenizer = _usual_tokenizer_alone() if usual else None
    if tokenizer is None:
        known_name, config = find_config(name)
        with silence_open_clip(), explain_failures(name), offline_hub(name, config):
            tokenizer = open_clip_module().get_tokenizer(known_name)
    if hasattr(tokenizer, "sot_token_id") and hasattr(tokenizer, "encode"):
        return lambda captions: [len(tokenizer.encode(countable(caption))) + 2 for caption in captions]
    inner = getattr(tokenizer, "tokenizer", None)
    if inner is None:
        return None
    return lambda captions: [len(tokens) for tokens in inner([countable(one) for one in captions])["input_ids"]]


def countable(caption: str) -> str:
    """The caption without what would take a tokenizer minutes: its first characters, and words of usual length."""
    return re.sub(rf"(\S{{{LONG_WORD}}})", r"\1 ", caption[:COUNTED])


@functools.cache
def _usual_tokenizer_alone() -> Any:
    """open_clip's tokenizer without the rest of open_clip, whose import takes seconds; None if that fails."""
    package = importlib.util.find_spec("open_clip")
    if package is None or package.origin is None:
        return None
    spec = importlib.util.spec_from_file_location("open_clip_tokenizer", Path(package.origin).with_name("tokenizer.py"))
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        return module.SimpleTokenizer()
    except (ImportError, AttributeError, OSError):  # another version's file
        return None


def _activation_bytes(model: Any, height: int, width: int, context: int) -> int:
    """Bytes that autograd keeps of one pair's forward pass, without parameters."""
    own = {tensor.untyped_storage()._cdata for tensor in [*model.parameters(), *model.buffers()]}
    kept: dict[int, Any] = {}  # by storage: what two operations keep counts once; held, or its number would be reused

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, nn.Identity()):
        model.encode_image(torch.empty(PROBE, 3, height, width, device="meta"), normalize=True)
        _encode_text(model, torch.zeros(PROBE, context, dtype=torch.long, device="meta"))
    return sum(storage.nbytes() for storage in kept.values()) // PROBE


def _encode_text(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    text: Any = getattr(model, "text", None)
    if not hasattr(text, "pooler"):
        return model.encode_text(tokens, normalize=True)
    # transformers looks at the values of an attention mask, which the meta device does not have.
    return text.proj(text.pooler(text.transformer(input_ids=tokens), torch.ones_like(tokens)))
