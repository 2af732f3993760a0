"""Clusters: what comes out by hand, and what cannot be clustered."""

import numpy as np
import pytest
from datasets import Image
from safetensors.numpy import save_file

from data import symbols
from data.identity import data_fingerprint
from training import feature_clusters
from training.feature_clusters import (
    FEATURE_CLUSTERS,
    accumulate,
    combine,
    load_feature_clusters,
    save_feature_clusters,
    split,
)
from training.kmeans import kmeans

CORNERS = np.array([[1, 0], [0, 1], [-1, 0]], dtype=np.float32)


def blobs(per_cluster=20):
    truth = np.repeat(np.arange(3), per_cluster)
    noise = np.random.default_rng(0).normal(0, 0.05, (len(truth), 2))
    return (CORNERS[truth] + noise).astype(np.float32), truth


def test_split_by_modality_and_within_groups():
    image, truth = blobs()
    text = image[::-1]
    features = {"image": image, "text": text}
    labels = split(features, {"image": 3, "text": 1, "random": 2}, seed=0)
    assert list(labels) == ["image", "random"]
    assert (labels["image"] == kmeans(image, 3, 0)).all()
    assert np.bincount(labels["random"]).tolist() == [30, 30]
    within = split(features, {"image": 2, "random": 4}, seed=0, groups=truth)
    for group in range(3):
        members = truth == group
        assert (within["image"][members] == kmeans(image[members], 2, 0)).all()
        assert np.bincount(within["random"][members]).tolist() == [5, 5, 5, 5]
    with pytest.raises(ValueError, match="20 samples cannot make 21 clusters of image features of cluster 0"):
        split(features, {"image": 21}, 0, truth)
    with pytest.raises(ValueError, match="20 samples of cluster 0 cannot make 21 random clusters"):
        split(features, {"random": 21}, 0, truth)


def test_labels_accumulate_over_stages():
    features = np.arange(12, dtype=np.float64).reshape(6, 2)
    first = accumulate(np.array([1, 1, 0, 0, 1, 0]), [features])
    assert first.tuples.tolist() == [[0], [1]]
    second = accumulate(np.array([5, 7, 5, 5, 5, 7]), [features], first)
    assert second.tuples[second.labels].tolist() == [[1, 5], [1, 7], [0, 5], [0, 5], [1, 5], [0, 7]]
    assert len(second.tuples) == 4  # the fifth combination does not occur
    np.testing.assert_array_equal(second.centers[second.labels[0]], features[[0, 4]].mean(axis=0))
    with pytest.raises(ValueError, match="5 samples, but the previous clusters have 6"):
        accumulate(np.zeros(5, int), [features[:5]], first)


def test_centers_are_means(monkeypatch):
    """To the bit of plain means where the features are one chunk, and to rounding where they are many."""
    rng = np.random.default_rng(0)
    image, text = (rng.normal(size=(500, size)).astype(np.float32) for size in (5, 3))
    labels = rng.integers(7, size=500)
    both = np.concatenate([image, text], axis=1)
    expected = np.stack([both[labels == label].mean(axis=0) for label in range(7)])
    found = accumulate(labels, [image, text]).centers
    assert found.dtype == np.float32 and np.array_equal(found, expected)
    monkeypatch.setattr(feature_clusters, "CHUNK", 64)
    np.testing.assert_allclose(accumulate(labels, [image, text]).centers, expected, rtol=1e-4, atol=1e-6)


def test_combinations_are_named():
    labels, names = combine({"image": np.array([10, 2, 2, 10]), "text": np.array([0, 1, 0, 0])})
    assert names[labels].tolist() == ["image 10, text 0", "image 2, text 1", "image 2, text 0", "image 10, text 0"]


def test_labels_know_their_data(tmp_path):
    rows = symbols.load("train", "detailed", 30)
    clusters = accumulate(np.arange(30) % 4, [np.random.default_rng(0).normal(size=(30, 3))])
    save_feature_clusters(tmp_path, clusters, data_fingerprint(rows))
    loaded = load_feature_clusters(tmp_path, data_fingerprint(symbols.load("train", "detailed", 30)))
    assert (loaded.labels == clusters.labels).all() and (loaded.centers == clusters.centers).all()
    encoded = list(rows.cast_column("image", Image(decode=False))["image"])
    for other in (
        rows.select([1, 0, *range(2, 30)]),
        rows.select(range(29)),
        symbols.load("train", "detailed", 30, seed=1),
        symbols.load("train", "web", 30),
        # The same captions with other images, which have no names
        rows.remove_columns("image").add_column("image", encoded[::-1]),
    ):
        with pytest.raises(ValueError, match="belong to another dataset, another order"):
            load_feature_clusters(tmp_path, data_fingerprint(other))


def test_damaged_or_missing_labels(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=f"{FEATURE_CLUSTERS} is not there: .* is not the folder of a cluster stage"
    ):
        load_feature_clusters(tmp_path, "")
    save_file({"labels": np.zeros(3)}, tmp_path / FEATURE_CLUSTERS, {"dataset_fingerprint": ""})
    whole = (tmp_path / FEATURE_CLUSTERS).read_bytes()
    (tmp_path / FEATURE_CLUSTERS).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="is damaged"):
        load_feature_clusters(tmp_path, "")
