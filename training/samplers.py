"""Which samples make up each batch, for any number of processes."""

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from clip_moe.training.duplicates import Duplicates, ranges

# The golden section: its multiples, modulo 1, are spread evenly, however many there are
GOLDEN = (math.sqrt(5) - 1) / 2


class Share(NamedTuple):
    """How large batches are, and which part of them is this process's."""

    batch_size: int  # pairs of one process in one forward pass
    rank: int = 0  # number of this process
    world_size: int = 1  # number of processes
    seed: int = 0  # draws the order of the pairs

    @property
    def global_batch_size(self) -> int:
        """Pairs of all processes in one forward pass."""
        return self.batch_size * self.world_size


class DistributedBatchSampler:
    """Global batches that do not depend on the number of processes: process r of W gets the r-th of the W equal slices
    of each. A subclass has `__len__`, the batches of an epoch, and `global_batches`.

    Attributes:
        duplicates: those that no batch should have together; None: batches are drawn at random.
        epoch: the one whose batches are drawn.
    """

    duplicates: Duplicates | None = None

    def __init__(self, share: Share):
        self.share, self.global_batch_size, self.epoch = share, share.global_batch_size, 0

    def from_batch(self, start: int) -> Iterator[list[tuple[int, int]]]:
        """This process's batches of a run from number `start` on, epoch after epoch, for ever: of each sample its epoch
        and its number."""
        first, start = divmod(start, len(self))
        for epoch in itertools.count(first):
            for batch in self.epoch_batches(epoch, start):
                yield [(epoch, number) for number in batch]
            start = 0

    def epoch_batches(self, epoch: int, start: int = 0) -> Iterator[list[int]]:
        """This process's batches of an epoch from number `start` on."""
        for batch in self.all_batches(epoch)[start:]:
            yield np.reshape(batch, (self.share.world_size, self.share.batch_size))[self.share.rank].tolist()

    def all_batches(self, epoch: int = 0) -> Sequence[np.ndarray]:
        """The global batches of an epoch."""
        self.epoch = epoch
        return self.global_batches(np.random.default_rng([self.share.seed, epoch]))

    def global_batches(self, rng: np.random.Generator) -> Sequence[np.ndarray]:
        """All batches of an epoch in their order, each with the numbers of `global_batch_size` samples. `rng`, which is
        the same in every process, is all that may be drawn from."""


class ClusterBatchSampler(DistributedBatchSampler):
    """Global batches that each come from one cluster, so that all negatives do (CLIP-MoE eq. 1).

    In an epoch, the samples of every cluster are shuffled and cut into global batches, and the batches of all clusters
    are put in order. What does not fill a batch of its cluster is left out of the epoch, so a cluster smaller than a
    batch is never used. With `duplicates`, the batches of a cluster are those of `Spread`.

    Args:
        labels: (samples,), the cluster of each, or -1 for samples that are not used.
        order: "shuffled", or "round_robin": one batch of each cluster in turn, until none has another (CLIP-FMoE
            appendix C).
    """

    def __init__(self, labels: np.ndarray, share: Share, order: str = "shuffled"):
        super().__init__(share)
        self.order = order
        clusters, sizes = np.unique(labels[labels >= 0], return_counts=True)
        if sizes.max(initial=0) < self.global_batch_size:
            raise ValueError(
                f"none of the {len(clusters)} clusters fills a batch of {self.global_batch_size}: lower "
                f"global_batch_size to {sizes.max(initial=0)} or less, or set small_clusters: merge"
            )
        self.clusters = [np.flatnonzero(labels == cluster).astype(np.int32) for cluster in clusters]

    def __len__(self) -> int:
        return sum(len(cluster) // self.global_batch_size for cluster in self.clusters)

    @cached_property
    def _spreads(self) -> "list[Spread]":
        size, seed = self.global_batch_size, self.share.seed
        return [Spread(cluster, self.duplicates, size, seed) for cluster in self.clusters if len(cluster) >= size]

    def global_batches(self, rng: np.random.Generator) -> np.ndarray:
        size = self.global_batch_size
        if self.duplicates is not None:
            cluster_batches = [spread.batches(self.epoch, rng) for spread in self._spreads]
        else:
            shuffled = [rng.permutation(cluster) for cluster in self.clusters if len(cluster) >= size]
            cluster_batches = [cluster[: len(cluster) // size * size].reshape(-1, size) for cluster in shuffled]
        batches = np.concatenate(cluster_batches)
        rounds = np.concatenate([np.arange(len(batches_of_cluster)) for batches_of_cluster in cluster_batches])
        order = np.argsort(rounds, kind="stable") if self.order == "round_robin" else rng.permutation(len(batches))
        return batches[order]


class GlobalBatchSampler(ClusterBatchSampler):
    """Batches of a shuffled dataset: those of one cluster of all samples."""

    def __init__(self, num_samples: int, share: Share):
        if num_samples < share.global_batch_size:
            raise ValueError(
                f"{num_samples} samples do not fill a batch of {share.global_batch_size}: lower "
                f"global_batch_size to {num_samples} or less"
            )
        # In the order in which they are cut, which is random
        super().__init__(np.zeros(num_samples, np.int8), share, order="round_robin")


class Spread:
    """Batches without duplicates, as long as no text or image has more samples than there are batches. Larger groups
    are shared evenly. Where groups of texts and images overlap, samples are kept apart within their largest group only.

    An epoch has every sample once, but for those that do not fill a batch: it leaves them out in turn, so that none is
    left out of two epochs more than another.

    Samples are dealt to the batches like cards, one to each in every round. The samples of a group follow one another,
    in groups of random order; then come those without a duplicate, shuffled. A round goes through the batches in steps
    of the golden section, from a random one on, which spaces a group's samples evenly over the epoch. A
    group that began in the round before goes on in batches that have none of it.

    Args:
        samples: (n,), their numbers in the dataset.
        duplicates: those of the whole dataset.
        batch_size: samples of a global batch.
        seed: chooses the order in which samples are left out.
    """

    def __init__(self, samples: np.ndarray, duplicates: Duplicates, batch_size: int, seed: int):
        self.duplicates, self.batch_size, self.num_batches = duplicates, batch_size, len(samples) // batch_size
        labels = duplicates.labels[samples]
        self.alone = samples[labels < 0]
        together = np.flatnonzero(labels >= 0)
        order = together[np.argsort(labels[together], kind="stable")]
        self.together = samples[order]
        firsts = np.flatnonzero(np.diff(labels[order], prepend=-1))
        self.sizes = np.diff(firsts, append=len(order)).astype(np.int32)
        # A step that has no divisor in common with the number of samples visits all before it comes back
        first = np.random.default_rng(seed).integers(1, len(samples) + 1).item()
        self.step = next(step for step in itertools.count(first) if math.gcd(step, len(samples)) == 1)

    def batches(self, epoch: int, rng: np.random.Generator) -> np.ndarray:
        """(batches, batch_size) of an epoch."""
        rounds = np.empty((self.batch_size, self.num_batches), np.int32)
        self._deal(rounds, self._fill(rounds.ravel(), epoch, rng), rng)
        return rounds[rng.permutation(self.batch_size)].T

    def _fill(self, places: np.ndarray, epoch: int, rng: np.random.Generator) -> np.ndarray:
        """Put the samples of an epoch in places, groups of duplicates first, and return the sizes of the groups."""
        together, sizes, alone = self._used(epoch)
        order, starts = rng.permutation(len(sizes)).astype(np.int32), np.cumsum(sizes, dtype=np.int32) - sizes
        places[: len(together)] = together[ranges(starts[order], sizes[order])]
        places[len(together) :] = alone
        rng.shuffle(places[len(together) :])
        return sizes[order]

    def _used(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The samples of an epoch: group after group of duplicates, the sizes of the groups, and the other samples."""
        num_samples, num_together = len(self.together) + len(self.alone), len(self.together)
        unused = num_samples - self.num_batches * self.batch_size
        if not unused:
            return self.together, self.sizes, self.alone
        unused = np.arange(epoch * unused, (epoch + 1) * unused) * self.step % num_samples
        in_groups = unused[unused < num_together]
        group_of = np.searchsorted(np.cumsum(self.sizes), in_groups, side="right")
        sizes = self.sizes.copy()
        np.subtract.at(sizes, group_of, 1)
        alone = np.delete(self.alone, unused[unused >= num_together] - num_together)
        return np.delete(self.together, in_groups), sizes, alone

    def _deal(self, rounds: np.ndarray, sizes: np.ndarray, rng: np.random.Generator) -> None:
        """Deal the rounds (rounds, batches), which are in the order of groups of these sizes, to the batches."""
        ends, size = np.cumsum(sizes, dtype=np.int32), self.num_batches
        firsts = np.arange(0, sizes.sum(), size)  # samples of the rounds that have groups
        group = np.searchsorted(ends, firsts, side="right")  # that each of them begins with
        goes_on = np.minimum(ends[group] - firsts, size) * (ends[group] - sizes[group] < firsts)
        began = (ends[group] - sizes[group] - firsts + size).tolist()  # where in the round before
        has_group, batches = np.zeros(size, bool), None
        even = np.argsort(np.argsort(np.arange(size) * GOLDEN % 1))
        for samples, number, start in zip(rounds, goes_on.tolist(), began, strict=False):
            before, batches = batches, (even + rng.integers(size)) % size
            if number and start >= 0:  # else it filled the round before
                has_group[:] = False
                has_group[before[start:]] = True
            if number and has_group[batches[:number]].any():
                twice = np.flatnonzero(has_group[batches[:number]])
                free = number + np.flatnonzero(~has_group[batches[number:]])
                free = rng.permutation(free)[: len(twice)]
                twice = twice[: len(free)]
                batches[twice], batches[free] = batches[free], batches[twice]
            samples[batches] = samples.copy()


def merge_small_clusters(labels: np.ndarray, centers: np.ndarray, smallest: int) -> np.ndarray:
    """Give the samples of clusters that are too small to the nearest other cluster, the smallest cluster first.

    Args:
        labels: (samples,), clusters from 0 to C - 1.
        centers: (C, D), the mean features of each. Clusters that are merged have the mean of all their samples.
        smallest: the number of samples that a cluster must have.

    Returns:
        (samples,) labels of clusters of at least that size, or of one cluster if all are together smaller.
    """
    sizes = np.bincount(labels, minlength=len(centers)).astype(np.int64)
    centers, target = centers.astype(np.float64), np.arange(len(centers))
    alive = np.flatnonzero(sizes)
    while len(alive) > 1 and sizes[alive].min() < smallest:
        small = alive[sizes[alive].argmin()]
        alive = alive[alive != small]
        nearest = alive[np.square(centers[alive] - centers[small]).sum(axis=1).argmin()]
        weights = sizes[[small, nearest]]
        centers[nearest] = np.average(centers[[small, nearest]], axis=0, weights=weights)
        sizes[nearest] += sizes[small]
        target[target == small] = nearest
    return target[labels]
