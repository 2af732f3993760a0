"""Which patches and words experts take: by hand, and as a small model records it."""

import numpy as np
import pytest
import small_evaluation
import small_experts
import torch
from tiny_clip_moe import tiny_model

from data import glyphs
from data.worlds import build_processor
from evaluation.embedder import Embedder
from evaluation.preferences import RoutedImages, RoutedTexts, route_images, route_texts, top_patches, top_words
from evaluation.routing_pictures import draw_expert_patches, draw_patches

sparse, figures = small_experts.sparse, small_evaluation.figures


@pytest.fixture(scope="module")
def embedder(sparse):
    return Embedder(sparse[1], None, 4, torch.device("cpu"))


def test_patches_are_routed_as_the_model_records_it(sparse, embedder):
    model, _ = sparse
    images = list(glyphs.load("test", "web", 6)["image"])
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
    processor = build_processor("glyphs", 12, side)
    processor.save_pretrained(tmp_path)
    text = {"vocab_size": len(processor.tokenizer)}
    tiny_model(text=text, vision={"image_size": side, "patch_size": patch}).save_pretrained(tmp_path)
    embedder = Embedder(tmp_path, None, 4, torch.device("cpu"))
    routed = route_images(embedder, list(glyphs.load("test", "web", 1)["image"]), layer=1)
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
    routed = RoutedTexts(0, computed / 2, computed, ids)
    assert top_words(routed, tokenizer) == [
        [("red", 1.0, 6), ("star", 0.25, 12)],
        [("blue", 1.0, 6), ("star", 0.75, 12)],
    ]
    assert top_words(routed, tokenizer, 1) == [[("red", 1.0, 6)], [("blue", 1.0, 6)]]
