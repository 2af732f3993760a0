"""Images prepared one at a time are those of the image processor, to the bit. Random changes of training images: what
they are, and that nothing but seed, epoch and number settles them."""

import numpy as np
import PIL.Image
import pytest
import torch
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from clip_moe.data.arguments import Augmentation, DataArguments
from clip_moe.data.images import decode_image
from clip_moe.data.preparation import RATIOS, Preparation, crop_box
from clip_moe.data.symbols import SYMBOLS
from clip_moe.training.loader import PairLoader
from clip_moe.training.samplers import Share

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


# --- random crops

CROPPED = Augmentation(random_resized_crop=[0.5, 1.0])


@pytest.fixture(scope="module")
def rows():
    return SYMBOLS.load("train", "web", 20)


def batches(rows, processor, start, number, augmentation=CROPPED, share=(8,), **settings):
    arguments = DataArguments(source="symbols", num_samples=20, **settings)
    stream = PairLoader(rows, processor, arguments, Share(*share), augmentation=augmentation).batches(start)
    return torch.stack([next(stream)["pixel_values"] for _ in range(number)])


def test_crops_have_the_share_and_the_ratio_and_lie_within():
    rng = np.random.default_rng(0)
    boxes = np.array([crop_box((320, 240), (0.5, 0.7), rng) for _ in range(2000)])
    widths, heights = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    assert boxes.min() >= 0 and boxes[:, 2].max() <= 320 and boxes[:, 3].max() <= 240
    shares = widths * heights / (320 * 240)
    assert 0.49 < shares.min() < 0.51 and 0.69 < shares.max() < 0.71 and abs(shares.mean() - 0.6) < 0.01
    ratios = np.log(widths / heights)
    assert np.log(RATIOS[0]) - 0.01 < ratios.min() and ratios.max() < np.log(RATIOS[1]) + 0.01
    assert abs(boxes[:, 0] + boxes[:, 2] - 320).mean() > 20 and abs((boxes[:, 0] + boxes[:, 2]).mean() - 320) < 5
    # Of one that is too long, the center is taken
    assert crop_box((1000, 30), (0.9, 1.0), rng) == (480, 0, 520, 30)
    assert crop_box((30, 1000), (0.9, 1.0), rng) == (0, 480, 30, 520)


def test_images_are_cropped_and_resized(rows, processor):
    (found,) = batches(rows, processor, 0, 1)
    loader = PairLoader(rows, processor, DataArguments(source="symbols", num_samples=20), Share(8))
    for pixels, number in zip(found, next(loader.sampler.epoch_batches(0)), strict=True):
        rng, image = np.random.default_rng([0, 0, number, 1]), decode_image(rows[number]["image"])
        image = image.crop(crop_box(image.size, [0.5, 1.0], rng)).resize((16, 16), PIL.Image.BICUBIC)
        expected = processor.image_processor(image, return_tensors="pt", do_resize=False)["pixel_values"][0]
        assert torch.equal(pixels, expected)


def test_batches_depend_on_neither_workers_nor_processes_nor_interruptions(rows, processor):
    whole = batches(rows, processor, 0, 5)
    assert torch.equal(whole, batches(rows, processor, 0, 5, num_workers=2))
    for start in (1, 4):
        assert torch.equal(whole[start:], batches(rows, processor, start, 5 - start))
    ranks = [batches(rows, processor, 0, 5, share=(4, rank, 2)) for rank in range(2)]
    assert torch.equal(whole, torch.cat(ranks, dim=1))


def test_every_epoch_changes_images_in_another_way_and_no_embedding_does(rows, processor):
    plain, arguments = rows.select([0] * 8), DataArguments(source="symbols", num_samples=8)
    loader = PairLoader(plain, processor, arguments, Share(8), augmentation=CROPPED)
    stream = loader.batches(0)
    images = torch.cat([next(stream)["pixel_values"] for _ in range(2)])
    assert len(images.flatten(1).unique(dim=0)) > 12  # of 16 pictures of one image
    batch = loader.in_order()[0]
    expected = processor.image_processor(plain[0]["image"], return_tensors="pt")["pixel_values"]
    assert torch.equal(batch["pixel_values"], expected.expand(8, -1, -1, -1))
