"""The stage that embeds a dataset to cluster it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from clip_moe.data.arguments import NumberedData
from clip_moe.engine.context import Context
from clip_moe.engine.settings import STRICT, dump
from clip_moe.engine.stage import Model, Stage


@dataclass(config=STRICT, kw_only=True)
class FeaturesStage(Stage):
    """The features of a whole dataset, by which it is clustered.

    For example:

        clip-moe features runs/features --model training/symbol_clip --data.source symbols --data.num_samples 64
    """

    kind: ClassVar[str] = "features"
    has_rows_of_pairs: ClassVar[bool] = True

    # An earlier stage, a folder or a hub name.
    model: Model
    # The pairs to embed.
    data: NumberedData
    # Samples that one process computes at a time.
    batch_size: int = Field(default=256, gt=0)
    # The weights of the L captions of an image, as in the stages that train on them: its text feature is their weighted
    # mean. None: the first caption that is not missing.
    caption_weights: list[Annotated[float, Field(ge=0)]] | None = Field(default=None, min_length=1)

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        from clip_moe.data.shared_rows import shared_fingerprint, shared_pairs
        from clip_moe.evaluation.embedder import BATCHES_PER_SHARD, Embedder
        from clip_moe.evaluation.feature_store import FeatureStore
        from clip_moe.training.loader import PairLoader

        accelerator, rows = context.accelerator, shared_pairs(context, inputs.data)
        batch_size, weights = min(self.batch_size, len(rows)), self.caption_weights
        embedder = Embedder(inputs.model, None, batch_size, accelerator.device, state=accelerator)
        loader = PairLoader(rows, embedder.processor, self.data, batch_size, caption_weights=weights)
        context.held["images"] = loader.bytes_in_memory
        about = {"data": dump(self.data), "dataset_fingerprint": shared_fingerprint(context, rows)}
        store = FeatureStore(directory, len(rows), batch_size * BATCHES_PER_SHARD, about)
        store.write(accelerator, "features", embedder.compute(loader.in_order()))
