"""Training whose batches keep duplicates apart, with the samples of each text in random order over the epoch."""

import numpy as np
from pydantic.dataclasses import dataclass

from clip_moe.engine.settings import STRICT
from clip_moe.training.samplers import GlobalBatchSampler
from clip_moe.training.stages.train import TrainStage


class RandomOrderSampler(GlobalBatchSampler):
    """Batches of `Spread` with its even spacing undone. Where every text has equally many samples, and these divide
    the number of batches, a column of an epoch holds whole texts: shuffled, it still has at most one sample a batch."""

    def global_batches(self, rng: np.random.Generator) -> np.ndarray:
        return rng.permuted(super().global_batches(rng), axis=0)


@dataclass(config=STRICT, kw_only=True)
class RandomOrderStage(TrainStage):
    """Training with `RandomOrderSampler`."""

    def batch_sampler(self, rows, share, inputs, context):
        return RandomOrderSampler(len(rows), *share)
