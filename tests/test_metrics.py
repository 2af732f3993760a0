"""Metrics by hand, and against the obvious loop."""

import tracemalloc

import numpy as np
import pytest

from evaluation.pairs import pair_metrics
from evaluation.retrieval import TIE, retrieval_metrics
from evaluation.zero_shot import class_embeddings, zero_shot_metrics


def unit(angles):
    """Points on the unit circle, by degrees."""
    angles = np.deg2rad(np.asarray(angles, dtype=np.float64))
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1)


def random_unit(rng, *shape):
    values = rng.normal(size=shape)
    return values / np.linalg.norm(values, axis=-1, keepdims=True)


def test_class_embeddings_are_the_mean_direction():
    np.testing.assert_allclose(class_embeddings(unit([[0, 90], [10, 30]])), unit([45, 20]))


def test_zero_shot_by_hand():
    # Classes at 0, 90 and 180 degrees; the third image is of class 0 and nearer to class 1.
    metrics = zero_shot_metrics(unit([10, 20, 60, 100]), unit([0, 90, 180]), np.array([0, 0, 0, 1]))
    assert metrics == {"accuracy": 0.75, "mean_per_class_recall": pytest.approx((2 / 3 + 1) / 2)}


def test_zero_shot_top_5_is_the_plain_one():
    rng = np.random.default_rng(0)
    images, classes, labels = random_unit(rng, 50, 4), random_unit(rng, 9, 4), rng.integers(0, 9, 50)
    order = np.argsort(-images @ classes.T, axis=1)
    metrics = zero_shot_metrics(images, classes, labels)
    assert metrics["accuracy_top5"] == np.mean([label in row[:5] for label, row in zip(labels, order, strict=True)])
    assert metrics["accuracy"] == np.mean(labels == order[:, 0])


@pytest.mark.parametrize(("labels", "message"), [([0, 1], "2 labels for 3"), ([0, 1, 3], "3 classes")])
def test_zero_shot_refuses(labels, message):
    with pytest.raises(ValueError, match=message):
        zero_shot_metrics(unit([0, 1, 2]), unit([0, 90, 180]), np.array(labels))


def plain_recall(similarity, right, k):
    """Share of rows in which the best right candidate comes before all but fewer than k wrong ones; ties are lost."""
    hits = []
    for row, is_right in zip(similarity, right, strict=True):
        best = max(value for value, ok in zip(row, is_right, strict=True) if ok)
        before = sum(value >= best - TIE for value, ok in zip(row, is_right, strict=True) if not ok)
        hits.append(before < k)
    return np.mean(hits)


@pytest.mark.parametrize("chunk_size", [1, 7, 1000])
@pytest.mark.parametrize("rounded", [False, True], ids=["", "many ties"])
def test_retrieval_is_the_plain_one(chunk_size, rounded):
    rng = np.random.default_rng(1)
    images, texts = random_unit(rng, 20, 3), random_unit(rng, 50, 3)
    if rounded:
        images, texts = images.round(), texts.round()
    image_of_text = np.concatenate([np.arange(20), rng.integers(0, 20, 30)])
    right = np.arange(20)[:, None] == image_of_text
    metrics = retrieval_metrics(images, texts, image_of_text, chunk_size=chunk_size)
    for k in (1, 5, 10):
        assert metrics[f"image_to_text_recall@{k}"] == plain_recall(images @ texts.T, right, k)
        assert metrics[f"text_to_image_recall@{k}"] == plain_recall(texts @ images.T, right.T, k)


def test_retrieval_holds_few_similarities_at_a_time():
    """Those of all 300 images and 200,000 captions would be 229 MiB."""
    rng = np.random.default_rng(0)
    images, texts = random_unit(rng, 300, 2).astype(np.float32), random_unit(rng, 200_000, 2).astype(np.float32)
    image_of_text = np.arange(200_000) % 300
    tracemalloc.start()
    retrieval_metrics(images, texts, image_of_text)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 2**26 < peak < 1.5 * 2**26  # 64 MiB, and what tells which are as similar


def test_equal_embeddings_find_nothing():
    embeds = np.ones((4, 2)) / np.sqrt(2)
    metrics = retrieval_metrics(embeds, embeds, np.arange(4), ks=(1, 3, 4))
    assert [metrics[f"text_to_image_recall@{k}"] for k in (1, 3, 4)] == [0, 0, 1]


@pytest.mark.parametrize("size", [3, 10, 101, 500])
@pytest.mark.parametrize("width", [64, 128, 512])
def test_equal_captions_are_a_tie_wherever_they_stand(size, width):
    """The first and the last image have the same caption: neither finds its own, nor the caption its image."""
    images = random_unit(np.random.default_rng(0), size, width).astype(np.float32)
    images[-1] = images[0]
    metrics = retrieval_metrics(images, images.copy(), np.arange(size))
    assert metrics["image_to_text_recall@1"] == metrics["text_to_image_recall@1"] == (size - 2) / size


@pytest.mark.parametrize("image_of_text", [[0, 0], [0, 2], [0]])
def test_retrieval_refuses(image_of_text):
    with pytest.raises(ValueError, match="image_of_text"):
        retrieval_metrics(unit([0, 1]), unit([0, 1]), np.array(image_of_text))


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_pairs_by_hand(kind):
    images = unit([[0, 90], [0, 90], [0, 90], [0, 90]])
    texts = unit([[10, 80], [80, 10], [20, 40], [45, 45]])  # right; swapped; both nearer to image 0; undecided
    metrics = pair_metrics(images, texts, kind(["color", "color", "size", "size"]))
    # In the third pair each image prefers its own text, but text 1 prefers image 0.
    assert metrics == {"text": 0.5, "image": 0.25, "group": 0.25, "group/color": 0.5, "group/size": 0.0}


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    "metrics",
    [
        lambda images, texts: retrieval_metrics(images, texts, np.arange(3)),
        lambda images, texts: zero_shot_metrics(images, texts, np.arange(3)),
        lambda images, texts: pair_metrics(images[:2][None], texts[:2][None], ["color"]),
    ],
    ids=["retrieval", "zero-shot", "pairs"],
)
def test_embeddings_that_are_not_finite_are_no_score(metrics, value, side):
    embeds = [unit([0, 90, 180]), unit([0, 90, 180])]
    metrics(*embeds)
    embeds[side][1, 0] = value
    with pytest.raises(ValueError, match="must be finite"):
        metrics(*embeds)


def test_captions_equal_but_for_rounding_are_a_tie():
    """The same caption in two batches may come out different in its last bits: neither is the better one."""
    rng = np.random.default_rng(0)
    images, texts = random_unit(rng, 500, 2, 96), random_unit(rng, 500, 2, 96)
    texts[:, 1] = texts[:, 0] * (1 + 1e-7)
    assert pair_metrics(images, texts, ["color"] * 500)["text"] == 0
    images[:, 1] = images[:, 0] * (1 + 1e-7)
    assert pair_metrics(images, random_unit(rng, 500, 2, 96), ["color"] * 500)["image"] == 0


def test_pairs_refuse():
    with pytest.raises(ValueError, match="no pairs"):
        pair_metrics(np.zeros((0, 2, 3)), np.zeros((0, 2, 3)), [])
    with pytest.raises(ValueError, match="1 pairs of images, 1 of captions and 2 attributes"):
        pair_metrics(unit([[0, 90]]), unit([[0, 90]]), ["a", "b"])
