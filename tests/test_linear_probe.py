"""Linear probes against scikit-learn's own, and what they refuse."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from evaluation.linear_probe import linear_probe_metrics


def problem(num_samples, seed, noise=1.0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(4, size=num_samples)
    return np.eye(4, 12)[labels] * 2 + rng.normal(size=(num_samples, 12)) * noise, labels


def test_separable_classes_are_told_apart():
    train, test = problem(5000, 0, noise=0.05), problem(100, 1, noise=0.05)
    for solver in ("scikit-learn", "torch"):
        assert linear_probe_metrics(*train, *test, solver=solver) == {"accuracy": 1.0, "mean_per_class_recall": 1.0}


def test_as_good_as_the_best_strength():
    train, test = problem(20_000, 0), problem(4000, 1)  # torch's are as many steps as there are batches
    best = max(LogisticRegression(C=c, max_iter=1000).fit(*train).score(*test) for c in (0.01, 0.1, 1, 10, 100))
    for solver in ("scikit-learn", "torch"):
        found = linear_probe_metrics(*train, *test, solver=solver)
        assert best - 0.01 < found["accuracy"] < 0.99
        assert found == linear_probe_metrics(*train, *test, solver=solver)


def test_labels_need_not_begin_with_zero():
    features, labels = problem(5000, 0, noise=0.05)
    for solver in ("scikit-learn", "torch"):
        found = linear_probe_metrics(features, labels * 3 + 5, features, labels * 3 + 5, solver=solver)
        assert found["accuracy"] == 1.0


def test_what_does_not_fit_is_refused():
    features, labels = problem(40, 0)
    with pytest.raises(ValueError, match="39 and 40 labels for 40 and 40 images"):
        linear_probe_metrics(features, labels[1:], features, labels)
    with pytest.raises(ValueError, match=r"no image of the classes \[9\]"):
        linear_probe_metrics(features, labels, features, np.full(40, 9))
    with pytest.raises(ValueError, match="the class 9 has one training image"):
        linear_probe_metrics(features, np.where(np.arange(40) == 0, 9, labels), features, labels)
    with pytest.raises(ValueError, match="finite"):
        linear_probe_metrics(features * np.nan, labels, features, labels)
