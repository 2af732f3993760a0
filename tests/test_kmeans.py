"""K-means by scikit-learn and by faiss: what is found, what is refused, how much is held, and that it is repeatable."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from sklearn.cluster import KMeans
from threadpoolctl import threadpool_limits

from training import kmeans as module
from training.estimates import Expected
from training.kmeans import MANY, Method, choose_method, kmeans
from training.stages.features import ClusterStage

CORNERS = np.array([[1, 0], [0, 1], [-1, 0]], dtype=np.float32)
BY_SCIKIT_LEARN, BY_FAISS = Method(), Method("faiss", n_init=1)


@pytest.fixture(params=[BY_SCIKIT_LEARN, BY_FAISS], ids=["scikit-learn", "faiss"])
def method(request):
    if request.param.library == "faiss":
        pytest.importorskip("faiss", reason="faiss-cpu of the faiss extra is not installed")
    return request.param


@pytest.fixture
def by_faiss():
    pytest.importorskip("faiss", reason="faiss-cpu of the faiss extra is not installed")
    return BY_FAISS


def blobs(per_cluster=20):
    truth = np.tile(np.arange(3), per_cluster)
    noise = np.random.default_rng(0).normal(0, 0.05, (len(truth), 2))
    return (CORNERS[truth] + noise).astype(np.float32), truth


def noise(rows=3000, size=16):
    return np.random.default_rng(0).normal(size=(rows, size)).astype(np.float32)


class Reluctant:
    """Features of which no more than some rows are given at a time."""

    def __init__(self, features, most):
        self.features, self.most = features, most

    def __len__(self):
        return len(self.features)

    def __getitem__(self, rows):
        assert len(rows) <= self.most
        return self.features[rows]


def test_clusters_are_found(method):
    features, truth = blobs()
    labels = kmeans(features, 3, 0, method=method)
    assert len({(a, b) for a, b in zip(labels, truth, strict=True)}) == 3  # the same up to names


def test_half_precision(method):
    """Squares of which float16 holds no sum."""
    features, _ = blobs()
    features = features * (300 / np.abs(features).max())
    assert np.square(features).sum(axis=1).max() > np.finfo(np.float16).max
    assert np.array_equal(
        kmeans(features.astype(np.float16), 3, 0, method=method),
        kmeans(features.astype(np.float16).astype(np.float32), 3, 0, method=method),
    )


def test_repeatable_to_the_bit(method):
    first, second, other = (kmeans(noise(), 8, seed, method=method) for seed in (2**32 - 1, 2**32 - 1, 1))
    assert np.array_equal(first, second) and not np.array_equal(first, other)


def test_some_rows_alone(method):
    features, rows = noise(), np.arange(1, 3000, 3)
    assert np.array_equal(kmeans(features, 4, 0, method=method, rows=rows), kmeans(features[rows], 4, 0, method=method))


def test_few_features_are_clustered_as_scikit_learn_does():
    with threadpool_limits(1):
        expected = KMeans(4, n_init=10, random_state=3).fit_predict(noise(500))
    assert choose_method(MANY) == BY_SCIKIT_LEARN
    assert np.array_equal(kmeans(noise(500), 4, 3, method=choose_method(500)), expected)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (CORNERS[:2], "2 samples cannot make 3 clusters of image features"),
        (np.ones((1000, 2), np.float32), "only 1 of 3 clusters of image features have samples: .* of the 1000 image"),
        (CORNERS[[0, 1, 1, 0]], "only 2 of 3 clusters"),
        (np.full((10, 2), np.nan, np.float32), "the image features are not finite"),
        (np.full((10, 2), np.inf, np.float32), "the image features are not finite"),
    ],
    ids=["too few", "all equal", "an empty cluster", "nan", "infinite"],
)
def test_what_cannot_be_clustered(features, message, method):
    with pytest.raises(ValueError, match=message):
        kmeans(features, 3, 0, "image features", method)


def test_millions_start_once_and_by_faiss():
    assert choose_method(MANY + 1) == Method("faiss", n_init=1)
    assert choose_method(MANY + 1, "scikit-learn", num_samples=5) == Method("scikit-learn", 1, 5)
    assert choose_method(MANY, "faiss", 3) == Method("faiss", 3)


def test_samples_grow_with_the_clusters():
    assert [BY_FAISS.samples(number) for number in (4, 256, 1024)] == [65_536, 65_536, 262_144]
    assert Method("faiss", num_samples=5).samples(1024) == 5


def test_faiss_holds_a_sample_and_a_chunk(by_faiss, monkeypatch):
    """The labels do not depend on the chunks, and every feature goes to the nearest center, also out of the sample."""
    features, method = noise(), Method("faiss", 1, num_samples=400)
    expected = kmeans(features, 8, 0, method=method)
    monkeypatch.setattr(module, "CHUNK", 256)
    labels = kmeans(Reluctant(features, 400), 8, 0, method=method)
    assert np.array_equal(labels, expected) and len(labels) == 3000
    means = np.stack([features[labels == label].mean(axis=0) for label in range(8)])
    cost = ((features - means[labels]) ** 2).sum()
    assert cost < 1.05 * KMeans(8, n_init=3, random_state=0).fit(features).inertia_


def test_faiss_sees_features_out_of_the_sample_that_are_not_finite(by_faiss):
    features = noise()
    for row in range(0, 3000, 10):  # one that is not in the sample of four
        damaged = features.copy()
        damaged[row] = np.nan
        with pytest.raises(ValueError, match="the features are not finite"):
            kmeans(damaged, 2, 0, method=Method("faiss", 1, num_samples=4))


def test_more_starts_of_faiss_cost_no_more(by_faiss):
    def cost(n_init):
        labels = kmeans(noise(), 8, 0, method=Method("faiss", n_init))
        means = np.stack([noise()[labels == label].mean(axis=0) for label in range(8)])
        return ((noise() - means[labels]) ** 2).sum()

    assert cost(8) < cost(1)


def test_faiss_is_told_to_be_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ValueError, match="default above 100,000 features: faiss is not installed: pip install faiss-c"):
        kmeans(noise(), 2, 0, method=BY_FAISS)
    stage = {"name": "clusters", "stage": "cluster", "features": "features", "num_image_clusters": 2}
    inputs = SimpleNamespace(features=Expected(), previous=None)
    assert not any(problem for _, problem in ClusterStage(**stage).problems(inputs))
    assert ("method", module.INSTALL_FAISS) in ClusterStage(**stage, method="faiss").problems(inputs)


def test_a_sample_smaller_than_the_clusters_is_refused():
    with pytest.raises(ValueError, match="num_samples: 4 samples cannot make 5 clusters"):
        ClusterStage(name="a", stage="cluster", features="features", num_image_clusters=5, num_samples=4)


def test_a_method_tells_what_it_does(method):
    assert str(method).startswith("scikit-learn, n_init 10" if method == BY_SCIKIT_LEARN else "faiss 1.")
