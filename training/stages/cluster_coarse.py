"""The stage that groups fine-grained clusters into data experts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from clip_moe.engine.context import Context
from clip_moe.engine.settings import STRICT, Reads
from clip_moe.engine.stage import Stage


@dataclass(config=STRICT, kw_only=True)
class ClusterCoarseStage(Stage):
    """The fine-grained centers grouped into data experts, and the expert of every pair (MoDE eq. 2 and 3).

    Cluster 0 has the largest range, and is to be trained first where there is no time for all.

        clip-moe cluster-coarse runs/coarse --fine runs/fine --num_experts 2
    """

    kind: ClassVar[str] = "cluster_coarse"
    has_rows_of_pairs: ClassVar[bool] = True
    main_process_only: ClassVar[bool] = True

    # A cluster_fine stage.
    fine: Annotated[str, Reads("cluster_fine")]
    # How many data experts there are.
    num_experts: int = Field(gt=0)
    # Give the pairs to the experts at random, as many to each as the clusters have: to compare with (MoDE section 5.1).
    random: bool = False

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        from clip_moe.training.caption_clusters import save_experts
        from clip_moe.training.clusters import group_centers, load_centers

        centers = load_centers(Path(inputs.fine))
        expert_of_center, coarse_centers = group_centers(centers, self.num_experts, context.seed)
        found = centers, expert_of_center, coarse_centers
        save_experts(self.name, Path(inputs.fine), context, directory, found, self.random)
