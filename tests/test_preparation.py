"""Images prepared one at a time are those of the image processor, to the bit."""

import numpy as np
import PIL.Image
import pytest
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from clip_moe.data.arguments import Augmentation
from clip_moe.data.preparation import Preparation

SETTINGS = [
    {},
    {"size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 36}},
    {"size": {"height": 24, "width": 30}, "do_center_crop": False},
    {"size": {"shortest_edge": 20}, "do_center_crop": False, "resample": PIL.Image.BILINEAR},
    {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.1, 0.2, 0.9], "rescale_factor": 1 / 127},
    {"size": {"shortest_edge": 20}, "crop_size": {"height": 24, "width": 16}},  # zeros around it
    {"do_resize": False, "crop_size": {"height": 16, "width": 16}},
]


def image(width, height):
    return PIL.Image.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_images_are_those_of_the_processor(settings):
    processor = CLIPImageProcessorPil(**settings)
    for size in ((64, 48), (48, 64), (300, 299), (7, 500), (224, 224), (33, 1)):
        made = Preparation(processor)(image(*size))["pixel_values"]
        expected = processor([image(*size)], return_tensors="np")["pixel_values"][0]
        assert made.is_contiguous() and np.array_equal(made, expected)


def test_an_image_of_the_right_size_is_not_resized():
    other = CLIPImageProcessorPil(size={"shortest_edge": 20}, crop_size={"height": 24, "width": 24})
    for processor, size in ((CLIPImageProcessorPil(), 224), (other, 24)):
        expected = processor([image(size, size)], return_tensors="np", do_resize=False)["pixel_values"][0]
        prepare = Preparation(processor, Augmentation(random_resized_crop=[1, 1]))
        assert np.array_equal(prepare(image(size, size), np.random.default_rng())["pixel_values"], expected)
