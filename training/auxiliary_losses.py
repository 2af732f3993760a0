"""Losses that a stage of one's own adds to the contrastive one.

Each is a module of the task, so that what it learns or keeps is in checkpoints; none of it is in the trained model.
"""

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel

from clip_moe.training.losses import Reduce

Batch = Mapping[str, torch.Tensor]


class AuxiliaryLoss(nn.Module):
    """A loss that sees model, outputs and batch. Autocast is off.

    Where a batch is computed in parts (`mini_batch_size`), it is called for each, and has to return the loss of the
    whole batch: a function of sums that `reduce` makes or, of weights alone, `mean_over_parts`.
    """

    # Whether it reads weights of the model, which FSDP2 splits
    READS_WEIGHTS = True

    def forward(
        self, model: PreTrainedModel, outputs: Any, batch: Batch, progress: float, reduce: Reduce
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """This process's part of the loss and scalars to log, as `TrainStage.router_loss` has them.

        Args:
            outputs: what the model returned, called with `output_router_logits=True, output_expert_ids=True`.
            progress: the share of the stage's steps that are done, from 0.
            reduce: the sum of a tensor over the global batch, with gradient.
        """

    def after_step(self, accelerator: Accelerator) -> None:
        """The optimizer has taken a step."""


def mean_over_parts(loss: torch.Tensor, reduce: Reduce) -> torch.Tensor:
    """The mean of a loss of weights alone over processes and over the parts of a batch, with its gradient."""
    total = reduce(torch.stack([loss, torch.ones_like(loss)]))
    return total[0] / total[1]
