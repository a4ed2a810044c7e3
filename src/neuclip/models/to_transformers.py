"""Write a model as Hugging Face's `CLIPModel`: the same network under other names, its tokenizer and preprocessing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neuclip.errors import UserError
from neuclip.models import open_clip_module
from neuclip.models.build import BuiltModel
from neuclip.models.hub import first_line

RESAMPLING = {"bilinear": 2, "bicubic": 3}  # Pillow's numbers
SPECIAL = {"<start_of_text>": "<|startoftext|>", "<end_of_text>": "<|endoftext|>"}  # from open_clip to transformers
# Names of tensors in open_clip and in transformers; applied in this order.
RENAMES = (
    (r"^text\.", ""),  # models with custom_text have the text tower in a module of its own
    (r"^(visual\.)?transformer\.resblocks\.", r"\1encoder.layers."),
    (r"\.ln_(\d)\.", r".layer_norm\1."),
    (r"\.attn\.out_proj\.", ".self_attn.out_proj."),
    (r"\.mlp\.c_fc\.", ".mlp.fc1."),
    (r"\.mlp\.c_proj\.", ".mlp.fc2."),
    (r"^visual\.proj$", "visual_projection.weight"),
    (r"^text_projection$", "text_projection.weight"),
    (r"^visual\.class_embedding$", "vision_model.embeddings.class_embedding"),
    (r"^visual\.conv1\.", "vision_model.embeddings.patch_embedding."),
    (r"^visual\.positional_embedding$", "vision_model.embeddings.position_embedding.weight"),
    (r"^visual\.ln_pre\.", "vision_model.pre_layrnorm."),  # their spelling
    (r"^visual\.ln_post\.", "vision_model.post_layernorm."),
    (r"^visual\.encoder\.", "vision_model.encoder."),
    (r"^token_embedding\.", "text_model.embeddings.token_embedding."),
    (r"^positional_embedding$", "text_model.embeddings.position_embedding.weight"),
    (r"^ln_final\.", "text_model.final_layer_norm."),
    (r"^encoder\.", "text_model.encoder."),
)


def convert_weights(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """open_clip's state dict with the names of CLIPModel. The packed in_proj is split into three."""
    converted: dict[str, Tensor] = {}
    for name, tensor in state.items():
        for pattern, replacement in RENAMES:
            name = re.sub(pattern, replacement, name)
        if packed := re.fullmatch(r"(.+)\.attn\.in_proj_(weight|bias)", name):
            layer, kind = packed.groups()
            pieces = zip("qkv", tensor.chunk(3), strict=True)
            converted |= {f"{layer}.self_attn.{letter}_proj.{kind}": piece for letter, piece in pieces}
        else:  # projections are matrices (width, d) in open_clip and Linear layers in transformers
            converted[name] = tensor.T if name.endswith("_projection.weight") else tensor
    return {name: tensor.detach().cpu().float().contiguous() for name, tensor in converted.items()}


def write_transformers(built: BuiltModel, folder: Path) -> None:
    """Write what `from_pretrained(folder)` reads: config.json, model.safetensors, tokenizer and image processor."""
    from transformers import CLIPConfig, CLIPModel, CLIPProcessor
    from transformers.utils import logging as transformers_logging

    refuse_other_towers(built)
    tokenizer = hugging_face_tokenizer(built.tokenize)
    try:
        model = CLIPModel(CLIPConfig(**_config(built, tokenizer)))
        model.load_state_dict(convert_weights(built.towers.model.state_dict()))
    except Exception as error:  # CLIPModel lacks a field, name or shape; `write_format` finds all other differences
        raise _refusal(first_line(error)) from error
    transformers_logging.disable_progress_bar()  # there would be one for each file
    model.save_pretrained(folder)
    for file in folder.glob("*.safetensors"):
        file.chmod((folder / "config.json").stat().st_mode)  # safetensors writes it with the mode 0600
    processor = _image_processor(built.towers.model.visual.preprocess_cfg, built.image_size)
    CLIPProcessor(image_processor=processor, tokenizer=tokenizer).save_pretrained(folder)


def refuse_other_towers(built: BuiltModel) -> None:
    """Refuse models that CLIPModel cannot represent, with the reason in terms of their settings."""
    vision, text, preprocess = (
        built.config["vision_cfg"],
        built.config["text_cfg"],
        built.saved_config["preprocess_cfg"],
    )
    reasons = {
        "the image tower is a ResNet": isinstance(vision.get("layers"), list | tuple),
        f"the image tower is timm's {vision.get('timm_model_name')}": vision.get("timm_model_name"),
        f"the text tower is transformers' {text.get('hf_model_name')}": text.get("hf_model_name"),
        "the tokenizer is not CLIP's": text.get("hf_tokenizer_name"),
        "it has the logit bias of SigLIP": built.towers.logit_bias is not None,
        f"its images are resized by {preprocess['resize_mode']} side, {preprocess['interpolation']}": (
            preprocess["resize_mode"] == "longest" or preprocess["interpolation"] not in RESAMPLING
        ),
    }
    if reasons_that_hold := [reason for reason, holds in reasons.items() if holds]:
        raise _refusal(", ".join(reasons_that_hold))


def _refusal(reason: str) -> UserError:
    return UserError(f"transformers' CLIPModel cannot represent this model: {reason}; give --to onnx or --to open_clip")


def _image_processor(preprocess: dict[str, Any], side: int) -> Any:
    from transformers import CLIPImageProcessor

    squash = preprocess["resize_mode"] == "squash"
    return CLIPImageProcessor(
        size={"height": side, "width": side} if squash else {"shortest_edge": side},
        crop_size={"height": side, "width": side},
        do_center_crop=not squash,
        resample=RESAMPLING[preprocess["interpolation"]],
        image_mean=list(preprocess["mean"]),
        image_std=list(preprocess["std"]),
    )


def _config(built: BuiltModel, tokenizer: Any) -> dict[str, Any]:
    open_clip, config = open_clip_module(), built.config
    image, text = open_clip.CLIPVisionCfg(**config["vision_cfg"]), open_clip.CLIPTextCfg(**config["text_cfg"])
    activation = "quick_gelu" if config.get("quick_gelu") else "gelu"

    def tower(width: int, mlp_ratio: float, layers: int, heads: int) -> dict[str, Any]:
        sizes = {"hidden_size": width, "intermediate_size": int(width * mlp_ratio), "num_hidden_layers": layers}
        return sizes | {"num_attention_heads": heads, "hidden_act": activation, "projection_dim": built.embed_dim}

    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    words = {"max_position_embeddings": text.context_length, "vocab_size": text.vocab_size}
    pixels = {"image_size": built.image_size, "patch_size": image.patch_size}
    return {
        "projection_dim": built.embed_dim,
        "logit_scale_init_value": float(built.towers.model.logit_scale.detach()),
        "vision_config": tower(image.width, image.mlp_ratio, image.layers, image.width // image.head_width) | pixels,
        "text_config": tower(text.width, text.mlp_ratio, text.layers, text.heads) | words | special,
    }


def hugging_face_tokenizer(tokenize: Any) -> Any:
    """A model's tokenizer as one of transformers. open_clip has its own byte-pair encoding; its other tokenizers are
    wrappers around transformers.

    Ordinary text gets equal tokens. Two differences remain: only open_clip repairs wrongly decoded letters and HTML
    entities; and it pads with 0, which does not matter, because causal attention hides the padding from the end token.
    """
    if not hasattr(tokenize, "bpe_ranks"):
        return tokenize.tokenizer
    from transformers import CLIPTokenizer

    vocabulary = {SPECIAL.get(token, token): number for token, number in tokenize.encoder.items()}
    return CLIPTokenizer(vocab=vocabulary, merges=list(tokenize.bpe_ranks), model_max_length=tokenize.context_length)


@torch.no_grad()
def encode_with_transformers(folder: Path, images: Tensor, texts: list[str]) -> tuple[Tensor, Tensor]:
    """Unit features (b, d) of normalized images (b, 3, H, W) and of texts, by the folder's model and tokenizer."""
    from transformers import CLIPModel, CLIPProcessor

    model = CLIPModel.from_pretrained(folder).eval()
    tokens = CLIPProcessor.from_pretrained(folder).tokenizer(
        texts, padding="max_length", truncation=True, return_tensors="pt"
    )
    output = model(pixel_values=images, **tokens)
    return output.image_embeds, output.text_embeds
