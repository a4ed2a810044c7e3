"""Facts of a model without its weights: sizes, parameters, activations, and a counter of tokens."""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from neuclip.models import open_clip_module
from neuclip.models.build import (
    LONG_WORD,
    construct,
    explain,
    image_shape,
    load_tokenizer,
    silence_open_clip,
    with_sizes,
)
from neuclip.models.config import LOCAL, find_model
from neuclip.models.hub import offline
from neuclip.models.modes import apply_modes
from neuclip.models.towers import Towers
from neuclip.models.weights import IMAGE, with_weights
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


def model_facts(name: str, settings: ModelSettings | None = None) -> ModelFacts:
    """Builds the model on the meta device, which has shapes and no numbers. `settings`: its sizes, and what trains.

    >>> model_facts("tiny").context_length
    16
    """
    settings = settings or ModelSettings(name=name)
    source = with_sizes(with_weights(find_model(name), ""), settings.image_size, settings.context_length)
    source = replace(source, weights={})  # none of a text tower are read either
    with silence_open_clip(), offline(source.config), torch.device("meta"):
        config, remedy = source.config, source.remedy
        if settings.image_size:
            remedy = f"give another --model.image_size than {settings.image_size}"
        model = construct(source, remedy)
        if settings.gradient_checkpointing:
            model.set_grad_checkpointing()
        height, width = image_shape(model)
        # A text tower of transformers says how many tokens it could take, the config how many it gets.
        context = int(config["text_cfg"].get("context_length") or getattr(model, "context_length", 77))
        with explain(f"model {source.name}: the model cannot be used", remedy):
            activation_bytes = _activation_bytes(model, height, width, context)
        batch_norm = any(isinstance(module, _BatchNorm) for module in model.modules())
        apply_modes(Towers(model), settings)
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
    cannot. Raises NotDownloaded where the tokenizer's files are not on this machine. `usual`: as in ModelFacts."""
    tokenizer = _usual_tokenizer_alone() if usual else None
    if tokenizer is None:
        source = with_weights(find_model(name), "")
        with silence_open_clip(), offline(source.config, download=source.download):
            tokenizer = load_tokenizer(source)
            tokenizer.clean_fn = tokenizer.clean_fn.args[0]  # without the limit: they are counted beyond the context
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


def pretrained_is_known(name: str, pretrained: str) -> bool:
    """Whether `pretrained` is on this machine, or a tag that open_clip has for this model."""
    return pretrained_is_here(pretrained) or bool(open_clip_module().get_pretrained_cfg(name, pretrained))


def pretrained_is_here(pretrained: str) -> bool:
    """Whether `pretrained` is a file, a saved model or a run."""
    path = Path(pretrained.removeprefix(LOCAL).removeprefix(IMAGE))
    return any(file.is_file() for file in (path, path / "open_clip_config.json", path / "settings.yaml"))
