"""A model as Hugging Face's `CLIPModel`: the same network under other names, with its tokenizer and preprocessing."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neuclip.errors import UserError
from neuclip.models import open_clip_module
from neuclip.models.towers import BuiltModel

# Fields of open_clip's configs that CLIPModel has too, or that change nothing outside training. Any other field must
# have its default: this is the list of what CLIPModel can compute.
SHARED = {"layers", "width", "head_width", "heads", "mlp_ratio", "patch_size", "image_size", "context_length"}
SHARED |= {"vocab_size", "patch_dropout"}
TOWERS_FROM_ELSEWHERE = (
    ("vision_cfg", "timm_model_name", "the image tower is timm's"),
    ("text_cfg", "hf_model_name", "the text tower is transformers'"),
    ("text_cfg", "hf_tokenizer_name", "the tokenizer is transformers'"),
)
ACTIVATIONS = {True: "quick_gelu", False: "gelu"}  # by quick_gelu
RESAMPLING = {"bilinear": 2, "bicubic": 3}  # Pillow's numbers
START, END = "<|startoftext|>", "<|endoftext|>"  # what transformers calls <start_of_text> and <end_of_text>

# Inside a block: open_clip's names and transformers'. The packed in_proj is cut into three.
BLOCK = {
    "ln_1": "layer_norm1",
    "attn.out_proj": "self_attn.out_proj",
    "ln_2": "layer_norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
OUTSIDE = {
    "logit_scale": "logit_scale",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
    "text_projection": "text_projection.weight",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",  # their spelling
    "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "visual.ln_post.weight": "vision_model.post_layernorm.weight",
    "visual.ln_post.bias": "vision_model.post_layernorm.bias",
    "visual.proj": "visual_projection.weight",
}
TRANSPOSED = ("text_projection", "visual.proj")  # multiplied from the right here, Linear layers there


def obstacles(built: BuiltModel) -> Iterator[str]:
    """What of this model CLIPModel cannot compute, one phrase each."""
    open_clip, config = open_clip_module(), built.config
    if isinstance(config["vision_cfg"].get("layers"), list | tuple):
        yield "the image tower is a ResNet"
        return
    for section, key, what in TOWERS_FROM_ELSEWHERE:
        if name := config[section].get(key):
            yield f"{what} {name}"
    if built.towers.logit_bias is not None:
        yield "it has the logit bias of SigLIP"
    if config.get("multimodal_cfg"):
        yield "it has a caption decoder (CoCa)"
    for section, kind in (("vision_cfg", open_clip.CLIPVisionCfg), ("text_cfg", open_clip.CLIPTextCfg)):
        for field in dataclasses.fields(kind):
            value = config[section].get(field.name, field.default)
            if value != field.default and field.name not in SHARED and not field.name.startswith(("timm_", "hf_")):
                yield f"{section}.{field.name} is {value}"
    preprocessing = preprocessing_of(built)
    if preprocessing["resize_mode"] not in ("shortest", "squash") or preprocessing["interpolation"] not in RESAMPLING:
        yield f"its images are resized by {preprocessing['resize_mode']} side, {preprocessing['interpolation']}"
    if len(set(preprocessing["size"])) > 1:
        yield "its images are not square"


def preprocessing_of(built: BuiltModel) -> dict[str, Any]:
    """open_clip's preprocess_cfg, with height and width as `size`."""
    config = dict(built.towers.model.visual.preprocess_cfg)
    size = config["size"]
    return config | {"size": [size, size] if isinstance(size, int) else list(size)}


def convert_weights(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """open_clip's state dict under the names of CLIPModel's."""
    converted: dict[str, Tensor] = {}
    for name, tensor in state.items():
        name = name.removeprefix("text.")  # where open_clip keeps the text tower apart (custom_text)
        if name in OUTSIDE:
            converted[OUTSIDE[name]] = tensor.T if name in TRANSPOSED else tensor
            continue
        tower, _, inside = name.partition("transformer.resblocks.")
        block, _, part = inside.partition(".")
        layer = f"{'vision_model' if tower else 'text_model'}.encoder.layers.{block}"
        module, _, kind = part.rpartition(".")
        if part.startswith("attn.in_proj_"):
            pieces = zip("qkv", tensor.chunk(3), strict=True)
            converted |= {f"{layer}.self_attn.{x}_proj.{part.removeprefix('attn.in_proj_')}": t for x, t in pieces}
        else:
            converted[f"{layer}.{BLOCK[module]}.{kind}"] = tensor
    return {name: tensor.detach().cpu().float().contiguous() for name, tensor in converted.items()}


def write_transformers(built: BuiltModel, folder: Path) -> None:
    """config.json, model.safetensors, the tokenizer and the image processor: what `from_pretrained(folder)` reads."""
    if reasons := list(obstacles(built)):
        raise UserError(
            f"this model is no CLIPModel of transformers: {', '.join(reasons)}; give --to onnx or --to open_clip"
        )
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor

    tokenizer = hugging_face_tokenizer(built)
    model = CLIPModel(CLIPConfig(**_config(built, tokenizer)))
    model.load_state_dict(convert_weights(built.towers.model.state_dict()))
    with without_bars():
        model.save_pretrained(folder)
    for file in folder.glob("*.safetensors"):
        file.chmod((folder / "config.json").stat().st_mode)  # safetensors makes it 0600
    preprocessing = preprocessing_of(built)
    height, width = preprocessing["size"]
    squash = preprocessing["resize_mode"] == "squash"
    processor = CLIPImageProcessor(
        size={"height": height, "width": width} if squash else {"shortest_edge": height},
        crop_size={"height": height, "width": width},
        do_center_crop=not squash,
        resample=RESAMPLING[preprocessing["interpolation"]],
        image_mean=list(preprocessing["mean"]),
        image_std=list(preprocessing["std"]),
    )
    CLIPProcessor(image_processor=processor, tokenizer=tokenizer).save_pretrained(folder)


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """transformers draws a bar for each file."""
    from transformers.utils import logging

    drawn = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if drawn:
            logging.enable_progress_bar()


def _config(built: BuiltModel, tokenizer: Any) -> dict[str, Any]:
    vision, text, width = built.config["vision_cfg"], built.config["text_cfg"], built.embed_dim
    open_clip = open_clip_module()
    image, words = open_clip.CLIPVisionCfg(**vision), open_clip.CLIPTextCfg(**text)
    activation = ACTIVATIONS[bool(built.config.get("quick_gelu"))]
    return {
        "projection_dim": width,
        "logit_scale_init_value": float(built.towers.model.logit_scale.detach()),
        "vision_config": {
            "hidden_size": image.width,
            "intermediate_size": int(image.width * image.mlp_ratio),
            "num_hidden_layers": image.layers,
            "num_attention_heads": image.width // image.head_width,
            "image_size": built.image_size,
            "patch_size": image.patch_size,
            "hidden_act": activation,
            "projection_dim": width,
        },
        "text_config": {
            "hidden_size": words.width,
            "intermediate_size": int(words.width * words.mlp_ratio),
            "num_hidden_layers": words.layers,
            "num_attention_heads": words.heads,
            "max_position_embeddings": words.context_length,
            "vocab_size": words.vocab_size,
            "hidden_act": activation,
            "projection_dim": width,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
    }


def hugging_face_tokenizer(built: BuiltModel) -> Any:
    """The model's tokenizer as one of transformers. Byte-pair encoding is open_clip's own; others are wrapped ones.

    Equal tokens for ordinary text. open_clip also repairs wrongly decoded letters and HTML entities, which nothing in
    transformers does; and it pads with 0, a token that causal attention never lets the end of the text see.
    """
    inner: Any = built.tokenize
    if not hasattr(inner, "bpe_ranks"):
        return inner.tokenizer
    from transformers import CLIPTokenizer

    names = {"<start_of_text>": START, "<end_of_text>": END}
    vocabulary = {names.get(token, token): number for token, number in inner.encoder.items()}
    return CLIPTokenizer(vocab=vocabulary, merges=list(inner.bpe_ranks), model_max_length=inner.context_length)


@torch.no_grad()
def encode_with_transformers(folder: Path, images: Tensor, texts: list[str]) -> tuple[Tensor, Tensor]:
    """Unit features (b, d) of normalized images (b, 3, H, W) and of texts, by the folder's model and tokenizer."""
    from transformers import CLIPModel, CLIPProcessor

    with without_bars():
        model = CLIPModel.from_pretrained(folder).eval()
    tokens = CLIPProcessor.from_pretrained(folder).tokenizer(
        texts, padding="max_length", truncation=True, return_tensors="pt"
    )
    found = model(pixel_values=images, **tokens)
    return found.image_embeds, found.text_embeds
