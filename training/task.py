"""A model and its loss in one module: all that the loop knows of what it trains."""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn
from transformers import PreTrainedModel

from clip_moe.training.auxiliary_losses import AuxiliaryLoss

Batch = dict[str, torch.Tensor]
Metrics = dict[str, torch.Tensor]


class Task(nn.Module):
    """A model with its loss. A subclass has `forward(batch)`: this process's part of the loss, and scalars to log.

    Attributes:
        model: what is saved in the end.
        progress: the share of the steps that are done.
        auxiliary_losses: parts of the loss that see the model.
    """

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
