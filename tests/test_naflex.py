"""Pictures of any shape (SigLIP 2 NaFlex): what pads their patches changes nothing, in evaluation and in training."""

import dataclasses

import datasets
import numpy as np
import PIL.Image
import pytest
import torch
from steps import assert_same_step, gradient_of, train_stage
from tiny_clip import moved
from tiny_families import saved, tiny_dense

from clip_moe.conversion.checkpoints import load_sparse
from clip_moe.conversion.presets import PRESETS
from clip_moe.conversion.processors import load_processor
from clip_moe.conversion.upcycle import upcycle
from clip_moe.data.arguments import DataArguments
from clip_moe.data.pairs import load_pairs
from clip_moe.evaluation.embedder import Embedder
from clip_moe.evaluation.sentence_encoders import ClipEncoder
from clip_moe.training.loader import PairLoader
from clip_moe.training.samplers import Share
from modeling_clip_moe.families import FAMILY_OF_TYPE

# Height and width
SIZES = [(40, 10), (16, 16), (9, 30), (33, 24), (12, 50), (64, 21), (7, 7), (25, 31)]
IMAGES = [
    PIL.Image.fromarray(np.random.default_rng(number).integers(0, 256, (*size, 3), np.uint8))
    for number, size in enumerate(SIZES)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A sparse model with experts that differ."""
    family = FAMILY_OF_TYPE["siglip2"]
    sparse = moved(upcycle(tiny_dense(family), PRESETS["clip_up"]), ("experts", "router"), seed=1)
    for tower in (sparse.config.text_config, sparse.config.vision_config):
        tower.capacity_group_size = 2
    sparse.config.router_aux_loss_coef, sparse.config.router_z_loss_coef = 0.5, 0.1
    return str(saved(family, sparse, tmp_path_factory.mktemp("sparse")))


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """The pictures, with a caption each."""
    file = tmp_path_factory.mktemp("data") / "pictures.parquet"
    rows = {"image": IMAGES, "caption": ["a red", "a round", "a cat", "cat"] * 2}
    datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image()).to_parquet(file)
    return DataArguments(source=str(file), split="test")


@torch.no_grad()
def without_padding(folder, image):
    """The normalized embedding of one picture, of its own patches alone."""
    made = load_processor(folder).image_processor([image], return_tensors="pt")
    number = int(made["spatial_shapes"].prod())
    made = {name: value if name == "spatial_shapes" else value[:, :number] for name, value in made.items()}
    features = load_sparse(folder).get_image_features(**made).pooler_output[0]
    return torch.nn.functional.normalize(features, dim=0).numpy()


def test_embeddings_are_those_of_pictures_alone(folder, arguments, tmp_path):
    rows = load_pairs(arguments)
    expected = [without_padding(folder, image) for image in IMAGES]
    embedder = Embedder(folder, tmp_path, 3, torch.device("cpu"), num_workers=1)
    for _ in range(2):  # computed, then read
        np.testing.assert_allclose(embedder.images(rows), expected, atol=1e-6)
    np.testing.assert_allclose(ClipEncoder(folder, "image").encode(rows, 3), expected, atol=1e-6)
    half = Embedder(folder, None, 3, torch.device("cpu"), torch.bfloat16).images(rows)
    assert (half * expected).sum(axis=-1).min() > 0.99


def first_batch(folder, arguments):
    return next(PairLoader(load_pairs(arguments), load_processor(folder), arguments, Share(len(SIZES))).batches(0))


def test_a_batch_has_what_the_processor_makes(folder, arguments):
    kept = first_batch(folder, dataclasses.replace(arguments, in_memory=True))
    batch = first_batch(folder, arguments)
    made = load_processor(folder).image_processor(IMAGES, return_tensors="pt")
    distances = (batch["pixel_values"][:, None] - made["pixel_values"]).abs().sum(dim=(-1, -2))
    order = distances.argmin(dim=1)  # of the epoch
    assert sorted(order.tolist()) == [*range(len(SIZES))] and not batch["pixel_attention_mask"].all()
    for name, value in made.items():
        assert torch.equal(batch[name], value[order]) and torch.equal(kept[name], batch[name])


def test_random_crops_are_refused(folder):
    stage = train_stage(len(SIZES), augmentation={"random_resized_crop": [0.5, 1]})
    (problem,) = stage.problems(load_sparse(folder), len(SIZES))
    assert problem.startswith("augmentation: it needs images of one size, but this model takes any shape")


def step(folder, batch, **settings):
    return gradient_of(load_sparse(folder), train_stage(len(SIZES), **settings), batch)


@pytest.mark.parametrize("balance_mean", ["tower", "token"])
def test_more_padding_changes_no_loss_no_statistic_and_no_gradient(folder, arguments, balance_mean):
    batch = first_batch(folder, arguments)
    longer = {**batch}
    longer["pixel_values"] = torch.nn.functional.pad(batch["pixel_values"], (0, 0, 0, 13), value=3.0)
    longer["pixel_attention_mask"] = torch.nn.functional.pad(batch["pixel_attention_mask"], (0, 13))
    found, expected = (step(folder, of, balance_mean=balance_mean) for of in (longer, batch))
    assert found[0]["dropped_tokens"] == expected[0]["dropped_tokens"] and 0 < found[0]["dropped_tokens"] < 0.5
    assert_same_step(found, expected, 2e-5)


def test_parts_of_a_batch_have_the_gradient_of_the_whole(folder, arguments):
    batch = first_batch(folder, arguments)
    assert_same_step(step(folder, batch, mini_batch_size=2), step(folder, batch), 2e-5)
