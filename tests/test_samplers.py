"""Global batches, of all samples and of one cluster: every property for any sizes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.samplers import ClusterBatchSampler, GlobalBatchSampler, merge_small_clusters

sizes = st.tuples(
    st.integers(1, 200), st.integers(1, 9), st.integers(1, 4), st.integers(0, 3), st.integers(0, 3)
).filter(lambda size: size[0] >= size[1] * size[2])


def epoch_of(num_samples, batch_size, world_size, seed, epoch, start_batch=0):
    """Batches of all ranks: [rank][batch]."""
    ranks = []
    for rank in range(world_size):
        sampler = GlobalBatchSampler(num_samples, batch_size, rank, world_size, seed)
        sampler.set_epoch(epoch, start_batch)
        ranks.append(list(sampler))
    return ranks


@given(sizes)
@settings(deadline=None)
def test_an_epoch_is_a_partition(size):
    num_samples, batch_size, world_size, *_ = size
    ranks = epoch_of(*size)
    length = num_samples // (batch_size * world_size)
    assert {len(batches) for batches in ranks} == {length}
    assert len(GlobalBatchSampler(num_samples, batch_size, 0, world_size)) == length
    assert {len(batch) for batches in ranks for batch in batches} == {batch_size}
    samples = [sample for batches in ranks for batch in batches for sample in batch]
    assert len(samples) == len(set(samples)) == length * batch_size * world_size
    assert set(samples) <= set(range(num_samples))


@given(sizes)
@settings(deadline=None)
def test_ranks_share_the_batches_of_one_process(size):
    num_samples, batch_size, world_size, seed, epoch = size
    (alone,) = epoch_of(num_samples, batch_size * world_size, 1, seed, epoch)
    ranks = epoch_of(*size)
    assert alone == [[sample for batch in batches for sample in batch] for batches in zip(*ranks, strict=True)]


@given(sizes, st.integers(0, 50))
@settings(deadline=None)
def test_resume(size, start_batch):
    ranks = epoch_of(*size)
    assert epoch_of(*size, start_batch=start_batch) == [batches[start_batch:] for batches in ranks]


def test_every_seed_and_epoch_has_its_own_order():
    orders = [str(epoch_of(100, 10, 1, seed, epoch)) for seed in range(4) for epoch in range(4)]
    assert len(set(orders)) == 16


def test_too_small_a_dataset():
    with pytest.raises(ValueError, match=r"7 samples .* global batch of 8 \(2 processes x 4\)"):
        GlobalBatchSampler(7, 4, world_size=2)


@st.composite
def clustered(draw):
    """Labels of samples in clusters of any sizes, at least one of which fills a global batch."""
    batch_size, world_size = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    cluster_sizes = draw(st.lists(st.integers(0, 50), min_size=1, max_size=8))
    cluster_sizes.append(draw(st.integers(batch_size * world_size, 60)))
    labels = np.repeat(np.arange(len(cluster_sizes)), cluster_sizes)
    seed, epoch = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    return np.random.default_rng(draw(st.integers(0, 9))).permutation(labels), batch_size, world_size, seed, epoch


def cluster_epoch(labels, batch_size, world_size, seed, epoch, start_batch=0):
    """Batches of all ranks: [rank][batch]."""
    ranks = []
    for rank in range(world_size):
        sampler = ClusterBatchSampler(labels, batch_size, rank, world_size, seed)
        sampler.set_epoch(epoch, start_batch)
        ranks.append(list(sampler))
        if start_batch == 0:
            assert len(ranks[-1]) == len(sampler)
    return ranks


@given(clustered())
@settings(deadline=None)
def test_cluster_batches_are_pure_and_use_what_fits(case):
    labels, batch_size, world_size, *_ = case
    ranks = cluster_epoch(*case)
    sizes = np.bincount(labels)
    length = sum(size // (batch_size * world_size) for size in sizes.tolist())
    assert {len(batches) for batches in ranks} == {length}
    used = []
    for parts in zip(*ranks, strict=True):
        assert {len(part) for part in parts} == {batch_size}
        batch = [sample for part in parts for sample in part]
        assert len(set(labels[batch])) == 1  # of one cluster, over all processes
        used += batch
    assert len(used) == len(set(used)) == length * batch_size * world_size
    counts = np.bincount(labels[used], minlength=len(sizes))
    assert (counts == sizes // (batch_size * world_size) * (batch_size * world_size)).all()


@given(clustered())
@settings(deadline=None)
def test_ranks_share_the_cluster_batches_of_one_process(case):
    labels, batch_size, world_size, seed, epoch = case
    (alone,) = cluster_epoch(labels, batch_size * world_size, 1, seed, epoch)
    assert alone == [[s for part in parts for s in part] for parts in zip(*cluster_epoch(*case), strict=True)]


@given(clustered(), st.integers(0, 60))
@settings(deadline=None)
def test_cluster_batches_resume(case, start_batch):
    assert cluster_epoch(*case, start_batch=start_batch) == [b[start_batch:] for b in cluster_epoch(*case)]


@given(st.integers(0, 1000), st.lists(st.integers(0, 1000), min_size=2, max_size=4, unique=True))
@settings(deadline=None)
def test_no_two_epochs_are_alike(seed, epochs):
    labels = np.arange(90) % 3
    for order in ("shuffled", "round_robin"):
        sampler = ClusterBatchSampler(labels, 10, seed=seed, order=order)
        seen = set()
        for epoch in epochs:
            sampler.set_epoch(epoch)
            seen.add(str(list(sampler)))
        assert len(seen) == len(epochs)


def test_every_seed_and_epoch_has_its_own_cluster_batches():
    labels = np.arange(100) % 3
    orders = [str(cluster_epoch(labels, 10, 1, seed, epoch)) for seed in range(4) for epoch in range(4)]
    assert len(set(orders)) == 16
    firsts = [labels[cluster_epoch(labels, 10, 1, 0, epoch)[0][0][0]] for epoch in range(20)]
    assert len(set(firsts)) == 3  # clusters come in another order, too


@given(clustered())
@settings(deadline=None)
def test_round_robin_is_the_constrained_sampler(case):
    """CLIP-FMoE appendix C, step by step on what is left of each cluster."""
    labels, batch_size, world_size, seed, epoch = case
    size = batch_size * world_size
    sampler = ClusterBatchSampler(labels, size, seed=seed, order="round_robin")
    sampler.set_epoch(epoch)
    batches = list(sampler)
    left = {cluster: count // size for cluster, count in enumerate(np.bincount(labels)) if count}
    expected = []
    while any(left.values()):
        for cluster, number in left.items():
            if number:
                expected.append(cluster)
                left[cluster] -= 1
    assert [labels[batch[0]] for batch in batches] == expected
    shuffled = ClusterBatchSampler(labels, size, seed=seed)
    shuffled.set_epoch(epoch)
    assert sorted(map(sorted, batches)) == sorted(map(sorted, shuffled))  # the same batches in another order


def test_samples_without_a_cluster_are_left_alone():
    labels = np.array([0, -1] * 10)
    batches = list(ClusterBatchSampler(labels, 5))
    assert sorted(sample for batch in batches for sample in batch) == list(range(0, 20, 2))


def test_no_cluster_fills_a_batch():
    with pytest.raises(ValueError, match=r"none of the 2 clusters fills a global batch of 8 .* largest has 6 samples"):
        ClusterBatchSampler(np.array([0] * 5 + [1] * 6), 4, world_size=2)


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
    labels = np.array([0] * 5 + [1] * 2 + [2] * 5 + [3])
    centers = np.array([[0.0], [1.0], [10.0], [1.6]])
    # 3 (one sample) goes to 1; together they are three at 1.2, still too few, and go to 0.
    assert merge_small_clusters(labels, centers, 4).tolist() == [0] * 7 + [2] * 5 + [0]
    assert merge_small_clusters(labels, centers, 3).tolist() == [0] * 5 + [1] * 2 + [2] * 5 + [1]
    assert merge_small_clusters(labels, centers, 1).tolist() == labels.tolist()
