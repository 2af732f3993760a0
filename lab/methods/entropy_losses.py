"""LIMoE's entropy losses of routers (arXiv:2206.02770), with which CLIP-UP is compared (eq. 8 to 11, Table 4).

- name: limoe
  stage: lab.methods.entropy_losses:EntropyStage
  model: upcycled
  local_coef: {text: 0.01}
  global_coef: {text: 0.01, vision: 0.01}
"""

import math
from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from clip_moe.engine.settings import STRICT
from clip_moe.training.losses import Reduce
from clip_moe.training.stages.train import TrainStage
from clip_moe.training.task import AuxiliaryLoss
from lab.methods import TOWERS, logits_and_mask
from modeling_clip_moe.families import sparse_towers
from modeling_clip_moe.router_losses import mean_over_tokens

Coefs = dict[Literal["text", "vision"], Annotated[float, Field(ge=0, allow_inf_nan=False)]]


@dataclass(config=STRICT, kw_only=True)
class EntropyStage(TrainStage):
    """A `train` stage with LIMoE's entropy losses of the routers of some towers."""

    # Tower -> the weight of the local loss, which is low where the router is sure of every token.
    local_coef: Coefs = Field(default_factory=dict)
    # Tower -> the weight of the global loss, which is 0 where each layer's tokens are spread over enough experts.
    global_coef: Coefs = Field(default_factory=dict)
    # How many experts are enough (CLIP-UP: 6).
    min_experts: float = Field(default=6, gt=1)

    def auxiliary_losses(self, model, inputs):
        towers = sparse_towers(model.config)
        for tower in {*self.local_coef, *self.global_coef}:
            if tower not in towers or towers[tower].scoring_func != "softmax":
                raise ValueError(f"{self.name}: the {tower} tower has no routers with softmax scores: leave it out")
            if tower in self.global_coef and self.min_experts > (number := towers[tower].num_experts):
                raise ValueError(f"{self.name}.min_experts: {self.min_experts:g} of {number} experts")
        losses = EntropyLosses(self.local_coef, self.global_coef, self.min_experts)
        return [*super().auxiliary_losses(model, inputs), losses]


class EntropyLosses(AuxiliaryLoss):
    """The weighted sum of both losses, in nats; each is logged before it is weighted, in bits."""

    READS_WEIGHTS = False

    def __init__(self, local_coef: Mapping[str, float], global_coef: Mapping[str, float], min_experts: float):
        super().__init__()
        self.local_coef, self.global_coef, self.min_experts = local_coef, global_coef, min_experts

    def forward(self, model, outputs, batch, progress, reduce):
        total, bits = 0.0, {}
        for tower in TOWERS:
            router_logits, mask = logits_and_mask(tower, outputs, batch)
            if tower in self.local_coef:
                loss = local_entropy_loss(router_logits, mask, reduce)
                total, bits[f"local_entropy_{tower}"] = total + self.local_coef[tower] * loss, loss / math.log(2)
            if tower in self.global_coef:
                loss = global_entropy_loss(router_logits, self.min_experts, mask, reduce)
                total, bits[f"global_entropy_{tower}"] = total + self.global_coef[tower] * loss, loss / math.log(2)
        return total, {name: value.detach() for name, value in bits.items()}


def local_entropy_loss(
    router_logits: tuple[torch.Tensor, ...], mask: torch.Tensor | None = None, reduce: Reduce | None = None
) -> torch.Tensor:
    """The mean over the tokens of all processes and over layers of the entropy of a token's probabilities, between 0
    and log(E) (eq. 8).

    Args:
        router_logits: one tensor (B, S, E) a layer.
        mask: (B, S), 1 for a token and 0 for padding.
        reduce: see `AuxiliaryLoss.forward`; None: the loss of this process's tokens.
    """
    logits = torch.stack([logits.flatten(0, -2) for logits in router_logits]).float()  # (L, T, E)
    entropy = _entropy(logits.softmax(dim=-1), logits.log_softmax(dim=-1))
    return mean_over_tokens(entropy, mask, reduce).mean()


def global_entropy_loss(
    router_logits: tuple[torch.Tensor, ...],
    min_experts: float,
    mask: torch.Tensor | None = None,
    reduce: Reduce | None = None,
) -> torch.Tensor:
    """The mean over layers of max(0, log(m) - entropy of the mean probabilities) (eq. 9 and 10): 0 once a layer spreads
    its tokens over m experts. CLIP-UP eq. 9 prints the entropy itself; only its negative, as in LIMoE, is smallest when
    many experts are in use.

    Args:
        router_logits, mask, reduce: see `local_entropy_loss`.
        min_experts: m.
    """
    logits = torch.stack([logits.flatten(0, -2) for logits in router_logits]).float()
    probabilities = mean_over_tokens(logits.softmax(dim=-1), mask, reduce)  # (L, E)
    logarithms = probabilities.clamp(min=torch.finfo(probabilities.dtype).tiny).log()
    return (math.log(min_experts) - _entropy(probabilities, logarithms)).clamp(min=0).mean()


def _entropy(probabilities: torch.Tensor, logarithms: torch.Tensor) -> torch.Tensor:
    """Entropy of the last axis, which stays with size 1. Its gradient is finite where a probability is 0."""
    finite = logarithms.clamp(min=torch.finfo(logarithms.dtype).min)
    return -(probabilities * finite).sum(dim=-1, keepdim=True)
