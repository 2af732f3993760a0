"""Which patches and words experts take: by hand, and as a small model records it."""

import math

import numpy as np
import pytest
import small_evaluation
import small_experts
import torch
from tiny_clip_moe import tiny_model

from data import symbols
from data.worlds import build_processor
from evaluation import preferences
from evaluation.embedder import Embedder
from evaluation.preferences import (
    RoutedImages,
    RoutedTexts,
    dropped_patches,
    route_images,
    route_texts,
    top_captions,
    top_patches,
    top_words,
)
from evaluation.routing_pictures import draw_expert_patches, draw_patches

sparse, figures = small_experts.sparse, small_evaluation.figures


@pytest.fixture(scope="module")
def embedder(sparse):
    return Embedder(sparse[1], None, 4, torch.device("cpu"))


def test_patches_are_routed_as_the_model_records_it(sparse, embedder):
    model, _ = sparse
    images = list(symbols.load("test", "web", 6)["image"])
    routed = route_images(embedder, images, layer=2)
    inputs = embedder.processor.image_processor(images, return_tensors="pt")
    with torch.no_grad():
        outputs = model.vision_model(**inputs, output_expert_ids=True, output_router_logits=True)
    ids = outputs.expert_ids[2]
    for expert in range(4):
        assert np.array_equal(routed.computed[..., expert], (ids == expert).any(dim=-1))
    probabilities = outputs.router_logits[2].softmax(dim=-1).numpy()
    np.testing.assert_allclose(routed.probabilities, probabilities, atol=1e-5)
    assert (routed.layer, routed.grid, routed.computed.shape) == (2, (4, 4), (6, 17, 4))
    for image, pixels in zip(images, routed.pixels, strict=True):
        np.testing.assert_allclose(pixels, np.asarray(image) / 255, atol=1e-6)


@pytest.mark.parametrize(("side", "patch", "patches"), [(19, 4, 4), (31, 14, 2)])
def test_what_is_left_beside_the_patches_is_not_drawn(side, patch, patches, tmp_path, figures):
    processor = build_processor("symbols", 12, side)
    processor.save_pretrained(tmp_path)
    text = {"vocab_size": len(processor.tokenizer), "eos_token_id": processor.tokenizer.eos_token_id}
    tiny_model(text=text, vision={"image_size": side, "patch_size": patch}).save_pretrained(tmp_path)
    embedder = Embedder(tmp_path, None, 4, torch.device("cpu"))
    routed = route_images(embedder, list(symbols.load("test", "web", 1)["image"]), layer=1)
    assert (routed.grid, routed.pixels.shape) == ((patches, patches), (1, side, side, 3))
    draw_patches(routed, tmp_path / "patches.png")
    draw_expert_patches(routed, tmp_path / "expert_patches.png")
    places = [number * patch - 0.5 for number in range(patches)]
    assert [part.get_xy() for part in figures[0].axes[1].patches] == [(left, top) for top in places for left in places]
    framed = [part for axis in figures[1].axes for part in axis.patches]
    assert framed and all(set(part.get_xy()) <= set(places) and part.get_width() == patch for part in framed)


def test_words_are_routed_as_the_model_records_it(sparse, embedder):
    model, _ = sparse
    texts = ["a seven", "a small red star on a gray background", "a heart", "a zero", "a purple disc"]
    routed = route_texts(embedder, texts, layer=3)
    batch = embedder.processor.tokenizer(texts, padding=True, return_tensors="pt")
    assert np.array_equal(routed.ids, batch["input_ids"])
    with torch.no_grad():
        ids = model.text_model(**batch, output_expert_ids=True).expert_ids[3]
    for expert in range(4):
        assert np.array_equal(routed.computed[..., expert], (ids == expert).any(dim=-1))
    assert np.array_equal(routed.computed.sum(axis=-1), 2 * batch["attention_mask"])


def test_top_patches_by_hand():
    """Two images of a class token and two patches, three experts; the last computes nothing."""
    probabilities = np.array(
        [
            [[0.9, 0.1, 0.0], [0.6, 0.4, 0.0], [0.3, 0.7, 0.0]],
            [[0.9, 0.1, 0.0], [0.8, 0.2, 0.0], [0.7, 0.3, 0.0]],
        ]
    )
    computed = probabilities > 0.5
    routed = RoutedImages(0, probabilities, computed, np.zeros((2, 1, 2, 3)), 1)
    assert routed.grid == (1, 2)
    assert top_patches(routed) == [[(1, 0), (0, 0)], [(0, 1)], []]
    assert top_patches(routed, 1) == [[(1, 0)], [(0, 1)], []]


def test_top_words_by_hand(embedder):
    tokenizer = embedder.processor.tokenizer
    texts = ["red star"] * 6 + ["blue star"] * 6 + ["heart"] * 4
    ids = tokenizer(texts, padding=True, return_tensors="np")["input_ids"]
    red, blue, star, heart = (tokenizer(word)["input_ids"][1] for word in ("red", "blue", "star", "heart"))
    computed = np.zeros((*ids.shape, 2), bool)
    computed[ids == red, 0] = computed[ids == blue, 1] = computed[ids == heart, 0] = True  # heart is too rare
    computed[np.nonzero(ids == star)[0][:3], np.nonzero(ids == star)[1][:3], 0] = True
    computed[np.nonzero(ids == star)[0][3:], np.nonzero(ids == star)[1][3:], 1] = True
    computed[:, 0, 1] = True  # begins the text
    routed = RoutedTexts(0, computed / 2, computed, ids, texts)
    assert top_words(routed, tokenizer) == [
        [("red", 1.0, 6), ("star", 0.25, 12)],
        [("blue", 1.0, 6), ("star", 0.75, 12)],
    ]
    assert top_words(routed, tokenizer, 1) == [[("red", 1.0, 6)], [("blue", 1.0, 6)]]


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.3, 4.0])
def test_dropped_patches_are_those_of_a_plain_loop(factor):
    """Seats are taken by the first choices of all tokens, image after image, then by the second choices."""
    num_images, num_tokens, num_experts = 5, 10, 4
    logits = np.random.default_rng(0).normal(size=(7, num_tokens, num_experts)) + [1, 0.5, 0, 0]
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    routed = RoutedImages(0, probabilities, probabilities > 2, np.zeros((7, 3, 3, 3)), 1)
    room = [math.ceil(num_images * num_tokens * factor / num_experts)] * num_experts
    computed = np.zeros((num_images, num_tokens), bool)
    for choice in range(2):
        for image in range(num_images):
            for token in range(num_tokens):
                expert = np.argsort(-probabilities[image, token])[choice]
                if room[expert] > 0:
                    room[expert] -= 1
                    computed[image, token] = True
    dropped = dropped_patches(routed, num_images, 2, factor)
    assert np.array_equal(dropped, ~computed[:, 1:])  # without the class token
    assert dropped.any() == (factor < 4)


def test_the_dropped_patches_are_those_that_the_model_drops(sparse, embedder):
    """In the first sparse layer, into which the same goes with and without capacity."""
    model, images = embedder.model, list(symbols.load("test", "web", 4)["image"])
    dropped = dropped_patches(route_images(embedder, images, layer=0), 4, 2, 0.75)
    config = model.config.vision_config
    config.eval_capacity_factor = 0.75
    try:
        computed = route_images(embedder, images, layer=0).computed
    finally:
        config.eval_capacity_factor = None
    assert np.array_equal(dropped, ~computed.any(axis=-1)[:, 1:]) and dropped.any() and not dropped.all()


def test_captions_show_the_tokens_of_an_expert(embedder):
    tokenizer = embedder.processor.tokenizer
    texts = ["Red  star"] * 6 + ["a blue\nstar"]
    ids = tokenizer(texts, padding=True, return_tensors="np")["input_ids"]
    red, blue, star = (tokenizer(word)["input_ids"][1] for word in ("red", "blue", "star"))
    computed = np.zeros((*ids.shape, 3), bool)
    computed[ids == red, 0] = computed[ids == blue, 0] = computed[ids == star, 1] = True
    computed[:, 0, 0] = True  # begins the text
    probabilities = 0.5 * computed
    probabilities[6] = 0.9 * computed[6]  # of the stars, the surest is that of the last text
    captions = top_captions(RoutedTexts(0, probabilities, computed, ids, texts), tokenizer)
    # "blue" is too rare to be a top word; unprintable characters are spaces
    assert [[(caption.text, marked(caption)) for caption in of_expert] for of_expert in captions] == [
        [("Red  star", "Red______")],
        [("a blue star", "_______star")],
        [],
    ]


def test_a_long_caption_is_cut_around_its_word(embedder):
    tokenizer = embedder.processor.tokenizer
    texts = ["a " * 25 + "heart" + " a" * 20] * 5
    ids = tokenizer(texts, padding=True, return_tensors="np")["input_ids"]
    computed = (ids == tokenizer("heart")["input_ids"][1])[..., None]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preferences, "CAPTION_LENGTH", 21)
        ((caption,),) = top_captions(RoutedTexts(0, computed * 1.0, computed, ids, texts), tokenizer, 1)
    assert (caption.text, marked(caption)) == ("…a a a a a heart a a a…", "___________heart_______")


def marked(caption):
    """The text with _ in the place of what is not computed."""
    return "".join(character if mark else "_" for character, mark in zip(caption.text, caption.computed, strict=True))
