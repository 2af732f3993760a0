"""The stage that trains an expert of MoDE."""

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from clip_moe.data.arguments import NumberedData
from clip_moe.engine.context import Context
from clip_moe.engine.settings import STRICT, Reads
from clip_moe.training.stages.steps import REHEARSED_STEPS
from clip_moe.training.stages.train import TrainStage

if TYPE_CHECKING:
    from clip_moe.data.sources import Rows


@dataclass(config=STRICT, kw_only=True)
class TrainDataExpertStage(TrainStage):
    """A data expert: a whole CLIP, trained on the pairs of one cluster of captions (MoDE section 3.3).

    For example:

        clip-moe train-data-expert runs/data_expert_1 --model training/symbol_clip --expert 1 --clusters \\
            runs/coarse --cluster 0 --data.source symbols --data.num_samples 64 --global_batch_size 8 --max_steps 2 \\
            --learning_rate 1e-4
    """

    kind: ClassVar[str] = "train_data_expert"

    # The pairs that the cluster is a part of.
    data: NumberedData
    # The number by which --experts chooses it.
    expert: int = Field(gt=0)
    # A cluster stage.
    clusters: Annotated[str, Reads("cluster")]
    # The number of the cluster.
    cluster: int = Field(ge=0)

    def steps_of_all(self, directory: Path, ratio: float | None) -> int | None:
        """Few pairs do not tell how many a cluster has."""
        return self.max_steps

    def load_pairs(self, inputs: SimpleNamespace, context: Context) -> "Rows":
        """Where pairs were clustered by captions alone, the images of the cluster are looked at now."""
        from clip_moe.data.shared_rows import shared_pairs, shared_readable

        images = _of_images(Path(inputs.clusters))
        rows = self.choose_pairs(shared_pairs(context, inputs.data, images), inputs, context)
        return rows if images else shared_readable(context, rows, inputs.data)

    def choose_pairs(self, rows: "Rows", inputs: SimpleNamespace, context: Context) -> "Rows":
        """The pairs of one cluster."""
        import numpy as np

        from clip_moe.data.shared_rows import shared_fingerprint
        from clip_moe.training.clusters import load_clusters

        folder = Path(inputs.clusters)
        fingerprint = shared_fingerprint(context, rows, _of_images(folder))
        chosen = np.flatnonzero(load_clusters(folder, fingerprint)[0].labels == self.cluster)
        if context.rehearses and len(chosen) < REHEARSED_STEPS * self.global_batch_size:
            chosen = np.arange(len(rows))  # few pairs leave fewer than a batch to a cluster
        if len(chosen) < self.global_batch_size:
            raise ValueError(
                f"cluster {self.cluster} of {self.clusters} has {len(chosen)} pairs, fewer than "
                f"global_batch_size {self.global_batch_size}: lower it, or make fewer clusters"
            )
        context.accelerator.on_main_process(print)(f"{self.name}: {len(chosen)} of {len(rows)} pairs")
        return rows.select(chosen)


def _of_images(clusters: Path) -> bool:
    """Whether only pairs with a readable image have labels."""
    from clip_moe.training.clusters import READABLE, load_clusters

    return load_clusters(clusters)[1]["pairs"] == READABLE
