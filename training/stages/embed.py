"""The stage that embeds a dataset."""

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from training.settings import STRICT, dump
from training.stages.base import Model, NumberedData, Stage

if TYPE_CHECKING:
    from training.context import Context


@dataclass(config=STRICT, kw_only=True)
class EmbedStage(Stage):
    """The features of a whole dataset, by which it is clustered."""

    kind: ClassVar[str] = "embed"

    # An earlier stage, a folder or a hub name.
    model: Model
    # The pairs to embed.
    data: NumberedData
    # Samples that one process computes at a time.
    batch_size: int = Field(default=256, gt=0)
    # The weights of the L captions of an image, as in the stages that train on them: its text feature is their weighted
    # mean. None: the first caption that is not missing.
    caption_weights: list[Annotated[float, Field(ge=0)]] | None = Field(default=None, min_length=1)

    def run(self, inputs: SimpleNamespace, context: "Context", directory: Path) -> None:
        import torch

        from conversion.checkpoints import load_clip
        from conversion.processors import load_processor
        from evaluation.feature_store import FeatureStore
        from training.features import BATCHES_PER_SHARD, clip_features
        from training.loader import PairLoader

        processor = load_processor(inputs.model)
        rows = context.pairs(inputs.data)
        model, weights = load_clip(inputs.model, dtype=torch.float32), self.caption_weights
        loader = PairLoader(rows, processor, self.data, min(self.batch_size, len(rows)), caption_weights=weights)
        context.held["images"] = loader.bytes_in_memory
        about = {"data": dump(self.data), "dataset_fingerprint": context.data_fingerprint(rows)}
        store = FeatureStore(directory, len(rows), loader.batch_size * BATCHES_PER_SHARD, about)
        store.write(context.accelerator, "features", clip_features(context.accelerator, model, loader, weights))
