"""The optimizers that a stage may take."""

import importlib.util
from typing import Literal, Protocol

import torch
from torch import nn

from training.freezing import parameter_groups

OptimizerName = Literal["adamw", "adamw_8bit"]
INSTALL_TORCHAO = "adamw_8bit is torchao's: pip install torchao, or take adamw"
# Where AdamW is one kernel. On a CPU its updates round otherwise than the plain ones.
FUSED = ("cuda", "xpu")


class OptimizerSettings(Protocol):
    """What an optimizer is made of: see `training.stages.steps.StepsStage`."""

    name: str
    optimizer: OptimizerName
    learning_rate: float
    weight_decay: float
    decay_all: bool
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float


def make_optimizer(task: nn.Module, settings: OptimizerSettings, device: torch.device) -> torch.optim.Optimizer:
    """The optimizer of what trains in a task."""
    groups = parameter_groups(task, settings.weight_decay, settings.decay_all)
    options = {
        "lr": settings.learning_rate,
        "betas": (settings.adam_beta1, settings.adam_beta2),
        "eps": settings.adam_epsilon,
    }
    if settings.optimizer == "adamw_8bit":
        from torchao.optim import AdamW8bit  # which the stage has asked for before it began

        return AdamW8bit(groups, **options)
    return torch.optim.AdamW(groups, **options, fused=device.type in FUSED)


def has_torchao() -> bool:
    return importlib.util.find_spec("torchao") is not None


def make_states(optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer the state of its first step, all zeros, without a step: the weights stay as they are."""
    if isinstance(optimizer, torch.optim.AdamW):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                # A fused step counts on the device, others on the CPU
                steps = torch.zeros((), device=parameter.device if group["fused"] else "cpu")
                moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
                optimizer.state[parameter] = {"step": steps, **moments}
        return
    learning_rates = [group["lr"].clone() for group in optimizer.param_groups]  # torchao has tensors
    for group in optimizer.param_groups:
        group["lr"].zero_()
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, learning_rate in zip(optimizer.param_groups, learning_rates, strict=True):
        group["lr"].copy_(learning_rate)
