"""Random changes of training images."""

import math
from typing import Annotated

import numpy as np
import PIL.Image
import PIL.ImageOps
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
    # is resized to the model's size. None: the image is resized and cropped in its center.
    random_resized_crop: list[Annotated[float, Field(gt=0, le=1)]] | None = Field(
        default=None, min_length=2, max_length=2
    )
    # Mirror one image of two. Captions that tell left from right are then wrong.
    horizontal_flip: bool = False
    # Decode JPEGs at 1/2, 1/4 or 1/8 of their size, if that is still as large as the model needs. Faster, but with
    # other pixels: about 1 of 255 levels in the mean.
    jpeg_draft: bool = False

    def draft(self, edge: int) -> int | None:
        """Pixels that the shorter side of a decoded image needs, if it may be decoded smaller than it is.

        Args:
            edge: of the model's images; the smallest crop is seldom much smaller.
        """
        if not self.jpeg_draft:
            return None
        return edge if self.random_resized_crop is None else math.ceil(edge / math.sqrt(self.random_resized_crop[0]))

    def __call__(
        self, image: PIL.Image.Image, size: tuple[int, int], rng: np.random.Generator
    ) -> tuple[PIL.Image.Image, bool]:
        """The changed image, and whether it has been resized.

        Args:
            size: width and height of a crop.
            rng: as much is drawn from it for every image of the same size.
        """
        is_resized = self.random_resized_crop is not None
        if is_resized:
            box = crop_box(image.size, self.random_resized_crop, rng)
            image = image.crop(box).resize(size, PIL.Image.BICUBIC)  # by `resize(box=...)` it would see what is around
        if self.horizontal_flip and rng.random() < 0.5:
            image = PIL.ImageOps.mirror(image)
        return image, is_resized


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
