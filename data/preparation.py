"""Images as a model takes them, one at a time: what an image processor makes, perhaps after a random crop."""

import math
from typing import Any

import numpy as np
import PIL.Image
import torch
from transformers import BaseImageProcessor

from clip_moe.data.arguments import Augmentation
from clip_moe.data.images import decode_image

# Width over height of a random crop, before it is resized to the model's image: torchvision's, which open_clip keeps
RATIOS = 3 / 4, 4 / 3
# Tries to draw a crop that fits into the image
TRIES = 10


class Preparation:
    """Prepares images as an image processor does, perhaps after an augmentation."""

    def __init__(self, processor: BaseImageProcessor, augmentation: Augmentation | None = None):
        self.processor, self.augmentation = processor, augmentation
        self.size = None if augmentation is None else crop_size(processor)

    def read(self, value: Any, rng: np.random.Generator | None = None) -> dict[str, torch.Tensor]:
        """Decodes and prepares a value of an image column; raises the errors of `clip_moe.data.images.decode_image`."""
        return self(decode_image(value), rng)

    def __call__(self, image: PIL.Image.Image, rng: np.random.Generator | None = None) -> dict[str, torch.Tensor]:
        """A model's inputs of one image: `pixel_values` (C, H, W) in float32; of an image of any shape (NaFlex), those
        of its patches (S, C * P * P), with `pixel_attention_mask` (S,) and `spatial_shapes` (2,).

        Args:
            image: RGB.
            rng: random numbers of the augmentation; None: the image stays as it is.
        """
        options = {}
        if self.augmentation is not None and rng is not None:
            box = crop_box(image.size, self.augmentation.random_resized_crop, rng)
            image = image.crop(box).resize(self.size, PIL.Image.BICUBIC)  # by `resize(box=...)` it sees what is around
            options["do_resize"] = False
        inputs = self.processor([image], return_tensors="np", **options)
        return {name: torch.as_tensor(np.asarray(arrays[0])) for name, arrays in inputs.items()}


def crop_box(size: tuple[int, int], scale: tuple[float, float], rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of a random crop of an image of this width and height, as torchvision's
    RandomResizedCrop draws it: the area uniformly, the ratio of its sides log-uniformly, and its place uniformly among
    all within the image. An image that is too long gives its largest center crop with a ratio that is allowed.

    Args:
        scale: the least and the largest share of the image's area.
    """
    (width, height), (least, most) = size, scale
    for _ in range(TRIES):
        area = width * height * rng.uniform(least, most)
        ratio = math.exp(rng.uniform(math.log(RATIOS[0]), math.log(RATIOS[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = rng.integers(width - w + 1), rng.integers(height - h + 1)
            return int(left), int(top), int(left) + w, int(top) + h
    ratio = min(max(width / height, RATIOS[0]), RATIOS[1])
    w, h = min(width, max(round(height * ratio), 1)), min(height, max(round(width / ratio), 1))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def crop_size(processor: BaseImageProcessor) -> tuple[int, int]:
    """The width and height of the images that a processor makes."""
    size = processor.crop_size if processor.do_center_crop else processor.size
    width, height = (size.get(side) or size.get("shortest_edge") for side in ("width", "height"))
    if not (width and height):
        raise ValueError(f"the image processor's size must be a shortest edge or width and height, got {size}")
    return width, height
