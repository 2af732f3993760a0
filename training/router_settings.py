"""The losses of routers, as settings of a stage that trains."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass
from transformers import PreTrainedConfig

from modeling_clip_moe import CLIPMoEConfig
from records.messages import join_names
from training.losses import entropy_losses, router_losses
from training.settings import STRICT

BalanceMean = Literal["tower", "layer", "token", "tower_token", "shared"]
Tower = Literal["text", "vision"]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(config=STRICT, kw_only=True)
class RouterSettings:
    """Settings of the routers of a sparse model."""

    # How many choices of a token count as load in the balance loss: 1, the argmax (CLIP-MoE eq. 7); None: all K
    # (CLIP-UP, CLIP-FMoE).
    balance_top_k: int | None = Field(default=None, gt=0)
    # Router losses are the mean over a tower's layers, summed over the towers (CLIP-UP); the mean over all layers of
    # both towers (CLIP-MoE eq. 9); those of the tokens of all layers and towers taken together (CLIP-FMoE eq. 3);
    # those of the tokens of all layers of a tower taken together, summed over the towers (CLIP-MoE's released code); or
    # the mean over the layers of a shared encoder, in each of which the tokens of both towers are taken together.
    balance_mean: BalanceMean = "tower"
    # Where router losses are summed over the towers: what those of the text tower are multiplied by; None: 1.
    text_router_weight: float | None = Field(default=None, ge=0)
    # LIMoE's losses of routers, of `text`, of `vision` or of both (CLIP-UP eq. 8 to 11): the weight of the local
    # entropy loss, which is low where the router is sure of every token.
    local_entropy_coef: dict[Tower, Weight] = Field(default_factory=dict)
    # The weight of the global entropy loss, which is 0 where the tokens of each layer are spread over enough experts.
    global_entropy_coef: dict[Tower, Weight] = Field(default_factory=dict)
    # How many experts are enough for it.
    global_entropy_min_experts: dict[Tower, Annotated[float, Field(gt=1)]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_routers(self):
        if self.text_router_weight is not None and self.balance_mean not in ("tower", "tower_token"):
            raise ValueError(f"text_router_weight goes with a sum over the towers, not with {self.balance_mean}")
        if set(self.global_entropy_coef) != set(self.global_entropy_min_experts):
            raise ValueError(
                f"global_entropy_coef is for {join_names(list(self.global_entropy_coef)) or 'no tower'}, but "
                f"global_entropy_min_experts for {join_names(list(self.global_entropy_min_experts)) or 'no tower'}"
            )
        return self

    def router_loss(
        self, config: CLIPMoEConfig, outputs, batch: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """What is added to the loss of a sparse model for its routers, and scalars to log: see `router_losses` and
        `entropy_losses`."""
        settings = self.balance_top_k, self.balance_mean, self.text_router_weight
        loss, metrics = router_losses(config, outputs, batch, *settings)
        settings = self.local_entropy_coef, self.global_entropy_coef, self.global_entropy_min_experts
        entropy, entropy_metrics = entropy_losses(config, outputs, batch, *settings)
        return loss + entropy, metrics | entropy_metrics

    def router_problems(self, config: PreTrainedConfig) -> Iterator[tuple[str, str]]:
        """Settings that do not go with a model of this configuration, each with what is wrong."""
        towers = {tower: getattr(config, f"{tower}_config") for tower in ("text", "vision")}
        sparse = {name: tower for name, tower in towers.items() if getattr(tower, "moe_layers", [])}
        for tower in sparse.values():
            if self.balance_top_k is not None and self.balance_top_k > tower.num_experts:
                yield "balance_top_k", f"{self.balance_top_k} of {tower.num_experts} experts"
        if self.balance_mean == "shared" and not getattr(config, "shared_encoder", False):
            yield "balance_mean", "shared needs a model with shared_encoder: true; this one has two encoders"
        elif self.balance_mean in ("token", "shared"):
            choices = {(tower.num_experts, tower.num_experts_per_tok) for tower in sparse.values()}
            if len(choices) > 1:
                reason = "takes the tokens of both towers together, whose num_experts and num_experts_per_tok differ"
                yield "balance_mean", f"{self.balance_mean} {reason}: {sorted(choices)}; take tower"
        for setting in ("local_entropy_coef", "global_entropy_coef"):
            for name in getattr(self, setting):
                if name not in sparse:
                    yield f"{setting}.{name}", "that tower has no sparse layers: leave it out"
        for name, enough in self.global_entropy_min_experts.items():
            if name in sparse and enough > sparse[name].num_experts:
                yield (f"global_entropy_min_experts.{name}", f"{enough:g} of {sparse[name].num_experts} experts")
