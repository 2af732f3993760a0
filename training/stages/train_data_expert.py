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
    from clip_moe.data.columns import Rows


@dataclass(config=STRICT, kw_only=True)
class TrainDataExpertStage(TrainStage):
    """A data expert: a whole CLIP, trained on the pairs of one cluster of captions (MoDE section 3.3).

    For example:

        clip-moe train-data-expert runs/data_expert_1 --model training/symbol_clip --expert 1 --clusters \\
            runs/coarse --cluster 0 --data.source symbols --data.num_samples 64 --global_batch_size 8 --max_steps 2 \\
            --learning_rate 1e-4
    """

    kind: ClassVar[str] = "train_data_expert"

    # The pairs that were clustered.
    data: NumberedData
    # Number to select it by, with --experts.
    expert: int = Field(gt=0)
    # A cluster stage.
    clusters: Annotated[str, Reads("cluster")]
    # Number of the cluster.
    cluster: int = Field(ge=0)

    def load_pairs(self, inputs: SimpleNamespace, context: Context) -> "Rows":
        """The pairs of one cluster. Where pairs were clustered by captions alone, their images are looked at now."""
        import numpy as np

        from clip_moe.data.pairs import shared_fingerprint, shared_pairs
        from clip_moe.data.readable import readable_pairs
        from clip_moe.training.clusters import READABLE, load_clusters

        folder = Path(inputs.clusters)
        has_images = load_clusters(folder)[1]["pairs"] == READABLE
        rows = shared_pairs(context, inputs.data, has_images)
        clusters, _ = load_clusters(folder, shared_fingerprint(context, rows, has_images))
        chosen = np.flatnonzero(clusters.labels == self.cluster)
        if context.rehearses and len(chosen) < REHEARSED_STEPS * self.global_batch_size:
            chosen = np.arange(len(rows))  # few pairs leave fewer than a batch to a cluster
        context.accelerator.on_main_process(print)(f"{self.name}: {len(chosen)} of {len(rows)} pairs")
        rows = rows.select(chosen)
        if has_images or inputs.data.is_drawn:
            return rows
        with context.main_process_first():
            return readable_pairs(rows, inputs.data)[0]
