"""The stage that finds fine-grained clusters of captions."""

import dataclasses
import typing
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, ClassVar

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from clip_moe.engine.context import Context
from clip_moe.engine.settings import STRICT, Reads
from clip_moe.engine.stage import NumberedData, Stage

if typing.TYPE_CHECKING:
    from clip_moe.evaluation.feature_store import FeatureStore


@dataclass(config=STRICT, kw_only=True)
class ClusterFineStage(Stage):
    """Fine-grained clusters of captions: centers by balanced K-means of their embeddings (MoDE eq. 1), and the nearest
    center of every pair (section 3.3), by any number of processes.

        clip-moe cluster-fine runs/fine --captions runs/sentences --num_centers 4
    """

    kind: ClassVar[str] = "cluster_fine"
    has_rows_of_pairs: ClassVar[bool] = True

    # An embed_captions stage.
    captions: Annotated[str, Reads("embed_captions")]
    # How many centers are learned from its embeddings.
    num_centers: int | None = Field(default=None, gt=0)
    # Instead, a cluster_fine stage of the same encoder, whose centers are taken.
    centers: Annotated[str, Reads("cluster_fine")] | None = None
    # Embeddings that the centers are learned from, drawn at random; None: all. They are in memory at once, in float32:
    # 6 GB for 2 million of size 768. More give similar clusters (MoDE appendix E).
    num_samples: int | None = Field(default=2_000_000, gt=0)
    # Rounds of K-means.
    iterations: int = Field(default=20, gt=0)
    # Assign these pairs instead. Their captions are embedded on the fly and not stored, for datasets too large to
    # store. None: those of `captions`.
    data: NumberedData | None = None
    # Captions of `data` that are embedded at a time, by one process.
    batch_size: int = Field(default=256, gt=0)

    @model_validator(mode="after")
    def _check(self):
        if (self.num_centers is None) == (self.centers is None):
            raise ValueError("exactly one of num_centers and centers must be set")
        return self

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        import numpy as np
        import torch

        from clip_moe.evaluation.feature_store import FeatureStore
        from clip_moe.evaluation.sentence_encoders import load_encoder
        from clip_moe.training.caption_clusters import ENCODER, caption_store, encoder_features, open_store
        from clip_moe.training.clusters import CENTERS, load_centers, nearest_centers

        accelerator, captions = context.accelerator, Path(inputs.captions)
        embedded = open_store(captions, "an embed_captions stage")
        if accelerator.is_main_process and not (directory / CENTERS).is_file():
            self._save_centers(inputs, embedded, context, directory)
        accelerator.wait_for_everyone()
        centers = load_centers(directory)
        on_device = torch.as_tensor(centers, device=accelerator.device)
        if self.data is None:
            store = FeatureStore(directory, embedded.num_rows, embedded.shard_size, embedded.about)
            features = embedded["embeddings"]

            def batches(shards: list[range]) -> Iterator[dict[str, np.ndarray]]:
                return ({"embeddings": features[pairs.start : pairs.stop]} for pairs in shards)

        else:
            encoder = load_encoder(captions / ENCODER, accelerator.device)
            rows = context.pairs(inputs.data, encoder.modality == "image")
            store = caption_store(directory, rows, self.data, self.batch_size, encoder, context)
            batches = encoder_features(encoder, rows, self.batch_size)

        def compute(shards: list[range]) -> Iterator[dict[str, np.ndarray]]:
            return ({"labels": nearest_centers(batch["embeddings"], on_device)} for batch in batches(shards))

        store.write(accelerator, "labels", compute)
        if accelerator.is_main_process:
            sizes = np.bincount(store["labels"][:], minlength=len(centers))
            print(f"{self.name}: {sizes.sum()} pairs, {sizes.min()} to {sizes.max()} to each of {len(sizes)} centers")

    def rehearsed(self, num_samples: int) -> typing.Self:
        """As many centers as few samples have."""
        centers = self.num_centers and min(self.num_centers, num_samples // 4)
        return dataclasses.replace(super().rehearsed(num_samples), num_centers=centers, iterations=2)

    def _save_centers(
        self, inputs: SimpleNamespace, embedded: "FeatureStore", context: Context, directory: Path
    ) -> None:
        from clip_moe.training.clusters import balanced_kmeans, load_centers, save_centers

        name = embedded.about["encoder"]
        if self.num_centers is None:
            centers = load_centers(Path(inputs.centers), name)
        else:
            sample = embedded["embeddings"].sample(self.num_samples or embedded.num_rows, context.seed)
            device = context.accelerator.device
            centers = balanced_kmeans(sample, self.num_centers, context.seed, self.iterations, device)[0]
        save_centers(directory, centers, name)
