"""The average of the weights over the steps of a training."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class WeightAverage:
    """The exponential moving average of the parameters that train: after each step, decay * average + (1 - decay) *
    parameter. It begins with the parameters as they are.

    Args:
        parameters: by name, as the optimizer has them; those that FSDP2 splits stay split.
        decay: between 0 and 1.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float):
        self.parameters = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self.averages = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        self._average = get_ema_multi_avg_fn(decay)

    def update(self) -> None:
        """A step was taken."""
        parameters = [parameter.detach() for parameter in self.parameters.values()]
        self._average(list(self.averages.values()), parameters, None)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block, the parameters have the values of their averages."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self.parameters.items():
            value = parameter.detach().clone()
            parameter.copy_(self.averages[name])
            self.averages[name].copy_(value)
