"""The parameters that train, and their optimizer."""

import re
from collections import defaultdict

import torch
from torch import nn

from clip_moe.training.train_settings import OptimizerSettings

# Besides norms, which families call as they like: as CLIP (section 2.5) and everybody after it
NO_DECAY = re.compile(r"(bias|class_embedding|logit_scale)$")


def set_trainable(model: nn.Module, pattern: str) -> tuple[list[str], list[str]]:
    """Train the parameters in whose name, or one of whose names, the regular expression is found; freeze the others.

    Returns:
        The names of the trainable and of the frozen parameters.
    """
    matching = matching_parameters(model, pattern, "trainable")
    trainable, frozen = [], []
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter in matching)
        (trainable if parameter in matching else frozen).append(name)
    return trainable, frozen


def matching_parameters(model: nn.Module, pattern: str, setting: str) -> set[nn.Parameter]:
    """The parameters in whose name, or one of whose names, the regular expression of a setting is found."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{setting} pattern {pattern!r} is not a regular expression: {error}") from error
    named = list(model.named_parameters(remove_duplicate=False))  # an encoder of both towers has two names
    matching = {parameter for name, parameter in named if compiled.search(name)}
    if not matching:
        examples = ", ".join(name for name, _ in named[:3])
        raise ValueError(f"{setting} pattern {pattern!r} is found in no parameter's name; names are {examples}, ...")
    return matching


def parameter_groups(model: nn.Module, weight_decay: float, decay_all: bool = False) -> list[dict]:
    """AdamW's groups of the trainable parameters: those that decay, with `decay_all` all, and those that do not.

    Biases are told by their names, not by their rank: the stacked ones of experts have two axes.
    """
    groups = defaultdict(list)
    norms = (module for module in model.modules() if isinstance(module, nn.LayerNorm | nn.RMSNorm))
    norm_parameters = {parameter for norm in norms for parameter in norm.parameters(False)}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decays = decay_all or (NO_DECAY.search(name) is None and parameter not in norm_parameters)
            groups[decays].append(parameter)
    return [
        {"params": groups[decays], "weight_decay": weight_decay * decays} for decays in sorted(groups, reverse=True)
    ]


def make_optimizer(task: nn.Module, settings: OptimizerSettings, device: torch.device) -> torch.optim.Optimizer:
    """The optimizer of the trainable parameters of a task."""
    groups = parameter_groups(task, settings.weight_decay, settings.decay_all)
    # Where AdamW is one kernel. On a CPU its updates round otherwise than the plain ones.
    is_fused = device.type in ("cuda", "xpu")
    betas = settings.adam_beta1, settings.adam_beta2
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=betas, eps=settings.adam_epsilon, fused=is_fused)


def make_states(optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer the state that its first step makes, by a step that changes no weight."""
    learning_rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, learning_rate in zip(optimizer.param_groups, learning_rates, strict=True):
        group["lr"] = learning_rate
