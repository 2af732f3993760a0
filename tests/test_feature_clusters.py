"""Clusters: what comes out by hand, and what cannot be clustered."""

import numpy as np
import pytest
from datasets import Image
from safetensors.numpy import save_file

from data import glyphs
from data.identity import data_fingerprint
from training.feature_clusters import (
    FEATURE_CLUSTERS,
    accumulate,
    kmeans,
    load_feature_clusters,
    save_feature_clusters,
    split,
)

CORNERS = np.array([[1, 0], [0, 1], [-1, 0]], dtype=np.float32)


def blobs(per_cluster=20):
    truth = np.repeat(np.arange(3), per_cluster)
    noise = np.random.default_rng(0).normal(0, 0.05, (len(truth), 2))
    return (CORNERS[truth] + noise).astype(np.float32), truth


def test_kmeans_finds_what_is_there():
    features, truth = blobs()
    labels = kmeans(features, 3, seed=0)
    assert len({(a, b) for a, b in zip(labels, truth, strict=True)}) == 3  # the same up to names
    assert (labels == kmeans(features, 3, seed=0)).all()


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (CORNERS[:2], "2 samples cannot make 3 clusters of image features"),
        (np.ones((10, 2), np.float32), "only 1 of 3 clusters of image features have samples"),
        (CORNERS[[0, 1, 1, 0]], "only 2 of 3 clusters"),
        (np.full((10, 2), np.nan, np.float32), "the image features are not finite"),
    ],
    ids=["too few", "all equal", "an empty cluster", "nan"],
)
def test_what_cannot_be_clustered(features, message):
    with pytest.raises(ValueError, match=message):
        kmeans(features, 3, 0, "image features")


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
    first = accumulate(np.array([1, 1, 0, 0, 1, 0]), features)
    assert first.tuples.tolist() == [[0], [1]]
    second = accumulate(np.array([5, 7, 5, 5, 5, 7]), features, first)
    assert second.tuples[second.labels].tolist() == [[1, 5], [1, 7], [0, 5], [0, 5], [1, 5], [0, 7]]
    assert len(second.tuples) == 4  # the fifth combination does not occur
    np.testing.assert_array_equal(second.centers[second.labels[0]], features[[0, 4]].mean(axis=0))
    with pytest.raises(ValueError, match="5 samples, but the previous clusters have 6"):
        accumulate(np.zeros(5, int), features[:5], first)


def test_labels_know_their_data(tmp_path):
    rows = glyphs.load("train", "detailed", 30)
    clusters = accumulate(np.arange(30) % 4, np.random.default_rng(0).normal(size=(30, 3)))
    save_feature_clusters(tmp_path, clusters, data_fingerprint(rows))
    loaded = load_feature_clusters(tmp_path, data_fingerprint(glyphs.load("train", "detailed", 30)))
    assert (loaded.labels == clusters.labels).all() and (loaded.centers == clusters.centers).all()
    encoded = list(rows.cast_column("image", Image(decode=False))["image"])
    for other in (
        rows.select([1, 0, *range(2, 30)]),
        rows.select(range(29)),
        glyphs.load("train", "detailed", 30, seed=1),
        glyphs.load("train", "web", 30),
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
