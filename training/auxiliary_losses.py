"""Losses beside the contrastive one that a stage adds: of routers with ReLU, and of stages of one's own.

Each is a module of the task, so that what it learns or keeps is in checkpoints; none of it is in the trained model.
"""

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel

from clip_moe.training.losses import all_reduce_sum
from modeling_clip_moe.sparse_moe import (
    load_balancing_loss,
    mean_over_tokens,
    router_scores,
)

Batch = Mapping[str, torch.Tensor]
TOWERS = ("text", "vision")


class AuxiliaryLoss(nn.Module):
    """A loss that sees model, outputs and batch. Autocast is off.

    Where a batch is computed in parts (`mini_batch_size`), it is called for each, and has to return the loss of the
    whole batch: a function of sums that `training.losses.all_reduce_sum` makes or, of weights alone, `mean_over_parts`.
    """

    # Whether it reads weights of the model, which FSDP2 splits
    READS_WEIGHTS = True

    def forward(
        self, model: PreTrainedModel, outputs: Any, batch: Batch, progress: float
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """This process's part of the loss and scalars to log, as `TrainStage.router_loss` has them.

        Args:
            outputs: what the model returned, called with `output_router_logits=True, output_expert_ids=True`.
            progress: the share of the stage's steps that are done, from 0.
        """
        raise NotImplementedError

    def after_step(self, accelerator: Accelerator) -> None:
        """The optimizer has taken a step."""


def mean_over_parts(loss: torch.Tensor) -> torch.Tensor:
    """The mean of a loss of weights alone over processes and over the parts of a batch, with its gradient."""
    total = all_reduce_sum(torch.stack([loss, torch.ones_like(loss)]))
    return total[0] / total[1]


def logits_and_mask(tower: str, outputs: Any, batch: Batch) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
    """Of each sparse layer of a tower the router's logits, and the mask of its tokens."""
    mask = batch["attention_mask"] if tower == "text" else batch.get("pixel_attention_mask")
    return getattr(outputs, f"{tower}_router_logits") or (), mask


class AdaptiveSparsity(AuxiliaryLoss):
    """Keeps ReLU routers at `num_experts_per_tok` experts a token on average (ReMoE, arXiv:2412.14711, section 3).

    The load-weighted L1 of the scores has a weight of its own in each tower, which begins at 1e-8. After each step it
    is multiplied by 1.2 if tokens met more experts than that, and else divided by it.
    """

    READS_WEIGHTS = False
    START, FACTOR = 1e-8, 1.2

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.aims = {}  # tower -> K / E
        for tower in TOWERS:
            config = getattr(model.config, f"{tower}_config")
            if getattr(config, "moe_layers", ()) and config.scoring_func == "relu":
                self.aims[tower] = config.num_experts_per_tok / config.num_experts
                self.register_buffer(f"{tower}_weight", torch.tensor(self.START))
                self.register_buffer(f"{tower}_counts", torch.zeros(2, dtype=torch.float64), persistent=False)

    def forward(self, model, outputs, batch, progress):
        total, metrics = 0.0, {}
        is_counted = torch.is_grad_enabled()  # not when parts of a batch are computed for their embeddings first
        for tower, aim in self.aims.items():
            of_layers, mask = logits_and_mask(tower, outputs, batch)
            top_k = round(aim * of_layers[0].shape[-1])
            loss = load_balancing_loss(of_layers, top_k, mask, all_reduce_sum, "relu")
            with torch.no_grad():
                chosen = torch.stack([router_scores(logits, "relu").flatten(0, -2) > 0 for logits in of_layers])
                share = mean_over_tokens(chosen.float().mean(-1, keepdim=True), mask, all_reduce_sum).mean()
                if is_counted:
                    self.get_buffer(f"{tower}_counts").add_(torch.stack([share, torch.ones_like(share)]))
            total = total + self.get_buffer(f"{tower}_weight") * loss
            metrics[f"{tower}_experts_per_token"] = share * of_layers[0].shape[-1]
            metrics[f"{tower}_sparsity_weight"] = self.get_buffer(f"{tower}_weight").clone()
        return total, metrics

    @torch.no_grad()
    def after_step(self, accelerator):
        for tower, aim in self.aims.items():
            counts, weight = self.get_buffer(f"{tower}_counts"), self.get_buffer(f"{tower}_weight")
            weight.mul_(torch.where(counts[0] / counts[1] > aim, self.FACTOR, 1 / self.FACTOR))
            counts.zero_()
