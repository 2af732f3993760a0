"""Clusters of captions: the experts that they make, and the files that lie between the stages of MoDE."""

import numpy as np
import pytest

from training.caption_clusters import (
    CaptionClusters,
    group_centers,
    load_caption_clusters,
    load_centers,
    load_expert_of_pair,
    save_caption_clusters,
    save_centers,
)


def test_experts_are_numbered_by_range():
    rng = np.random.default_rng(0)
    tight = np.array([1, 0, 0]) + rng.normal(size=(10, 3)) * 0.01
    wide = np.array([0, 1, 0]) + rng.normal(size=(10, 3)) * 0.2
    centers = np.concatenate([tight, wide]).astype(np.float32)
    expert_of_center, coarse = group_centers(centers, 2, seed=0)
    assert (expert_of_center[:10] == 1).all() and (expert_of_center[10:] == 0).all()
    np.testing.assert_allclose(coarse[0], centers[10:].mean(axis=0), atol=1e-6)
    ranges = CaptionClusters(centers, expert_of_center, coarse).ranges
    expected = [np.mean([np.linalg.norm(c - coarse[i]) for c in part]) for i, part in enumerate((wide, tight))]
    np.testing.assert_allclose(ranges, expected, atol=1e-4)
    assert ranges[0] > ranges[1]


def test_as_many_experts_as_centers():
    centers = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
    expert_of_center, coarse = group_centers(centers, 5, seed=0)
    assert sorted(expert_of_center) == list(range(5))
    np.testing.assert_allclose(coarse[expert_of_center], centers)


def test_clusters_know_their_data(tmp_path):
    clusters = CaptionClusters(np.eye(3, dtype=np.float32), np.array([0, 1, -1]), np.eye(2, 3, dtype=np.float32))
    save_caption_clusters(
        tmp_path, clusters, np.array([0, 1, -1, 0]), {"encoder": "tfidf", "dataset_fingerprint": "abc"}
    )
    loaded, metadata = load_caption_clusters(tmp_path)
    assert metadata["encoder"] == "tfidf" and np.array_equal(loaded.expert_of_center, [0, 1, -1])
    assert np.array_equal(load_expert_of_pair(tmp_path, "abc"), [0, 1, -1, 0])
    with pytest.raises(ValueError, match="another dataset"):
        load_expert_of_pair(tmp_path, "other")
    save_centers(tmp_path / "..", clusters.centers, "tfidf")
    assert load_centers(tmp_path / "..")[1] == "tfidf"
