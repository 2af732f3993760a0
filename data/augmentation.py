"""Random changes of training images."""

import math
from typing import Annotated

import numpy as np
import PIL.Image
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

# Width over height of a crop, before it is resized to the model's image: torchvision's, which open_clip keeps
RATIOS = 3 / 4, 4 / 3
# Drawings of a crop, until one lies within the image
TRIES = 10


@dataclass(config=ConfigDict(extra="forbid"), kw_only=True)
class Augmentation:
    """How training images are changed, at random and anew in every epoch."""

    # Share of the image's area that a random crop has, the least and the most, such as open_clip's [0.9, 1.0]: the crop
    # is resized to the model's size.
    random_resized_crop: list[Annotated[float, Field(gt=0, le=1)]] = Field(min_length=2, max_length=2)

    def __call__(self, image: PIL.Image.Image, size: tuple[int, int], rng: np.random.Generator) -> PIL.Image.Image:
        """A crop of the image, resized to this width and height."""
        box = crop_box(image.size, self.random_resized_crop, rng)
        return image.crop(box).resize(size, PIL.Image.BICUBIC)  # by `resize(box=...)` it would see what is around


def crop_box(size: tuple[int, int], scale: tuple[float, float], rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of a random crop, as torchvision's RandomResizedCrop draws it: the area uniformly,
    the ratio of its sides log-uniformly, and its place uniformly among all within the image.

    An image that is too long for that gives its largest center crop with a ratio that is allowed.

    Args:
        size: width and height of the image.
        scale: the least and the largest share of its area.
    """
    width, height = size
    for _ in range(TRIES):
        area = width * height * rng.uniform(*scale)
        ratio = math.exp(rng.uniform(*map(math.log, RATIOS)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = rng.integers(width - w + 1), rng.integers(height - h + 1)
            return int(left), int(top), int(left) + w, int(top) + h
    ratio = min(max(width / height, RATIOS[0]), RATIOS[1])
    w, h = min(width, max(round(height * ratio), 1)), min(height, max(round(width / ratio), 1))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h
