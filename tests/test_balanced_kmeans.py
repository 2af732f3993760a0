"""Balanced K-means and nearest centers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import KMeans
from sklearn.metrics import pairwise_distances

from training.balanced_kmeans import assign_balanced, balanced_kmeans, nearest_centers


def blobs(num_samples, num_blobs, size=8, seed=0, weights=None):
    rng = np.random.default_rng(seed)
    means = rng.normal(size=(num_blobs, size)) * 2
    points = means[rng.choice(num_blobs, num_samples, p=weights)] + rng.normal(size=(num_samples, size)) * 0.5
    return (points / np.linalg.norm(points, axis=1, keepdims=True)).astype(np.float32)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 200), st.integers(1, 20), st.integers(0, 5), st.integers(1, 4))
def test_no_cluster_is_larger_than_its_share(num_samples, num_clusters, seed, num_blobs):
    features = blobs(num_samples, num_blobs, seed=seed)
    if num_samples < num_clusters:
        with pytest.raises(ValueError, match=f"{num_samples} samples cannot make {num_clusters} clusters"):
            balanced_kmeans(features, num_clusters, seed)
        return
    centers, labels = balanced_kmeans(features, num_clusters, seed)
    sizes = np.bincount(labels, minlength=num_clusters)
    assert centers.shape == (num_clusters, 8) and sizes.sum() == num_samples
    assert sizes.max() <= -(-num_samples // num_clusters)
    again = balanced_kmeans(features, num_clusters, seed)
    assert np.array_equal(centers, again[0]) and np.array_equal(labels, again[1])


def test_assignment_is_stable():
    """No sample and center would both rather have each other than what they have (Gale and Shapley 1962)."""
    features = blobs(300, 4, weights=[0.7, 0.1, 0.1, 0.1])
    centers = balanced_kmeans(features, 6, 0, iterations=1)[0]
    labels = assign_balanced(torch.as_tensor(features), torch.as_tensor(centers), 50).numpy()
    distances = pairwise_distances(features, centers, "sqeuclidean")
    own = distances[np.arange(300), labels]
    worst = np.array([own[labels == center].max() for center in range(6)])
    full = np.bincount(labels, minlength=6) == 50
    assert full.any()
    for sample in range(300):
        for center in range(6):
            if distances[sample, center] < own[sample] - 1e-5:
                assert full[center] and distances[sample, center] > worst[center] - 1e-5


def test_equal_clusters_are_found():
    features = blobs(400, 4)
    order = np.argsort(KMeans(4, random_state=0).fit_predict(features), kind="stable")
    even = features[order]
    expected = KMeans(4, random_state=0).fit_predict(even)
    sizes = np.bincount(expected)
    even = np.concatenate([even[expected == k][: sizes.min()] for k in range(4)])
    labels = balanced_kmeans(even, 4, 0)[1].reshape(4, -1)
    assert (labels == labels[:, :1]).all() and len(set(labels[:, 0])) == 4


def test_cost_is_near_that_of_kmeans_where_sizes_allow_it():
    features = blobs(2000, 10)
    centers, labels = balanced_kmeans(features, 10, 0)
    free = KMeans(10, random_state=0).fit(features)
    assert ((features - centers[labels]) ** 2).sum() < 1.5 * free.inertia_


def test_features_that_are_not_finite_are_refused():
    features = blobs(20, 2)
    features[3, 1] = np.nan
    with pytest.raises(ValueError, match="not finite"):
        balanced_kmeans(features, 2, 0)
    with pytest.raises(ValueError, match="rows 0 to 19 are not all finite"):
        nearest_centers(features, torch.zeros(2, 8))
    with pytest.raises(ValueError, match="size 8, the centers 5"):
        nearest_centers(features, torch.zeros(2, 5))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_nearest_centers_are_the_nearest(dtype):
    features, centers = blobs(9000, 5).astype(dtype), blobs(40, 5, seed=1)
    found = nearest_centers(features, torch.as_tensor(centers))
    distances = pairwise_distances(features.astype(np.float64), centers.astype(np.float64), "sqeuclidean")
    np.testing.assert_allclose(distances[np.arange(9000), found], distances.min(axis=1), atol=1e-5)
    assert found.dtype == np.int32
