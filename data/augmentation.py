"""Random crops of training images."""

import math

import numpy as np

# Width over height of a crop, before it is resized to the model's image: torchvision's, which open_clip keeps
RATIOS = 3 / 4, 4 / 3
# Drawings of a crop, until one lies within the image
TRIES = 10


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
