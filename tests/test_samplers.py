"""Global batches: every property for any sizes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.samplers import GlobalBatchSampler

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
