"""Training of routers with ReLU (ReMoE, arXiv:2412.14711, section 3), under `--import lab.methods.relu_router`.

- {name: relu_start, stage: upcycle, preset: clip_up, changes: {norm_topk_prob: false, capacity_factor: null}}
- {name: relu, stage: lab.methods.relu_routing:ReluStage, model: relu_start}
"""

from collections.abc import Sequence

import torch
from pydantic.dataclasses import dataclass
from transformers import PreTrainedModel

from clip_moe.engine.settings import STRICT
from clip_moe.training.losses import Reduce, all_reduce_sum
from clip_moe.training.stages.train import TrainStage
from clip_moe.training.task import AuxiliaryLoss
from lab.methods import TOWERS, logits_and_mask
from modeling_clip_moe.router_losses import mean_over_tokens


@dataclass(config=STRICT, kw_only=True)
class ReluStage(TrainStage):
    """A `train` stage that keeps ReLU routers at `num_experts_per_tok` experts a token on average."""

    def auxiliary_losses(self, model, inputs):
        if model.config.model_type != "relu_clip":
            raise ValueError(f"{self.name}: it goes with a sparse model of lab.methods.relu_router, not {self.model}")
        if model.config.router_aux_loss_coef or model.config.router_z_loss_coef:
            raise ValueError(
                f"{self.name}: routers with ReLU have a loss of their own: set router_aux_loss_coef and "
                "router_z_loss_coef of the model to 0"
            )
        return [*super().auxiliary_losses(model, inputs), AdaptiveSparsity(model)]


class AdaptiveSparsity(AuxiliaryLoss):
    """The load-weighted L1 of the scores, whose weight follows the number of experts a token meets.

    The weight of each tower begins at 1e-8. After each step it is multiplied by 1.2 if tokens met more than
    `num_experts_per_tok` experts on average, and else divided by it.
    """

    READS_WEIGHTS = False
    START, FACTOR = 1e-8, 1.2

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.aims = {}  # tower -> K / E
        for tower in TOWERS:
            config = getattr(model.config, f"{tower}_config")
            if config.moe_layers:
                self.aims[tower] = config.num_experts_per_tok / config.num_experts
                self.register_buffer(f"{tower}_weight", torch.tensor(self.START))
                self.register_buffer(f"{tower}_counts", torch.zeros(2, dtype=torch.float64), persistent=False)

    def forward(self, model, outputs, batch, progress, reduce):
        total, metrics = 0.0, {}
        is_counted = torch.is_grad_enabled()  # not when parts of a batch are computed for their embeddings first
        for tower, aim in self.aims.items():
            router_logits, mask = logits_and_mask(tower, outputs, batch)
            num_experts = router_logits[0].shape[-1]
            loss, share = load_weighted_l1(router_logits, round(aim * num_experts), mask, reduce)
            if is_counted:
                self.get_buffer(f"{tower}_counts").add_(torch.stack([share, torch.ones_like(share)]))
            total = total + self.get_buffer(f"{tower}_weight") * loss
            metrics[f"{tower}_experts_per_token"] = share * num_experts
            metrics[f"{tower}_sparsity_weight"] = self.get_buffer(f"{tower}_weight").clone()
        return total, metrics

    @torch.no_grad()
    def after_step(self, accelerator):
        for tower, aim in self.aims.items():
            counts, weight = self.get_buffer(f"{tower}_counts"), self.get_buffer(f"{tower}_weight")
            weight.mul_(torch.where(counts[0] / counts[1] > aim, self.FACTOR, 1 / self.FACTOR))
            counts.zero_()


def load_weighted_l1(
    router_logits: Sequence[torch.Tensor], top_k: int, mask: torch.Tensor | None, reduce: Reduce = all_reduce_sum
) -> tuple[torch.Tensor, torch.Tensor]:
    """ReMoE's loss (eq. 9), and the share of scores that are positive: scalars, means over all processes' tokens.

    A layer's loss is the sum over its experts of E / K * (share of tokens with a positive score) * (mean score).

    Args:
        router_logits: one tensor (B, S, E) a layer.
        mask: (B, S), 1 for a token and 0 for padding.
    """
    scores = torch.stack([logits.flatten(0, -2) for logits in router_logits]).float().relu()  # (L, T, E)
    chosen = (scores > 0).float()
    loads, means = mean_over_tokens(torch.cat([chosen, scores], dim=-1), mask, reduce).chunk(2, dim=-1)
    loss = (scores.shape[-1] / top_k * loads * means).sum(dim=-1).mean()
    with torch.no_grad():
        share = mean_over_tokens(chosen.mean(-1, keepdim=True), mask, reduce).mean()
    return loss, share
