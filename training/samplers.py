"""Which samples make up each batch, for any number of processes."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from torch.utils.data import Sampler


class Share(NamedTuple):
    """How large batches are, and which part of them is this process's.

    Args:
        batch_size: of one process, in one forward pass.
        rank: number of this process.
        world_size: number of processes.
        seed: of the order of the pairs.
    """

    batch_size: int
    rank: int
    world_size: int
    seed: int


class DistributedBatchSampler(Sampler[list[int]]):
    """Global batches that do not depend on the number of processes: process r of W gets the r-th of the W equal slices
    of each.

    What the batches are says a subclass, by `__len__` and `global_batches`.

    Args:
        batch_size, rank, world_size, seed: see `Share`.
    """

    def __init__(self, batch_size: int, rank: int = 0, world_size: int = 1, seed: int = 0):
        self.batch_size, self.rank, self.world_size, self.seed = batch_size, rank, world_size, seed
        self.global_batch_size = batch_size * world_size
        self.set_epoch(0)

    def set_epoch(self, epoch: int, start_batch: int = 0) -> None:
        """Choose the epoch, and the batch of it to begin with: that is how a run resumes."""
        self.epoch, self.start_batch = epoch, start_batch

    def from_batch(self, start: int) -> Iterator[list[tuple[int, int]]]:
        """This process's batches of a run from number `start` on, epoch after epoch, for ever: of each sample its epoch
        and its number."""
        first, start_batch = divmod(start, len(self))
        for epoch in itertools.count(first):
            self.set_epoch(epoch, start_batch)
            for batch in self:
                yield [(epoch, number) for number in batch]
            start_batch = 0

    def __len__(self) -> int:
        """Batches of a whole epoch."""

    def global_batches(self, rng: np.random.Generator) -> Sequence[np.ndarray]:
        """All batches of an epoch in their order, each with the numbers of `global_batch_size` samples.

        Args:
            rng: of the seed and the epoch, the same in every process. Nothing else may be drawn from.
        """

    def __iter__(self) -> Iterator[list[int]]:
        batches = self.global_batches(np.random.default_rng([self.seed, self.epoch]))
        for batch in batches[self.start_batch :]:
            yield np.reshape(batch, (self.world_size, self.batch_size))[self.rank].tolist()


class GlobalBatchSampler(DistributedBatchSampler):
    """Batches of a shuffled dataset: an epoch is one permutation of all samples, cut into global batches.

    What does not fill the last global batch is left out of the epoch.

    Args:
        num_samples: of the dataset.
        batch_size, rank, world_size, seed: see `DistributedBatchSampler`.
    """

    def __init__(self, num_samples: int, batch_size: int, rank: int = 0, world_size: int = 1, seed: int = 0):
        super().__init__(batch_size, rank, world_size, seed)
        if num_samples < self.global_batch_size:
            raise ValueError(
                f"a dataset of {num_samples} samples does not fill a global batch of {self.global_batch_size} "
                f"({world_size} processes x {batch_size}): lower the batch size"
            )
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples // self.global_batch_size

    def global_batches(self, rng: np.random.Generator) -> np.ndarray:
        used = rng.permutation(self.num_samples)[: len(self) * self.global_batch_size]
        return used.reshape(len(self), self.global_batch_size)


class ClusterBatchSampler(DistributedBatchSampler):
    """Global batches that each come from one cluster, so that all negatives do (CLIP-MoE eq. 1).

    In an epoch, the samples of every cluster are shuffled and cut into global batches, and the batches of all clusters
    are put in order. What does not fill a batch of its cluster is left out of the epoch, so a cluster smaller than a
    batch is never used.

    Args:
        labels: (samples,), the cluster of each, or -1 for samples that are not used.
        batch_size, rank, world_size, seed: see `DistributedBatchSampler`.
        order: "shuffled", or "round_robin": one batch of each cluster in turn, until none has another (CLIP-FMoE
            appendix C).
    """

    def __init__(
        self,
        labels: np.ndarray,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        order: str = "shuffled",
    ):
        super().__init__(batch_size, rank, world_size, seed)
        self.order = order
        clusters, sizes = np.unique(labels[labels >= 0], return_counts=True)
        if sizes.max(initial=0) < self.global_batch_size:
            raise ValueError(
                f"none of the {len(clusters)} clusters fills a global batch of {self.global_batch_size} ({world_size} "
                f"processes x {batch_size}); the largest has {sizes.max(initial=0)} samples, and larger batches there "
                "can be only of merged clusters"
            )
        self.clusters = [np.flatnonzero(labels == cluster) for cluster in clusters]

    def __len__(self) -> int:
        return sum(len(cluster) // self.global_batch_size for cluster in self.clusters)

    def global_batches(self, rng: np.random.Generator) -> list[np.ndarray]:
        batches, rounds = [], []
        for cluster in self.clusters:
            whole = len(cluster) // self.global_batch_size
            batches += np.split(rng.permutation(cluster)[: whole * self.global_batch_size], whole) if whole else []
            rounds += range(whole)
        order = np.argsort(rounds, kind="stable") if self.order == "round_robin" else rng.permutation(len(batches))
        return [batches[number] for number in order]


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
