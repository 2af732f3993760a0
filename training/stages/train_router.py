"""The stage that trains routers."""

from typing import ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from clip_moe.engine.settings import STRICT
from clip_moe.training.stages.train import TrainStage
from clip_moe.training.train_settings import BalanceMean


@dataclass(config=STRICT, kw_only=True)
class TrainRouterStage(TrainStage):
    """Routers trained with the experts frozen (CLIP-MoE section 4), or with fusion gates (CLIP-FMoE section 4.3). The
    defaults are CLIP-MoE's.

        clip-moe train-router runs/routed --model runs/clip_moe --data.source symbols --data.num_samples 64 \\
            --global_batch_size 8 --max_steps 2 --learning_rate 1e-4
    """

    kind: ClassVar[str] = "train_router"

    trainable: str = r"\.mlp\.router\."
    balance_top_k: int | None = Field(default=1, gt=0)
    balance_mean: BalanceMean = "layer"
