"""The stage that trains an expert on batches of one cluster."""

import dataclasses
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from clip_moe.data.arguments import NumberedData
from clip_moe.engine.context import Context
from clip_moe.engine.settings import STRICT, Reads
from clip_moe.training.stages.train import TrainStage
from clip_moe.training.train_settings import Trainable

if typing.TYPE_CHECKING:
    import numpy as np

    from clip_moe.data.columns import Rows
    from clip_moe.training.clusters import Clusters
    from clip_moe.training.samplers import ClusterBatchSampler, Share


@dataclass(config=STRICT, kw_only=True)
class TrainExpertsStage(TrainStage):
    """One expert, trained with batches of one cluster each: the FFNs of a dense CLIP (Multistage Contrastive Learning,
    CLIP-MoE section 3), or the copies and gates of a fused model (CLIP-FMoE section 4.2).

        clip-moe train-experts runs/expert_1 --model training/symbol_clip --expert 1 --clusters runs/clusters \\
            --data.source symbols --data.num_samples 64 --global_batch_size 8 --max_steps 2 --learning_rate 1e-4
    """

    kind: ClassVar[str] = "train_experts"

    trainable: Trainable = r"\.layers\.\d+\.mlp\."  # not the FFN of SigLIP's pooling
    # Pairs to train on.
    data: NumberedData
    # Number to select it by, with --experts.
    expert: int = Field(gt=0)
    # A cluster stage.
    clusters: Annotated[str, Reads("cluster")]
    # Only the samples of this first-level cluster (CLIP-FMoE); None: all.
    cluster: int | None = Field(default=None, ge=0)
    # Order of the clusters' batches: shuffled, or one of each in turn until all are used (CLIP-FMoE appendix C).
    order: Literal["shuffled", "round_robin"] = "shuffled"
    # Samples of clusters smaller than a batch: left out, or merged into the nearest other cluster.
    small_clusters: Literal["drop", "merge"] = "drop"

    def rehearsed(self, num_samples: int) -> typing.Self:
        """Few pairs fill no batch of a small cluster, so these are merged."""
        return dataclasses.replace(super().rehearsed(num_samples), cluster=None, small_clusters="merge")

    def batch_sampler(
        self, rows: "Rows", share: "Share", inputs: SimpleNamespace, context: Context
    ) -> "ClusterBatchSampler":
        """Batches of one cluster each."""
        import numpy as np

        from clip_moe.data.pairs import shared_fingerprint
        from clip_moe.training.clusters import load_clusters
        from clip_moe.training.samplers import ClusterBatchSampler

        clusters, _ = load_clusters(Path(inputs.clusters), shared_fingerprint(context, rows))
        batch_size = share.global_batch_size
        labels = self.labels(clusters, batch_size)
        sizes = np.unique(labels[labels >= 0], return_counts=True)[1]
        unused = (sizes % batch_size).sum()
        context.accelerator.on_main_process(print)(
            f"{self.name}: {len(sizes)} clusters, {(sizes < batch_size).sum()} of them smaller than a batch "
            f"(small_clusters: {self.small_clusters}); batches of one cluster leave {unused} of {sizes.sum()} samples "
            "unused in an epoch"
        )
        return ClusterBatchSampler(labels, share, self.order)

    def labels(self, clusters: "Clusters", batch_size: int) -> "np.ndarray":
        """(samples,) the cluster of each sample whose batches train this expert, or -1."""
        from clip_moe.training.samplers import merge_small_clusters

        labels = clusters.labels.copy()
        if self.cluster is not None:
            labels[clusters.tuples[labels, 0] != self.cluster] = -1
        if self.small_clusters == "merge":
            ours = labels >= 0
            labels[ours] = merge_small_clusters(labels[ours], clusters.centers, batch_size)
        return labels
