"""Build a model, any of open_clip's: its towers, their transforms and their tokenizer."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from neuclip.errors import UserError
from neuclip.files import read_json
from neuclip.models import open_clip_module
from neuclip.models.config import ModelSource, find_model
from neuclip.models.hub import explain_transformers, first_line, offline
from neuclip.models.towers import Tokenize, Towers
from neuclip.models.transforms import Transform, make_transforms, without_normalization
from neuclip.models.weights import load_weights, with_weights

LONG_WORD = 256  # characters; no ordinary word is that long
RAW_SHARE = 20  # raw characters per cleaned one, a generous bound: cleaning joins blanks and decodes &eacute;
# One of these files holds the vocabulary. Without any, transformers makes a tokenizer with an empty vocabulary.
VOCABULARIES = (
    *("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model"),
    *("sentencepiece.bpe.model", "tekken.json"),
)


@dataclass(frozen=True)
class BuiltModel:
    """Towers, their transforms and their tokenizer."""

    towers: Towers
    train_transform: Transform  # gives bytes, which the towers normalize
    transform: Transform  # the same for evaluation: deterministic
    float_transform: Transform  # open_clip's own transform for evaluation, for use with the bare model
    tokenize: Tokenize
    embed_dim: int
    image_size: int
    config: dict[str, Any]  # open_clip's model_cfg, complete
    has_trained_weights: bool = False  # then its temperature, and its bias if it has one, are trained, too

    @property
    def saved_config(self) -> dict[str, Any]:
        """The content of open_clip_config.json. open_clip loads it with the weights and the tokenizer's files."""
        preprocess = self.towers.model.visual.preprocess_cfg
        kept = {key: preprocess[key] for key in preprocess if key not in ("size", "mode")}  # the model decides these
        return {"model_cfg": self.config, "preprocess_cfg": kept}


def build_model(
    model: str | ModelSource,
    *,
    pretrained: str = "",
    image_size: int = 0,
    context_length: int = 0,
    crop_scale: tuple[float, float] = (0.9, 1.0),
    initial_bias: float | None = None,
) -> BuiltModel:
    """Build `tiny`, `small`, `lite0-minilm`, any open_clip name, `local-dir:FOLDER`, `hf-hub:NAME`, the path of a model
    config, or the model of a ModelSource.

    The weights are random unless the model comes with weights or `pretrained` names some: a tag, a file, the folder of
    a saved model, or image=FILE with the weights of a timm image tower. `initial_bias`: the model has SigLIP's logit
    bias, which starts at this value unless the weights contain one.

    >>> build_model("tiny").embed_dim
    128
    """
    source = with_weights(find_model(model) if isinstance(model, str) else model, pretrained)
    source = with_sizes(source, image_size, context_length, initial_bias)
    sizes = {"image_size": image_size, "context_length": context_length}
    others = " or ".join(f"--model.{field} than {size}" for field, size in sizes.items() if size)
    remedy = f"give another {others}" if others else source.remedy
    with quiet_open_clip(), offline(source.config, download=source.download):
        tokenize = load_tokenizer(source)  # first, because it may be missing and large towers take long to build
        network = construct(source, remedy)
        load_weights(network, source)
        if image_size and hasattr(network.visual, "set_input_size"):  # a timm tower
            network.visual.set_input_size(image_size)
        with explain(source, "the model cannot be used", remedy):
            train_transform, transform = make_transforms(network, source.preprocess, crop_scale)
            encode_once(network, tokenize)
    if initial_bias is not None and not network.logit_bias.any():
        # If the weights have no bias, open_clip sets it to 0: SigLIP would then call half of all pairs matching.
        nn.init.constant_(network.logit_bias, initial_bias)
    return BuiltModel(
        towers=Towers(network, **{key: tuple(network.visual.preprocess_cfg[key]) for key in ("mean", "std")}),
        train_transform=without_normalization(train_transform),
        transform=without_normalization(transform),
        float_transform=transform,
        tokenize=tokenize,
        embed_dim=source.config["embed_dim"],
        image_size=max(image_shape(network)),
        config=source.config,
        has_trained_weights=source.weights is not None,
    )


def with_sizes(source: ModelSource, image_size: int, context_length: int, bias: float | None = None) -> ModelSource:
    """The source with another image size, context length (0: unchanged) and initial bias (None: unchanged)."""
    config = copy.deepcopy(source.config)
    if image_size:
        config["vision_cfg"]["image_size"] = image_size
    if context_length:
        config["text_cfg"]["context_length"] = context_length
    if bias is not None:
        config["init_logit_bias"] = bias  # the exported config needs it too, or its weights would not load
    return replace(source, config=config)


def construct(source: ModelSource, remedy: str) -> Any:
    """open_clip's model with random weights. Only a text tower of transformers reads its weights, from its folder."""
    open_clip, config = open_clip_module(), copy.deepcopy(source.config)
    text, vision, custom_text = config["text_cfg"], config["vision_cfg"], config.pop("custom_text", False)
    if "hf_model_name" in text:
        custom_text = True
        text["hf_model_pretrained"] = source.weights is None  # the weights of a saved model contain these
        if source.folder and (source.folder / "config.json").is_file():
            text["hf_model_name"] = str(source.folder)
    if "timm_model_name" in vision:
        vision["timm_model_pretrained"] = False
    kind = open_clip.CLIP
    if custom_text:
        kind = open_clip.CoCa if "multimodal_cfg" in config else open_clip.CustomTextCLIP
    with explain(source, "the model cannot be built", remedy, "hf_model_name", text.get("hf_model_name") or ""):
        return kind(**config)


def load_tokenizer(source: ModelSource) -> Any:
    """open_clip's tokenizer of a model. It cuts very long captions first; tokens of ordinary captions are the same."""
    open_clip, text = open_clip_module(), source.config["text_cfg"]
    context, arguments = text.get("context_length", 77), text.get("tokenizer_kwargs") or {}
    location = _tokenizer_location(source)
    with explain(source, "the tokenizer cannot be made", source.remedy, "hf_tokenizer_name", location):
        if not location:
            tokenizer = open_clip.SimpleTokenizer(context_length=context, **arguments)
            longest = max(len(token.removesuffix("</w>")) for token in tokenizer.encoder)
        else:
            mode = text.get("tokenizer_mode")
            tokenizer = open_clip.tokenizer.HFTokenizer(
                location, context_length=context, tokenizer_mode=mode, **arguments
            )
            # At least LONG_WORD: WordPiece turns any unknown word into one token. Compiled tokenizers are fast enough.
            longest = max(LONG_WORD, *map(len, tokenizer.tokenizer.get_vocab()))
    tokenizer.clean_fn = partial(clean_to_limit, tokenizer.clean_fn, context * (longest + 1))
    return tokenizer


def _tokenizer_location(source: ModelSource) -> str:
    """Where transformers finds the tokenizer: a folder, or a name on the hub. Empty for open_clip's own tokenizer."""
    name = source.config["text_cfg"].get("hf_tokenizer_name")
    if not name:
        return ""
    for folder in filter(None, (source.folder, Path(name))):
        if any((folder / file).is_file() for file in VOCABULARIES):
            return str(folder)
        if folder.is_dir() and not source.download:
            raise UserError(
                f"{folder} has no files of the tokenizer {name} ({VOCABULARIES[0]}), which the model's config names; "
                "copy them into it, or save the model again"
            )
    return name


def clean_to_limit(clean: Any, limit: int, caption: str) -> str:
    """A cleaned caption, cut where its tokens no longer fit into the context: after `limit` characters, and LONG_WORD
    more to complete an ordinary word. Without this limit, byte-pair encoding of a single word takes quadratic time: 39
    seconds for 20,000 letters."""
    return clean(caption[: RAW_SHARE * limit])[: limit + LONG_WORD]


def image_shape(model: Any) -> tuple[int, int]:
    """Height and width of a model's images."""
    size = model.visual.image_size
    return (size, size) if isinstance(size, int) else tuple(size)


@torch.no_grad()
def encode_once(model: Any, tokenize: Tokenize) -> None:
    """Encode one image and one text, to find an image size or a vocabulary that does not fit before training. In eval
    mode this changes no statistics and draws no random number."""
    model.eval()
    image = model.encode_image(torch.zeros(1, 3, *image_shape(model)))
    text = model.encode_text(tokenize(["a"]))
    model.train()
    if image.shape != text.shape:
        raise ValueError(f"images have {image.shape[-1]} features and texts {text.shape[-1]}")


@contextlib.contextmanager
def explain(source: ModelSource, what: str, remedy: str, field: str = "", location: str = "") -> Iterator[None]:
    """Turns any exception inside into a UserError. Only for calls into open_clip, timm and transformers, which raise
    many kinds about the model that the user named. `location`: the folder or hub name in `field` of the config."""
    try:
        yield
    except Exception as error:
        # transformers rarely says which file is damaged: reading them finds it.
        for file in sorted(Path(location).glob("*.json")) if location else ():
            read_json(file, source.remedy)
        raise explain_transformers(error, source.name, field, location) or UserError(
            f"model {source.name}: {what} ({first_line(error)}); {remedy}"
        ) from error


@contextlib.contextmanager
def quiet_open_clip() -> Iterator[None]:
    """Inside, open_clip logs nothing. It warns of random weights, even if they are wanted, and logs errors that it also
    raises."""
    previous = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(previous)
