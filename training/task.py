"""A model and its losses in one module: all that the loop knows of what it trains."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn
from transformers import PreTrainedModel

from clip_moe.training.losses import Reduce

Batch = dict[str, torch.Tensor]
Metrics = dict[str, torch.Tensor]


class AuxiliaryLoss(nn.Module):
    """A loss of a stage of one's own that sees model, outputs and batch, and is added to the contrastive one. Autocast
    is off. Its parameters and buffers are in checkpoints, not in the trained model.

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


class Task(nn.Module):
    """A model with its loss. A subclass has `forward(batch)`: this process's part of the loss, and scalars to log.

    Attributes:
        model: what is saved in the end.
        progress: the share of the steps that are done.
        auxiliary_losses: parts of the loss that see the model.
        mini_batch_size: samples that are computed at a time; None: all of a batch.
    """

    mini_batch_size: int | None = None

    def __init__(self, model: PreTrainedModel, auxiliary_losses: Sequence[AuxiliaryLoss] = ()):
        super().__init__()
        self.model, self.progress, self.auxiliary_losses = model, 0.0, nn.ModuleList(auxiliary_losses)
        self._no_split_modules = model._no_split_modules  # what Accelerate shards one by one with FSDP2

    def add_gradient(
        self, accelerator: Accelerator, prepared: nn.Module, batch: Batch, accumulation: int, synchronize: bool
    ) -> tuple[torch.Tensor, Metrics]:
        """Add the gradient of a batch's loss to that of the weights.

        Args:
            prepared: this task as Accelerate wraps it.
            batch: this process's, on the CPU.
            accumulation: batches of a step, over which the gradient is a mean.
            synchronize: whether the gradients are averaged over the processes at the end.

        Returns:
            What `forward` returns.
        """
        accelerator.sync_gradients = synchronize  # DeepSpeed takes its step within `backward`, when this is set
        with nullcontext() if synchronize else accelerator.no_sync(prepared):
            loss, metrics = prepared(send_to_device(batch, accelerator.device, non_blocking=True))
            accelerator.backward(loss / accumulation)
        return loss, metrics

    def after_step(self, accelerator: Accelerator) -> None:
        """The optimizer has taken a step."""
        for auxiliary_loss in self.auxiliary_losses:
            auxiliary_loss.after_step(accelerator)

    def exported(self, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The weights of the model to save, of those of the model that trains."""
        return state_dict
