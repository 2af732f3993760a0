"""The stage that trains an expert of MoDE."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from data.sources import Rows
from data.worlds import WORLDS
from training.clusters import load_clusters
from training.context import Context
from training.estimates import AtMost
from training.features import READABLE
from training.settings import STRICT, Reads
from training.stages.base import NumberedData
from training.stages.train import TrainStage


@dataclass(config=STRICT, kw_only=True)
class TrainDataExpertStage(TrainStage):
    """A data expert: a whole CLIP, trained on the pairs of one cluster of captions (MoDE section 3.3)."""

    kind: ClassVar[str] = "train_data_expert"

    # The pairs that the cluster is a part of.
    data: NumberedData
    # The number by which --experts chooses it.
    expert: int = Field(gt=0)
    # A cluster_coarse or select stage, and which of its clusters.
    clusters: Annotated[str, Reads("cluster_coarse", "select")]
    # The number of the cluster.
    cluster: int = Field(ge=0)

    def steps(self, inputs: SimpleNamespace) -> int:
        """Before there are clusters, as if all pairs were in the one."""
        folder = inputs.clusters.folder
        if self.num_epochs is None or folder is None:
            return super().steps(inputs) if self.num_epochs is None else AtMost(super().steps(inputs))
        pairs = int((load_clusters(folder)[0].labels == self.cluster).sum())
        known = _of_images(folder) or self.data.source in WORLDS  # of others, images may be found unreadable
        return self.num_epochs * ((pairs if known else AtMost(pairs)) // self.global_batch_size)

    def cost(self, inputs: SimpleNamespace) -> dict[str, Callable[[], int]]:
        """Memory at most, where images are kept in it: only those of the cluster are."""
        cost = super().cost(inputs)
        return cost | ({"memory": lambda: AtMost(cost["memory"]())} if self.data.in_memory else {})

    def load_pairs(self, inputs: SimpleNamespace, context: Context) -> Rows:
        """Where pairs were clustered by captions alone, the images of the cluster are looked at now."""
        images = _of_images(Path(inputs.clusters))
        rows = self.choose_pairs(context.pairs(inputs.data, images), inputs, context)
        return rows if images else context.readable(rows, inputs.data)

    def choose_pairs(self, rows: Rows, inputs: SimpleNamespace, context: Context) -> Rows:
        """The pairs of one cluster."""
        folder = Path(inputs.clusters)
        fingerprint = context.data_fingerprint(rows, _of_images(folder))
        chosen = np.flatnonzero(load_clusters(folder, fingerprint)[0].labels == self.cluster)
        if len(chosen) < self.global_batch_size:
            raise ValueError(
                f"cluster {self.cluster} of {self.clusters} has {len(chosen)} pairs, fewer than "
                f"global_batch_size {self.global_batch_size}: lower it, or make fewer clusters"
            )
        context.accelerator.on_main_process(print)(f"{self.name}: {len(chosen)} of {len(rows)} pairs")
        return rows.select(chosen)


def _of_images(clusters: Path) -> bool:
    """Whether only pairs with a readable image have labels."""
    return load_clusters(clusters)[1]["pairs"] == READABLE
