"""Clusters: K-means of all features and of a sample, balanced K-means, experts' labels, and their files."""

import numpy as np
import pytest
import torch
from datasets import Image
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import KMeans
from sklearn.metrics import pairwise_distances
from threadpoolctl import threadpool_limits

from clip_moe.data.identity import data_fingerprint
from clip_moe.data.symbols import SYMBOLS
from clip_moe.training import clusters as module
from clip_moe.training.clusters import Clusters, accumulate, balanced_kmeans, kmeans, load_clusters

CORNERS = np.array([[1, 0], [0, 1], [-1, 0]], dtype=np.float32)


@pytest.fixture(params=[False, True], ids=["all features", "a sample"])
def samples(request, monkeypatch):
    """Whether centers are learned from a sample, as of many features."""
    if request.param:
        monkeypatch.setattr(module, "MANY", 1)


def corners(per_cluster=20):
    truth = np.tile(np.arange(3), per_cluster)
    return (CORNERS[truth] + np.random.default_rng(0).normal(0, 0.05, (len(truth), 2))).astype(np.float32), truth


def noise(rows=3000, size=16):
    return np.random.default_rng(0).normal(size=(rows, size)).astype(np.float32)


def blobs(num_samples, num_blobs, seed=0, weights=None):
    rng = np.random.default_rng(seed)
    means = rng.normal(size=(num_blobs, 8)) * 2
    points = means[rng.choice(num_blobs, num_samples, p=weights)] + rng.normal(size=(num_samples, 8)) * 0.5
    return (points / np.linalg.norm(points, axis=1, keepdims=True)).astype(np.float32)


def inertia(features, labels):
    means = np.stack([features[labels == label].mean(axis=0) for label in range(labels.max() + 1)])
    return ((features - means[labels]) ** 2).sum()


def test_kmeans(samples):
    features, truth = corners()
    assert len({*zip(kmeans(features, 3, 0), truth, strict=True)}) == 3  # the same up to names
    first, second, other = (kmeans(noise(), 8, seed) for seed in (2**32 - 1, 2**32 - 1, 1))
    assert np.array_equal(first, second) and not np.array_equal(first, other)
    half = (features * (300 / np.abs(features).max())).astype(np.float16)  # whose squares have no sum in float16
    assert np.array_equal(kmeans(half, 3, 0), kmeans(half.astype(np.float32), 3, 0))
    rows = np.arange(1, 3000, 3)
    assert np.array_equal(kmeans(noise(), 4, 0, rows=rows), kmeans(noise()[rows], 4, 0))


def test_what_cannot_be_clustered(samples):
    for features, message in (
        (CORNERS[:2], "n_samples=2 should be >= n_clusters=3"),
        (np.ones((1000, 2), np.float32), "only 1 of 3 clusters of image features have samples: .* of the 1000 image"),
        (CORNERS[[0, 1, 1, 0]], "only 2 of 3 clusters"),
    ):
        with pytest.raises(ValueError, match=message):
            kmeans(features, 3, 0, "image features")


def test_few_features_have_ten_starts():
    with threadpool_limits(1):
        expected = KMeans(4, n_init=10, random_state=3).fit_predict(noise(500))
    assert np.array_equal(kmeans(noise(500), 4, 3), expected)


class Reluctant(np.ndarray):
    """Features of which no more than 400 rows are given at a time."""

    def __getitem__(self, rows):
        assert len(rows) <= 400
        return self.view(np.ndarray)[rows]


def test_many_features_are_read_as_a_sample_and_in_chunks(monkeypatch):
    """The labels do not depend on the chunks, and every feature goes to the nearest center, also out of the sample."""
    monkeypatch.setattr(module, "MANY", 1)
    features = noise()
    expected = kmeans(features, 8, 0, num_samples=400)
    monkeypatch.setattr(module, "CHUNK", 256)
    found = module.split({"image": features.view(Reluctant)}, {"image": 8}, 0, num_samples=400)["image"]
    assert np.array_equal(found, expected)
    assert inertia(features, expected) < 1.05 * KMeans(8, n_init=3, random_state=0).fit(features).inertia_


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 200), st.integers(1, 20), st.integers(0, 5), st.integers(1, 4))
def test_no_balanced_cluster_is_larger_than_its_share(num_samples, num_clusters, seed, num_blobs):
    features = blobs(num_samples, num_blobs, seed)
    if num_samples < num_clusters:
        with pytest.raises(ValueError, match=f"n_samples={num_samples} should be >= n_clusters={num_clusters}"):
            balanced_kmeans(features, num_clusters, seed)
        return
    centers, labels = balanced_kmeans(features, num_clusters, seed)
    sizes = np.bincount(labels, minlength=num_clusters)
    assert centers.shape == (num_clusters, 8) and sizes.sum() == num_samples
    assert sizes.max() <= -(-num_samples // num_clusters)
    again = balanced_kmeans(features, num_clusters, seed)
    assert np.array_equal(centers, again[0]) and np.array_equal(labels, again[1])


def test_a_balanced_cluster_without_samples_keeps_its_center():
    features = np.repeat([[1.0, 2.0], [3.0, 4.0]], 2, axis=0)  # two different ones for three clusters
    centers, labels = balanced_kmeans(features, 3, 0)
    assert len(np.unique(labels)) == 2 and {*map(tuple, centers)} == {(1.0, 2.0), (3.0, 4.0)}


def test_balanced_assignment_is_stable():
    """No sample and center would both rather have each other than what they have (Gale and Shapley 1962)."""
    features = blobs(300, 4, weights=[0.7, 0.1, 0.1, 0.1])
    centers = balanced_kmeans(features, 6, 0, iterations=1)[0]
    labels = module.assign_balanced(torch.as_tensor(features), torch.as_tensor(centers), 50).numpy()
    distances = pairwise_distances(features, centers, "sqeuclidean")
    own = distances[np.arange(300), labels]
    worst = np.array([own[labels == center].max() for center in range(6)])
    full = np.bincount(labels, minlength=6) == 50
    assert full.any()
    for sample, center in np.argwhere(distances < own[:, None] - 1e-5):
        assert full[center] and distances[sample, center] > worst[center] - 1e-5


def test_balanced_clusters_of_equal_blobs_are_those_of_kmeans():
    features = blobs(2000, 10)
    labels = balanced_kmeans(features, 10, 0)[1]
    assert inertia(features, labels) < 1.5 * KMeans(10, random_state=0).fit(features).inertia_
    even, truth = corners(50)
    assert len({*zip(balanced_kmeans(even, 3, 0)[1], truth, strict=True)}) == 3


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_nearest_centers_are_the_nearest(dtype):
    features, centers = blobs(9000, 5).astype(dtype), blobs(40, 5, seed=1)
    found = module.nearest_centers(features, torch.as_tensor(centers))
    distances = pairwise_distances(features.astype(np.float64), centers.astype(np.float64), "sqeuclidean")
    np.testing.assert_allclose(distances[np.arange(9000), found], distances.min(axis=1), atol=1e-5)


def test_split_by_modality_and_within_groups():
    image, truth = corners()
    features = {"image": image, "text": image[::-1]}
    labels = module.split(features, {"image": 3, "text": 1, "random": 2}, seed=0)
    assert list(labels) == ["image", "random"]
    assert (labels["image"] == kmeans(image, 3, 0)).all()
    assert np.bincount(labels["random"]).tolist() == [30, 30]
    within = module.split(features, {"image": 2, "random": 4}, seed=0, groups=truth)
    for group in range(3):
        members = truth == group
        assert (within["image"][members] == kmeans(image[members], 2, 0)).all()
        assert np.bincount(within["random"][members]).tolist() == [5, 5, 5, 5]


def test_labels_accumulate_over_stages():
    features = np.arange(12, dtype=np.float64).reshape(6, 2)
    first = accumulate(np.array([1, 1, 0, 0, 1, 0]), [features])
    assert first.tuples.tolist() == [[0], [1]]
    second = accumulate(np.array([5, 7, 5, 5, 5, 7]), [features], first)
    assert second.tuples[second.labels].tolist() == [[1, 5], [1, 7], [0, 5], [0, 5], [1, 5], [0, 7]]
    assert len(second.tuples) == 4  # the fifth combination does not occur
    np.testing.assert_array_equal(second.centers[second.labels[0]], features[[0, 4]].mean(axis=0))
    labels, names = module.combine({"image": np.array([10, 2, 2, 10]), "text": np.array([0, 1, 0, 0])})
    assert names[labels].tolist() == ["image 10, text 0", "image 2, text 1", "image 2, text 0", "image 10, text 0"]


def test_centers_are_means(monkeypatch):
    """To the bit of plain means where the features are one chunk, and to rounding where they are many."""
    rng = np.random.default_rng(0)
    image, text = (rng.normal(size=(500, size)).astype(np.float32) for size in (5, 3))
    labels, both = rng.integers(7, size=500), np.concatenate([image, text], axis=1)
    expected = np.stack([both[labels == label].mean(axis=0) for label in range(7)])
    found = accumulate(labels, [image, text]).centers
    assert found.dtype == np.float32 and np.array_equal(found, expected)
    monkeypatch.setattr(module, "CHUNK", 64)
    np.testing.assert_allclose(accumulate(labels, [image, text]).centers, expected, rtol=1e-4, atol=1e-6)


def test_experts_are_numbered_by_range():
    rng = np.random.default_rng(0)
    tight = np.array([1, 0, 0]) + rng.normal(size=(10, 3)) * 0.01
    wide = np.array([0, 1, 0]) + rng.normal(size=(10, 3)) * 0.2
    centers = np.concatenate([tight, wide]).astype(np.float32)
    expert_of_center, coarse = module.group_centers(centers, 2, seed=0)
    assert (expert_of_center[:10] == 1).all() and (expert_of_center[10:] == 0).all()
    np.testing.assert_allclose(coarse[0], centers[10:].mean(axis=0), atol=1e-6)
    ranges = module.center_ranges(centers, expert_of_center, coarse)
    expected = [np.mean([np.linalg.norm(c - coarse[i]) for c in part]) for i, part in enumerate((wide, tight))]
    np.testing.assert_allclose(ranges, expected, atol=1e-4)
    assert ranges[0] > ranges[1]
    expert_of_center, coarse = module.group_centers(centers[:5], 5, seed=0)  # as many experts as centers
    np.testing.assert_allclose(coarse[expert_of_center], centers[:5])


def test_labels_know_their_data(tmp_path):
    rows = SYMBOLS.load("train", "detailed", 30)
    feature_clusters = accumulate(np.arange(30) % 4, [noise(30, 3)])
    center_clusters = Clusters(np.array([0, -1]), np.eye(2, 3), np.array([[0], [1]]), np.eye(3), np.array([0, 1, -1]))
    encoded = list(rows.cast_column("image", Image(decode=False))["image"])
    others = [
        rows.select([1, 0, *range(2, 30)]),
        rows.select(range(29)),
        SYMBOLS.load("train", "detailed", 30, seed=1),
        SYMBOLS.load("train", "web", 30),
        # The same captions with other images, which have no names
        rows.remove_columns("image").add_column("image", encoded[::-1]),
    ]
    for clusters in (feature_clusters, center_clusters):
        module.save_clusters(tmp_path, clusters, dataset_fingerprint=data_fingerprint(rows), pairs="readable")
        loaded, about = load_clusters(tmp_path, data_fingerprint(SYMBOLS.load("train", "detailed", 30)))
        assert about["pairs"] == "readable"
        assert all(np.array_equal(getattr(loaded, name), array) for name, array in vars(clusters).items())
    for other in others:
        with pytest.raises(ValueError, match="belong to another dataset, another order"):
            load_clusters(tmp_path, data_fingerprint(other))
    file = tmp_path / module.CLUSTERS
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="is damaged"):
        load_clusters(tmp_path)
    with pytest.raises(FileNotFoundError, match=f"{file.name} is missing: .* not the folder of a cluster stage"):
        load_clusters(tmp_path / "other")
