"""Global batches, of all samples and of one cluster: every property for any sizes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clip_moe.training.duplicates import Duplicates
from clip_moe.training.samplers import ClusterBatchSampler, GlobalBatchSampler, Share, merge_small_clusters


def apart(sampler, num_samples):
    """Samplers that know of triplets with the same text and of pairs with the same image."""
    sampler.duplicates = Duplicates(np.arange(num_samples) // 2 % 50, np.arange(num_samples) // 3)
    return sampler


SAMPLERS = {
    "all": lambda labels, share: GlobalBatchSampler(len(labels), share),
    "clusters": ClusterBatchSampler,
    "round robin": lambda labels, share: ClusterBatchSampler(labels, share, "round_robin"),
    "all, apart": lambda labels, share: apart(GlobalBatchSampler(len(labels), share), len(labels)),
    "clusters, apart": lambda labels, share: apart(ClusterBatchSampler(labels, share), len(labels)),
}
EVERY = pytest.mark.parametrize("kind", SAMPLERS)


@st.composite
def clustered(draw):
    """Labels of samples in clusters of any sizes, at least one of which fills a global batch; sizes, seed and epoch."""
    batch_size, world_size = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    cluster_sizes = draw(st.lists(st.integers(0, 50), min_size=1, max_size=8))
    cluster_sizes.append(draw(st.integers(batch_size * world_size, 60)))
    labels = np.repeat(np.arange(len(cluster_sizes)), cluster_sizes)
    seed, epoch = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    return np.random.default_rng(draw(st.integers(0, 9))).permutation(labels), batch_size, world_size, seed, epoch


def epoch_of(kind, labels, batch_size, world_size, seed, epoch, start_batch=0):
    """Batches of all ranks: [rank][batch]."""
    ranks = []
    for rank in range(world_size):
        sampler = SAMPLERS[kind](labels, Share(batch_size, rank, world_size, seed))
        ranks.append(list(sampler.epoch_batches(epoch, start_batch)))
        assert start_batch or len(ranks[-1]) == len(sampler)
    return ranks


@EVERY
@given(case=clustered())
@settings(deadline=None)
def test_batches_use_what_fits_once(kind, case):
    """And are of one cluster over all processes."""
    labels, batch_size, world_size, *_ = case
    sample_clusters = np.zeros_like(labels) if kind.startswith("all") else labels
    sizes, size, used = np.bincount(sample_clusters), batch_size * world_size, []
    ranks = epoch_of(kind, *case)
    for parts in zip(*ranks, strict=True):
        assert {len(part) for part in parts} == {batch_size}
        batch = [sample for part in parts for sample in part]
        assert len(set(sample_clusters[batch])) == 1
        used += batch
    assert len(used) == len(set(used)) == len(ranks[0]) * size
    assert (np.bincount(sample_clusters[used], minlength=len(sizes)) == sizes // size * size).all()


@EVERY
@given(case=clustered(), start_batch=st.integers(0, 60))
@settings(deadline=None)
def test_ranks_share_the_batches_of_one_process_and_go_on_anywhere(kind, case, start_batch):
    labels, batch_size, world_size, seed, epoch = case
    ranks = epoch_of(kind, *case)
    (alone,) = epoch_of(kind, labels, batch_size * world_size, 1, seed, epoch)
    assert alone == [[sample for part in parts for sample in part] for parts in zip(*ranks, strict=True)]
    assert epoch_of(kind, *case, start_batch=start_batch) == [batches[start_batch:] for batches in ranks]


@EVERY
def test_every_seed_and_epoch_has_its_own_order(kind):
    labels = np.arange(100) % 3
    orders = [epoch_of(kind, labels, 10, 1, seed, epoch)[0] for seed in range(4) for epoch in range(4)]
    assert len({str(order) for order in orders}) == 16
    if kind.startswith("clusters"):
        assert len({labels[order[0][0]] for order in orders}) == 3  # clusters come in another order, too


@given(clustered())
@settings(deadline=None)
def test_round_robin_is_the_constrained_sampler(case):
    """CLIP-FMoE appendix C, step by step on what is left of each cluster."""
    labels, batch_size, world_size, seed, epoch = case
    size = batch_size * world_size
    (batches,), (shuffled,) = (epoch_of(kind, labels, size, 1, seed, epoch) for kind in ("round robin", "clusters"))
    left = {cluster: count // size for cluster, count in enumerate(np.bincount(labels)) if count}
    expected = []
    while any(left.values()):
        for cluster, number in left.items():
            if number:
                expected.append(cluster)
                left[cluster] -= 1
    assert [labels[batch[0]] for batch in batches] == expected
    assert sorted(map(sorted, batches)) == sorted(map(sorted, shuffled))  # the same batches in another order


def test_samples_without_a_cluster_are_left_alone():
    batches = list(ClusterBatchSampler(np.array([0, -1] * 10), Share(5)).epoch_batches(0))
    assert sorted(sample for batch in batches for sample in batch) == list(range(0, 20, 2))


def test_too_few_samples():
    with pytest.raises(ValueError, match="7 samples do not fill a batch of 8: lower global_batch_size to 7 or less"):
        GlobalBatchSampler(7, Share(4, world_size=2))
    with pytest.raises(
        ValueError, match=r"none of the 2 clusters fills a batch of 8: lower global_batch_size to 6 or less"
    ):
        ClusterBatchSampler(np.array([0] * 5 + [1] * 6), Share(4, world_size=2))


@given(st.lists(st.integers(0, 12), min_size=1, max_size=12), st.integers(1, 20), st.integers(0, 9))
@settings(deadline=None)
def test_merged_clusters_are_large_enough_and_whole(sizes, smallest, seed):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    merged = merge_small_clusters(labels, np.random.default_rng(seed).normal(size=(len(sizes), 3)), smallest)
    assert len(merged) == len(labels)
    counts = np.unique(merged, return_counts=True)[1]
    assert all(counts >= smallest) or len(counts) <= 1
    for cluster in set(labels):
        assert len(set(merged[labels == cluster])) == 1  # nobody is torn apart
        if sizes[cluster] >= smallest:
            assert (merged[labels == cluster] == cluster).all() or len(counts) == 1


def test_a_small_cluster_goes_to_the_nearest():
    labels, centers = np.array([0] * 5 + [1] * 2 + [2] * 5 + [3]), np.array([[0.0], [1.0], [10.0], [1.6]])
    # 3 (one sample) goes to 1; together they are three at 1.2, still too few, and go to 0.
    assert merge_small_clusters(labels, centers, 4).tolist() == [0] * 7 + [2] * 5 + [0]
    assert merge_small_clusters(labels, centers, 3).tolist() == [0] * 5 + [1] * 2 + [2] * 5 + [1]
    assert merge_small_clusters(labels, centers, 1).tolist() == labels.tolist()
