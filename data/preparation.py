"""Images as a model takes them, one at a time: what an image processor makes, in less time."""

import math
from typing import Any

import numpy as np
import PIL.Image
import torch
from transformers import BaseImageProcessor

from clip_moe.data.arguments import Augmentation
from clip_moe.data.images import decode_image

# Sides of images that are prepared both ways, to see that the results are equal: upright, lying, small and square
PROBES = ((50, 83), (331, 240), (17, 16), (64, 64))
# Width over height of a random crop, before it is resized to the model's image: torchvision's, which open_clip keeps
RATIOS = 3 / 4, 4 / 3
# Tries to draw a crop that fits into the image
TRIES = 10


class Preparation:
    """Prepares images as an image processor does, to the bit.

    A processor that resizes, crops and normalizes by Pillow and NumPy, as CLIP's without torchvision, makes several
    copies in 64 bits. Here Pillow resizes and crops, and a table has what the processor makes of each of the 256 values
    of a channel. Any other processor, such as one of torchvision's, is called itself.
    """

    def __init__(self, processor: BaseImageProcessor, augmentation: Augmentation | None = None):
        self.processor, self.augmentation, self.table = processor, augmentation, None
        self.size = None if augmentation is None else crop_size(processor)
        if _resizes_and_crops(processor):
            ramp = PIL.Image.fromarray(np.arange(256, dtype=np.uint8)[None, :, None].repeat(3, axis=2))
            inputs = self._by_processor(ramp, do_resize=False, do_center_crop=False)
            self.table = inputs["pixel_values"][:, 0]  # (3, 256)
            if not all(self._is_equal(size) for size in PROBES):
                self.table = None

    def read(self, value: Any, rng: np.random.Generator | None = None) -> dict[str, torch.Tensor]:
        """Decodes and prepares a value of an image column; raises the errors of `data.images.decode_image`."""
        return self(decode_image(value), rng)

    def __call__(self, image: PIL.Image.Image, rng: np.random.Generator | None = None) -> dict[str, torch.Tensor]:
        """A model's inputs of one image: `pixel_values` (C, H, W) in float32; of an image of any shape (NaFlex), those
        of its patches (S, C * P * P), with `pixel_attention_mask` (S,) and `spatial_shapes` (2,).

        Args:
            image: RGB.
            rng: random numbers of the augmentation; None: the image stays as it is.
        """
        is_resized = self.augmentation is not None and rng is not None
        if is_resized:
            box = crop_box(image.size, self.augmentation.random_resized_crop, rng)
            image = image.crop(box).resize(self.size, PIL.Image.BICUBIC)  # by `resize(box=...)` it sees what is around
        if self.table is None:
            inputs = self._by_processor(image, **({"do_resize": False} if is_resized else {}))
        else:
            inputs = {"pixel_values": self._by_table(image, is_resized)}
        return {name: torch.as_tensor(array) for name, array in inputs.items()}

    def _by_processor(self, image: PIL.Image.Image, **options) -> dict[str, np.ndarray]:
        inputs = self.processor([image], return_tensors="np", **options)
        return {name: np.asarray(arrays[0]) for name, arrays in inputs.items()}

    def _by_table(self, image: PIL.Image.Image, is_resized: bool = False) -> np.ndarray:
        if not is_resized:
            image = image.resize(resized_size(self.processor, image.size), resample=int(self.processor.resample))
        values = np.asarray(image)
        if self.processor.do_center_crop:
            crop = self.processor.crop_size["height"], self.processor.crop_size["width"]
            top, left = (values.shape[0] - crop[0]) // 2, (values.shape[1] - crop[1]) // 2
            values = values[top : top + crop[0], left : left + crop[1]]
        pixels = np.empty((3, *values.shape[:2]), np.float32)
        for channel in range(3):
            np.take(self.table[channel], values[..., channel], out=pixels[channel], mode="clip")
        return pixels

    def _is_equal(self, size: tuple[int, int]) -> bool:
        values = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
        image = PIL.Image.fromarray(values)
        return np.array_equal(self._by_table(image), self._by_processor(image)["pixel_values"])


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
    if not processor.do_center_crop:
        return resized_size(processor, (1, 1))
    return processor.crop_size["width"], processor.crop_size["height"]


def resized_size(processor: BaseImageProcessor, size: tuple[int, int]) -> tuple[int, int]:
    """The width and height that a processor resizes an image of this width and height to."""
    edge = processor.size.get("shortest_edge")
    if edge:
        return tuple(edge if side == min(size) else int(edge * side / min(size)) for side in size)
    if not (processor.size.get("width") and processor.size.get("height")):
        raise ValueError(f"the image processor resizes to {processor.size}, not to a shorter side or width and height")
    return processor.size["width"], processor.size["height"]


def _resizes_and_crops(processor: BaseImageProcessor) -> bool:
    """Whether a processor resizes by Pillow, as it says, by settings that `resized_size` knows."""
    steps = ("do_resize", "do_rescale", "do_normalize")
    if getattr(processor, "backend", None) != "pil" or not all(getattr(processor, step, False) for step in steps):
        return False
    size = processor.size or {}  # none: the shape of each image decides (NaFlex)
    settled = {name for name in ("height", "width", "shortest_edge", "longest_edge") if size.get(name)}
    return settled in ({"shortest_edge"}, {"height", "width"})
