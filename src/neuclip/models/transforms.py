"""open_clip's transforms, split before ToTensor: workers send pixels as bytes, which are normalized as a batch.

The last two stages of open_clip's transforms turn one image into floats and normalize it. `normalize_batch` does this
for a whole batch on the device: the floats are the same to the bit, with a quarter of the memory traffic and, at 64
pixels, in less than half of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL.Image import Image
from torch import Tensor

from neuclip.errors import UserError
from neuclip.models import open_clip_module

Transform = Callable[[Image], Tensor]


class PixelTransform:
    """The stages of a transform before ToTensor: Image -> uint8 (3, H, W). Picklable."""

    def __init__(self, stages: Sequence[Callable[[Any], Any]]):
        self.stages = tuple(stages)

    def __call__(self, image: Image) -> Tensor:
        pixels: Any = image
        for stage in self.stages:
            pixels = stage(pixels)
        # (H, W, 3) in memory: a batch of these, viewed as (b, 3, H, W), is channels_last, which convolutions like.
        return torch.from_numpy(np.array(pixels)).permute(2, 0, 1)


class FastCrop:
    """open_clip's random crop of an array, resized by torch: uint8 (H, W, 3) -> uint8 (3, size, size). Picklable.

    With the same seed it takes the same crop as open_clip. torch's filter for bytes is vectorized, rounds differently
    from Pillow's, and always filters rows first; Pillow (from 13 on) filters columns first in some upright crops. In
    photos fewer than 1 colour value in 20 differs, in such an upright crop up to 1 in 4: nearly all by 1 of 255, none
    by more than 3. In black and white noise single values of upright crops differ by 30.
    """

    def __init__(self, crop: Any):
        self.crop = crop  # torchvision's RandomResizedCrop

    def __call__(self, image: np.ndarray) -> Tensor:
        pixels = torch.from_numpy(image).permute(2, 0, 1)
        top, left, height, width = self.crop.get_params(pixels, self.crop.scale, self.crop.ratio)
        part = pixels[None, :, top : top + height, left : left + width]
        return F.interpolate(part, self.crop.size, mode="bicubic", antialias=True)[0]


def make_transforms(model: Any, preprocess: dict[str, Any], crop_scale: tuple[float, float]) -> tuple[Any, Any]:
    """open_clip's transforms of a model for training and for evaluation. Stores their config in the model."""
    from open_clip.transform import PreprocessCfg, image_transform_v2, merge_preprocess_dict

    config = merge_preprocess_dict(PreprocessCfg(), preprocess) | {"size": model.visual.image_size}
    open_clip_module().set_model_preprocess_cfg(model, config)
    steps = PreprocessCfg(**config)
    training = image_transform_v2(steps, is_train=True, aug_cfg={"scale": crop_scale})
    return training, image_transform_v2(steps, is_train=False)


def without_normalization(transform: Any) -> PixelTransform:
    return PixelTransform(transform.transforms[:-2])  # the last two are ToTensor and Normalize


def fast_crop(transform: object) -> FastCrop:
    """The fast version of open_clip's training transform, which consists of a random crop and a conversion to RGB."""
    from torchvision.transforms import InterpolationMode, RandomResizedCrop

    stages = transform.stages if isinstance(transform, PixelTransform) else ()
    crop = stages[0] if len(stages) == 2 else None
    if not isinstance(crop, RandomResizedCrop):
        raise UserError("data.pixels fast works only with open_clip's random crop; give --data.pixels exact")
    if crop.interpolation != InterpolationMode.BICUBIC:
        raise UserError(
            f"data.pixels fast resizes bicubically, but this model needs {crop.interpolation.value}; "
            "give --data.pixels exact"
        )
    return FastCrop(crop)


def normalize_batch(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:  # uint8 (b, 3, H, W) -> float32
    """torchvision's ToTensor and Normalize for a whole batch, in the same order of operations."""
    # In the order of the bytes in memory. If three values were broadcast at a time, a CPU could not use vector
    # instructions (66 ms instead of 42 for 64 images of 224 pixels).
    rows = images.permute(0, 2, 3, 1).flatten(2)  # (b, H, W * 3)
    width = images.shape[3]
    rows = rows.to(torch.float32).div_(255).sub_(mean.repeat(width)).div_(std.repeat(width))
    return rows.unflatten(2, (width, 3)).permute(0, 3, 1, 2)
