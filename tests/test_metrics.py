"""Metrics against the obvious loop, values by hand, scikit-learn's and CLIP_benchmark's."""

import tracemalloc

import numpy as np
import pytest
import sklearn.metrics
import torch
from sklearn.linear_model import LogisticRegression

from clip_moe.evaluation.linear_probe import linear_probe_metrics
from clip_moe.evaluation.pairs import pair_metrics
from clip_moe.evaluation.retrieval import TIE, retrieval_metrics
from clip_moe.evaluation.zero_shot import class_embeddings, zero_shot_metrics


def unit(angles):
    """Points on the unit circle, by degrees."""
    angles = np.deg2rad(np.asarray(angles, dtype=np.float64))
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1)


def random_unit(rng, *shape):
    values = rng.normal(size=shape)
    return values / np.linalg.norm(values, axis=-1, keepdims=True)


# ---- zero-shot


@pytest.mark.parametrize(("number", "wanted"), [(2, ["roc_auc"]), (4, []), (6, ["mean_of_top1_and_top5"])])
@pytest.mark.parametrize("ties", [False, True])
def test_zero_shot_is_the_obvious_loop(number, wanted, ties):
    """Of equal classes the first is the nearest, and the last ones are among the five nearest."""
    rng = np.random.default_rng(number)
    images, classes, labels = random_unit(rng, 50, 4), random_unit(rng, number, 4), rng.integers(0, number - 1, 50)
    labels[:2] = [0, 1]
    if ties:
        images, classes = images.round(), classes.round()
    nearest, in_five, margins = [], [], []
    for image in images:
        scores = [float(image @ name) for name in classes]
        nearest.append(max(range(number), key=lambda k: (scores[k], -k)))
        in_five.append(sorted(range(number), key=lambda k: (scores[k], k))[-5:])
        margins.append(scores[1] - scores[0])
    right = np.array(nearest) == labels
    expected = {"accuracy": np.mean(right)}
    expected["mean_per_class_recall"] = np.mean([right[labels == k].mean() for k in set(labels.tolist())])
    if number > 5:
        expected["accuracy_top5"] = np.mean([label in five for label, five in zip(labels, in_five, strict=True)])
        expected["mean_of_top1_and_top5"] = (expected["accuracy"] + expected["accuracy_top5"]) / 2
    if number == 2:
        labels = rng.integers(0, 2, 50)
        expected["accuracy"] = np.mean(np.array(nearest) == labels)
        expected["mean_per_class_recall"] = sklearn.metrics.balanced_accuracy_score(labels, nearest)
        ones, zeros = (np.array(margins)[labels == label] for label in (1, 0))
        expected["roc_auc"] = np.mean([(a > b) + (a == b) / 2 for a in ones for b in zeros])
    assert zero_shot_metrics(images, classes, labels, wanted) == pytest.approx(expected)
    if number == 2:
        with pytest.raises(ValueError, match="roc_auc needs images of both classes, but all have class 1"):
            zero_shot_metrics(images, classes, np.ones_like(labels), wanted)


# ---- retrieval


def plain_recall(similarity, right, k):
    """Share of rows in which the best right candidate comes before all but fewer than k wrong ones; ties are lost."""
    hits = []
    for row, is_right in zip(similarity, right, strict=True):
        best = max(value for value, ok in zip(row, is_right, strict=True) if ok)
        before = sum(value >= best - TIE for value, ok in zip(row, is_right, strict=True) if not ok)
        hits.append(before < k)
    return np.mean(hits)


@pytest.mark.parametrize("at_once", [1, 7, 1024])
@pytest.mark.parametrize("ties", [False, True])
def test_retrieval_is_the_obvious_loop(at_once, ties, monkeypatch):
    """Several captions an image."""
    monkeypatch.setattr("clip_moe.evaluation.retrieval.QUERIES_AT_ONCE", at_once)
    rng = np.random.default_rng(1)
    images, texts = random_unit(rng, 20, 3), random_unit(rng, 50, 3)
    if ties:
        images, texts = images.round(), texts.round()
    text_images = np.concatenate([np.arange(20), rng.integers(0, 20, 30)])
    right = np.arange(20)[:, None] == text_images
    metrics = retrieval_metrics(images, texts, text_images)
    for k in (1, 5, 10):
        assert metrics[f"image_to_text_recall@{k}"] == plain_recall(images @ texts.T, right, k)
        assert metrics[f"text_to_image_recall@{k}"] == plain_recall(texts @ images.T, right.T, k)


def test_retrieval_holds_few_similarities_at_a_time():
    """Those of all 300 images and 200,000 captions would be 229 MiB."""
    rng = np.random.default_rng(0)
    images, texts = random_unit(rng, 300, 2).astype(np.float32), random_unit(rng, 200_000, 2).astype(np.float32)
    tracemalloc.start()
    retrieval_metrics(images, texts, np.arange(200_000) % 300)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 2**26 < peak < 1.5 * 2**26  # 64 MiB, and what tells which are as similar


@pytest.mark.parametrize("size", [3, 101, 500])
@pytest.mark.parametrize("width", [64, 512])
def test_equal_captions_are_a_tie_wherever_they_stand(size, width):
    """The first and the last image have the same caption: neither finds its own, nor the caption its image."""
    images = random_unit(np.random.default_rng(0), size, width).astype(np.float32)
    images[-1] = images[0]
    metrics = retrieval_metrics(images, images.copy(), np.arange(size))
    assert metrics["image_to_text_recall@1"] == metrics["text_to_image_recall@1"] == (size - 2) / size


@pytest.mark.parametrize("several", [False, True])
def test_information_is_what_the_best_temperature_leaves_of_the_loss(several, monkeypatch):
    monkeypatch.setattr("clip_moe.evaluation.retrieval.QUERIES_AT_ONCE", 7)
    rng = np.random.default_rng(0)
    images = random_unit(rng, 40, 6)
    texts = images + 0.8 * random_unit(rng, 40, 6)
    texts /= np.linalg.norm(texts, axis=1, keepdims=True)
    text_images = np.arange(40) // 2 * 2 if several else np.arange(40)
    images, text_images = (images[::2], text_images // 2) if several else (images, text_images)
    wanted = ("image_to_text_information", "text_to_image_information")
    metrics = retrieval_metrics(images, texts, text_images, wanted=wanted)
    for way, scores, right in (
        (wanted[0], images @ texts.T, np.arange(len(images))[:, None] == text_images),
        (wanted[1], texts @ images.T, text_images[:, None] == np.arange(len(images))),
    ):
        losses = []
        for scale in np.exp(np.linspace(-3, 8, 2000)):
            shares = torch.tensor(scale * scores).double().softmax(dim=1).numpy()
            losses.append(-np.log((shares * right).sum(axis=1)).mean())
        assert metrics[way] == pytest.approx(1 - min(losses) / -np.log(right.mean(axis=1)).mean(), abs=1e-5)
        assert 0.05 < metrics[way] < 0.9


# ---- pairs


@pytest.mark.parametrize("score", ["text", "image", "group"])
@pytest.mark.parametrize("ties", [False, True])
def test_pairs_are_the_obvious_loop(score, ties):
    rng = np.random.default_rng(0)
    images, texts = random_unit(rng, 60, 2, 3), random_unit(rng, 60, 2, 3)
    if ties:  # also such as two batches make of one caption, in their last bits
        images, texts = images.round(), np.where(rng.random((60, 1, 1)) < 0.5, texts, texts[:, :1] * (1 + 1e-7))
    attributes, right = ["a", "b", "c"] * 20, {"text": [], "image": [], "group": []}
    for (i0, i1), (t0, t1) in zip(images, texts, strict=True):
        right["text"].append(i0 @ t0 > i0 @ t1 + TIE and i1 @ t1 > i1 @ t0 + TIE)
        right["image"].append(i0 @ t0 > i1 @ t0 + TIE and i1 @ t1 > i0 @ t1 + TIE)
        right["group"].append(right["text"][-1] and right["image"][-1])
    expected = {name: np.mean(found) for name, found in right.items()}
    assert pair_metrics(images, texts, None, score) == pytest.approx(expected)
    expected |= {f"{score}/{name}": np.mean(right[score][number::3]) for number, name in enumerate("abc")}
    for kind in (list, tuple, np.array):
        assert pair_metrics(images, texts, kind(attributes), score) == pytest.approx(expected)


# ---- linear probes


def problem(num_samples, seed, noise=1.0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(4, size=num_samples) * 3 + 5  # which need not begin with zero
    return np.eye(4, 12)[labels // 3 - 1] * 2 + rng.normal(size=(num_samples, 12)) * noise, labels


@pytest.mark.parametrize("most_numbers", [10**6, 0], ids=["scikit-learn", "torch"])
def test_a_probe_is_as_good_as_the_best_strength(most_numbers, monkeypatch):
    monkeypatch.setattr("clip_moe.evaluation.linear_probe.MOST_NUMBERS_FOR_SCIKIT", most_numbers)
    train, test = problem(5000, 0, noise=0.05), problem(100, 1, noise=0.05)
    assert linear_probe_metrics(*train, *test) == {"accuracy": 1.0, "mean_per_class_recall": 1.0}
    train, test = problem(20_000, 0), problem(4000, 1)  # torch's are as many steps as there are batches
    best = max(LogisticRegression(C=c, max_iter=1000).fit(*train).score(*test) for c in (0.01, 0.1, 1, 10, 100))
    found = linear_probe_metrics(*train, *test)
    assert best - 0.01 < found["accuracy"] < 0.99
    assert found == linear_probe_metrics(*train, *test)


# ---- what has no score

THREE, PROBE = unit([0, 90, 180]), problem(40, 0)


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (lambda: retrieval_metrics(THREE[:2], THREE[:2], [0, 0]), "image_of_text"),
        (lambda: retrieval_metrics(THREE[:2], THREE[:2], [0, 2]), "image_of_text"),
        (lambda: retrieval_metrics(THREE[:2], THREE[:2], [0]), "image_of_text"),
        (lambda: linear_probe_metrics(*PROBE, PROBE[0], np.full(40, 9)), r"no image of the classes \[9\]"),
        (lambda: class_embeddings(np.array([[[1.0], [-1.0]]])), "a class's prompts sum to zero: choose other"),
    ],
)
def test_what_has_no_score(compute, message):
    with pytest.raises(ValueError, match=message):
        compute()
