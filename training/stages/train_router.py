"""The stage that trains routers."""

import typing
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from clip_moe.engine.settings import STRICT
from clip_moe.training.stages.train import TrainStage
from clip_moe.training.train_settings import Trainable

if typing.TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from clip_moe.training.contrastive_task import ContrastiveTask
    from clip_moe.training.losses import Reduce
    from modeling_clip_moe import CLIPMoEConfig


@dataclass(config=STRICT, kw_only=True)
class TrainRouterStage(TrainStage):
    """Routers trained with the experts frozen (CLIP-MoE section 4), or with fusion gates (CLIP-FMoE section 4.3). The
    defaults are CLIP-MoE's.

        clip-moe train-router runs/routed --model runs/clip_moe --data.source symbols --data.num_samples 64 \\
            --global_batch_size 8 --max_steps 2 --learning_rate 1e-4
    """

    kind: ClassVar[str] = "train_router"

    trainable: Trainable = r"\.mlp\.router\."
    # Number of a token's choices that count as load in the balance loss: 1, the argmax (CLIP-MoE eq. 7); None: all K
    # (CLIP-UP, CLIP-FMoE).
    balance_top_k: int | None = Field(default=1, gt=0)
    # Router losses are the mean over a tower's layers, summed over the towers (CLIP-UP); the mean over all layers of
    # both towers (CLIP-MoE eq. 9); those of the tokens of all layers and towers taken together (CLIP-FMoE eq. 3);
    # those of the tokens of all layers of a tower taken together, summed over the towers (CLIP-MoE's released code); or
    # the mean over the layers of a shared encoder, in each of which the tokens of both towers are taken together.
    balance_mean: Literal["tower", "layer", "token", "tower_token", "shared"] = "layer"
    # Factor of the text tower's router losses, where they are summed over the towers; None: 1.
    text_router_weight: float | None = Field(default=None, ge=0)
    # Dropout rate of the activations within experts (CLIP-MoE's released code); the random numbers depend on the number
    # of processes. None: no dropout.
    expert_dropout: float | None = Field(default=None, gt=0, lt=1)

    @model_validator(mode="after")
    def _check_routers(self):
        if self.text_router_weight is not None and self.balance_mean not in ("tower", "tower_token"):
            raise ValueError(f"text_router_weight needs a sum over the towers, got balance_mean {self.balance_mean}")
        return self

    def problems(self, model: "PreTrainedModel", batch_size: int) -> Iterator[str]:
        from modeling_clip_moe.families import sparse_towers

        yield from super().problems(model, batch_size)
        towers = sparse_towers(model.config)
        if self.expert_dropout is not None and not towers:
            yield f"expert_dropout: it needs a sparse model, but {self.model} is dense"
        if self.balance_mean == "shared" and not getattr(model.config, "shared_encoder", False):
            yield "balance_mean: shared needs a model with shared_encoder: true; this one has two encoders"
        elif self.balance_mean in ("token", "shared"):
            choices = {(tower.num_experts, tower.num_experts_per_tok, tower.scoring_func) for tower in towers.values()}
            if len(choices) > 1:
                yield (
                    f"balance_mean: {self.balance_mean} takes the tokens of both towers together, whose num_experts, "
                    f"num_experts_per_tok or scoring_func differ: {sorted(choices)}; use tower"
                )
        for tower in towers.values():
            if self.balance_top_k is not None and self.balance_top_k > tower.num_experts:
                yield f"balance_top_k: {self.balance_top_k} of {tower.num_experts} experts"

    def task(self, model: "PreTrainedModel", inputs: SimpleNamespace) -> "ContrastiveTask":
        from clip_moe.training.contrastive_task import drop_activations

        if self.expert_dropout is not None:
            drop_activations(model, self.expert_dropout)
        return super().task(model, inputs)

    def router_loss(
        self, config: "CLIPMoEConfig", outputs: Any, batch: "Mapping[str, torch.Tensor]", reduce: "Reduce"
    ) -> "tuple[torch.Tensor, dict[str, torch.Tensor]]":
        from clip_moe.training.losses import router_losses

        top_k, weight = self.balance_top_k, self.text_router_weight
        return router_losses(config, outputs, batch, reduce, top_k, self.balance_mean, weight)
