"""Which samples make up each batch, for any number of processes."""

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler


class GlobalBatchSampler(Sampler[list[int]]):
    """Batches of a shuffled dataset that do not depend on the number of processes.

    An epoch is one permutation of all samples, drawn from the pair (seed, epoch) and cut into global batches; process r
    of W gets the r-th of the W equal slices of each. What does not fill the last global batch is left out of the epoch.

    Args:
        num_samples: of the dataset.
        batch_size: of one process.
        rank, world_size: this process and their number.

    Raises:
        ValueError: the dataset is smaller than a global batch.
    """

    def __init__(self, num_samples: int, batch_size: int, rank: int = 0, world_size: int = 1, seed: int = 0):
        if num_samples < batch_size * world_size:
            raise ValueError(
                f"a dataset of {num_samples} samples does not fill a global batch of {batch_size * world_size} "
                f"({world_size} processes x {batch_size}): lower the batch size"
            )
        self.num_samples, self.batch_size = num_samples, batch_size
        self.rank, self.world_size, self.seed = rank, world_size, seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int, start_batch: int = 0) -> None:
        """Choose the epoch, and the batch of it to begin with: that is how a run resumes."""
        self.epoch, self.start_batch = epoch, start_batch

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return self.num_samples // (self.batch_size * self.world_size)

    def __iter__(self) -> Iterator[list[int]]:
        permutation = np.random.default_rng([self.seed, self.epoch]).permutation(self.num_samples)
        for batch in range(self.start_batch, len(self)):
            start = (batch * self.world_size + self.rank) * self.batch_size
            yield permutation[start : start + self.batch_size].tolist()
