"""Metrics against values by hand, scikit-learn's, and CLIP_benchmark's definition, on the same embeddings."""

import numpy as np
import pytest
import sklearn.metrics
import torch
from test_metrics import random_unit, unit

from evaluation.pairs import pair_metrics
from evaluation.retrieval import retrieval_metrics
from evaluation.zero_shot import zero_shot_metrics


def recalls(metrics, k=1):
    return metrics[f"image_to_text_recall@{k}"], metrics[f"text_to_image_recall@{k}"]


def test_several_captions_an_image_by_hand():
    # Image 0 at 0 degrees, with captions at 5 and 85; image 1 at 90, with one at 60.
    images, texts = unit([0, 90]), unit([5, 85, 60])
    metrics = retrieval_metrics(images, texts, [0, 0, 1], ks=(1, 2))
    # Image 0 finds 5. Image 1 is nearest to 85, a caption of image 0, then to 60. Of the captions, 85 finds image 1.
    assert recalls(metrics) == (0.5, pytest.approx(2 / 3)) and recalls(metrics, 2) == (1, 1)


def test_several_images_a_caption_by_hand():
    # Caption 0 is of the images at 0 and at 90 degrees, caption 1 of that at 45 alone.
    images, texts = unit([0, 90, 45]), unit([10, 80])
    metrics = retrieval_metrics(images, texts, [[0, 1], [2]], ks=(1, 2))
    # Image 0 finds caption 0, image 1 is nearer to caption 1; to image 2 both are as near: a tie is a miss.
    # Caption 0 finds image 0; caption 1 is nearest to image 1, then to image 2.
    assert recalls(metrics) == (pytest.approx(1 / 3), 0.5) and recalls(metrics, 2) == (1, 1)


@pytest.mark.parametrize("several", [False, True])
def test_information_is_what_the_best_temperature_leaves_of_the_loss(several):
    rng = np.random.default_rng(0)
    images = random_unit(rng, 40, 6)
    texts = images + 0.8 * random_unit(rng, 40, 6)
    texts /= np.linalg.norm(texts, axis=1, keepdims=True)
    of_text = np.arange(40) // 2 * 2 if several else np.arange(40)
    images, of_text = (images[::2], of_text // 2) if several else (images, of_text)
    wanted = ("image_to_text_information", "text_to_image_information")
    metrics = retrieval_metrics(images, texts, of_text, wanted=wanted, chunk_size=7)
    for way, scores, right in (
        (wanted[0], images @ texts.T, np.arange(len(images))[:, None] == of_text),
        (wanted[1], texts @ images.T, of_text[:, None] == np.arange(len(images))),
    ):
        losses = []
        for scale in np.exp(np.linspace(-3, 8, 2000)):
            shares = torch.tensor(scale * scores).double().softmax(dim=1).numpy()
            losses.append(-np.log((shares * right).sum(axis=1)).mean())
        assert metrics[way] == pytest.approx(1 - min(losses) / -np.log(right.mean(axis=1)).mean(), abs=1e-5)
        assert 0.05 < metrics[way] < 0.9


def test_no_information_and_all():
    images, wanted = random_unit(np.random.default_rng(0), 50, 8), ("image_to_text_information",)
    others = random_unit(np.random.default_rng(1), 50, 8)
    for texts, expected in ((images, 1), (others, 0)):
        metrics = retrieval_metrics(images, texts, np.arange(50), wanted=wanted)
        assert metrics["image_to_text_information"] == pytest.approx(expected, abs=0.02)
    assert retrieval_metrics(images[:1], images[:1], [0], wanted=wanted)["image_to_text_information"] == 1


@pytest.mark.parametrize("entries", [[[0], []], [[0, 1]], [[0], [2]]])
def test_several_images_a_caption_that_do_not_fit(entries):
    with pytest.raises(ValueError, match="image_of_text"):
        retrieval_metrics(unit([0, 90]), unit([0, 90]), entries)


def test_swapped_captions_are_noticed():
    images = random_unit(np.random.default_rng(0), 20, 8)
    right, swapped = np.arange(20), np.arange(20)
    swapped[[3, 7]] = swapped[[7, 3]]
    assert recalls(retrieval_metrics(images, images, right)) == (1, 1)
    assert recalls(retrieval_metrics(images, images, swapped)) == (0.9, 0.9)
    pairs = images.reshape(10, 2, 8)
    texts = pairs.copy()
    texts[4] = texts[4, ::-1]
    metrics = pair_metrics(pairs, texts, None)
    assert metrics == {"text": 0.9, "image": 0.9, "group": 0.9}
    # Two classes take each other's images
    metrics = zero_shot_metrics(images, images[swapped], right)
    assert metrics["accuracy"] == metrics["mean_per_class_recall"] == 0.9


def clip_benchmark_recall(scores, positive, k):
    """Its definition: among the k highest scores of a row there is a right one (metrics/zeroshot_retrieval.py)."""
    top = torch.topk(torch.tensor(scores), k, dim=1).indices
    return torch.gather(torch.tensor(positive), 1, top).any(dim=1).float().mean().item()


@pytest.mark.parametrize("captions", [1, 5])
def test_recall_is_that_of_clip_benchmark(captions):
    rng = np.random.default_rng(captions)
    images = random_unit(rng, 60, 6)
    texts = images.repeat(captions, axis=0) + rng.normal(size=(60 * captions, 6))
    texts /= np.linalg.norm(texts, axis=1, keepdims=True)
    image_of_text = np.arange(60).repeat(captions)
    metrics, positive = retrieval_metrics(images, texts, image_of_text), np.arange(60)[:, None] == image_of_text
    for k in (1, 5, 10):
        expected = (
            clip_benchmark_recall(images @ texts.T, positive, k),
            clip_benchmark_recall(texts @ images.T, positive.T, k),
        )
        assert recalls(metrics, k) == pytest.approx(expected) and 0 < expected[0] < 1


def test_recall_differs_from_clip_benchmark_in_ties_alone():
    """Equal embeddings: its share depends on the order of equal values, ours is none."""
    images = np.repeat(unit([0]), 4, axis=0)
    positive = np.eye(4, dtype=bool)
    assert 0 < clip_benchmark_recall(images @ images.T, positive, 1) < 1
    assert recalls(retrieval_metrics(images, images, np.arange(4))) == (0, 0)


def test_accuracy_and_roc_auc_are_those_of_scikit_learn():
    rng = np.random.default_rng(0)
    classes, labels = random_unit(rng, 2, 4), rng.integers(0, 2, 200)
    images = random_unit(rng, 200, 4) + 0.5 * classes[labels]
    similarity = images @ classes.T
    metrics = zero_shot_metrics(images, classes, labels, ["roc_auc"])
    assert metrics["accuracy"] == sklearn.metrics.accuracy_score(labels, similarity.argmax(axis=1))
    assert metrics["roc_auc"] == sklearn.metrics.roc_auc_score(labels, similarity[:, 1] - similarity[:, 0])
    assert metrics["mean_per_class_recall"] == sklearn.metrics.balanced_accuracy_score(
        labels, similarity.argmax(axis=1)
    )
    assert 0.5 < metrics["roc_auc"] < 1
    inverted = zero_shot_metrics(images, classes[::-1], labels, ["roc_auc"])
    assert inverted["roc_auc"] == pytest.approx(1 - metrics["roc_auc"])


def test_accuracy_by_hand_with_ties():
    # All six classes are equally near: the first is the nearest, and the last five are among the five nearest.
    six = np.tile(np.float32([[1, 0]]), (6, 1))
    for label, found in ((0, (1, 0)), (1, (0, 1)), (5, (0, 1))):
        metrics = zero_shot_metrics(six[:1], six, np.array([label]))
        assert (metrics["accuracy"], metrics["accuracy_top5"]) == found


def test_roc_auc_by_hand_with_a_tie():
    # Scores are the sine less the cosine: they rise with the angle. Of 2 x 2 pairs of a negative and a positive, two
    # are right, one is a tie, which counts half, and one is wrong.
    metrics = zero_shot_metrics(unit([10, 50, 50, 30]), unit([0, 90]), np.array([0, 0, 1, 1]), ["roc_auc"])
    assert metrics["roc_auc"] == (2 + 0.5) / 4


def test_mean_of_top1_and_top5_by_hand():
    classes = unit([0, 20, 40, 60, 80, 100, 120])
    # Nearest is the first, the third, and of the last image all but the sixth and the seventh are nearer
    metrics = zero_shot_metrics(unit([0, 5, 30]), classes, np.array([0, 2, 6]), ["mean_of_top1_and_top5"])
    assert metrics["accuracy"] == pytest.approx(1 / 3) and metrics["accuracy_top5"] == pytest.approx(2 / 3)
    assert metrics["mean_of_top1_and_top5"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("number", "labels", "wanted", "message"),
    [
        (5, [0, 1], "mean_of_top1_and_top5", "of more than five classes, not of 5"),
        (3, [0, 1], "roc_auc", "of two classes that both have images, not of 2 of 3"),
        (2, [1, 1], "roc_auc", "not of 1 of 2"),
    ],
)
def test_metrics_without_a_meaning(number, labels, wanted, message):
    with pytest.raises(ValueError, match=message):
        zero_shot_metrics(unit([0, 1]), unit(range(number)), np.array(labels), [wanted])


def test_mean_per_class_by_hand():
    # Three images of the first class, all found; one of the second, not found; none of the third.
    metrics = zero_shot_metrics(unit([0, 1, 2, 3]), unit([0, 90, 180]), np.array([0, 0, 0, 1]))
    assert metrics == {"accuracy": 0.75, "mean_per_class_recall": 0.5}


@pytest.mark.parametrize(("score", "shares"), [("image", [0.5, 0.5]), ("text", [0.5, 1.0]), ("group", [0.5, 0.5])])
def test_a_score_by_pattern(score, shares):
    # Right; swapped; caption 1 is nearer to image 0, though image 1 prefers it; right by two degrees
    images, texts = unit([[0, 90]] * 4), unit([[10, 80], [80, 10], [5, 44], [10, 46]])
    metrics = pair_metrics(images, texts, ["a", "a", "b", "b"], score)
    assert [metrics[f"{score}/a"], metrics[f"{score}/b"]] == shares
    assert metrics[score] == np.mean(shares)
    assert {name.split("/")[0] for name in metrics if "/" in name} == {score}
