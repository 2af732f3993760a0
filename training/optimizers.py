"""The parameters that train, their optimizer, and the average of the weights."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from clip_moe.training.train_settings import OptimizerSettings

# Besides norms, which families call as they like: as CLIP (section 2.5) and everybody after it
NO_DECAY = re.compile(r"(bias|class_embedding|logit_scale)$")
# The layers of a tower, and what is below them
LAYER = re.compile(r"^(?P<tower>.*)\bencoder\.layers?\.(?P<number>\d+)\.")
BELOW_LAYERS = re.compile(r"\bembeddings\.|\bpre_layrnorm\.|\bpre_layernorm\.")


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


def parameter_groups(
    model: nn.Module, weight_decay: float, decay_all: bool = False, layer_decay: float = 1.0
) -> list[dict]:
    """AdamW's groups of the trainable parameters: those that decay, with `decay_all` all, and those that do not, each
    with the factor `scale` of the learning rate of their layers.

    Biases are told by their names, not by their rank: the stacked ones of experts have two axes.
    """
    groups, scales = defaultdict(list), _layer_scales(model, layer_decay)
    norms = (module for module in model.modules() if isinstance(module, nn.LayerNorm | nn.RMSNorm))
    norm_parameters = {parameter for norm in norms for parameter in norm.parameters(False)}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decays = decay_all or (NO_DECAY.search(name) is None and parameter not in norm_parameters)
            groups[decays, scales[name]].append(parameter)
    return [
        {"params": parameters, "weight_decay": weight_decay * decays, "scale": scale}
        for (decays, scale), parameters in sorted(groups.items(), key=lambda group: group[0], reverse=True)
    ]


def _layer_scales(model: nn.Module, layer_decay: float) -> dict[str, float]:
    """Parameter -> its factor of the learning rate: layer_decay once for each layer of its tower above it. Embeddings
    are below all layers, and all else is above them (BEiT, arXiv:2106.08254, appendix)."""
    depths = Counter()
    for name, _ in model.named_parameters(remove_duplicate=False):  # of both towers, also where they have one encoder
        if place := LAYER.search(name):
            depths[place["tower"]] = max(depths[place["tower"]], int(place["number"]) + 1)

    def layers_above(name: str) -> int:
        if place := LAYER.search(name):
            return depths[place["tower"]] - int(place["number"])
        if BELOW_LAYERS.search(name):
            return next((depth + 1 for tower, depth in depths.items() if name.startswith(tower)), 0)
        return 0

    return {name: layer_decay ** layers_above(name) for name, _ in model.named_parameters()}


def make_optimizer(task: nn.Module, settings: OptimizerSettings, device: torch.device) -> torch.optim.Optimizer:
    """The optimizer of the trainable parameters of a task."""
    groups = parameter_groups(task, settings.weight_decay, settings.decay_all, settings.layer_decay)
    for group in groups:
        group["lr"] = settings.learning_rate * group.pop("scale")
    rate, betas, epsilon = settings.learning_rate, (settings.adam_beta1, settings.adam_beta2), settings.adam_epsilon
    if settings.optimizer == "adamw_8bit":
        try:
            from torchao.optim import AdamW8bit
        except ImportError as error:
            raise ValueError("optimizer adamw_8bit is torchao's: pip install torchao, or take adamw") from error

        return AdamW8bit(groups, lr=rate, betas=betas, eps=epsilon)
    # Where AdamW is one kernel. On a CPU its updates round otherwise than the plain ones.
    return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=epsilon, fused=device.type in ("cuda", "xpu"))


def make_states(optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer the state that its first step makes, by a step that changes no weight."""
    learning_rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0 * group["lr"]  # torchao has tensors
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, learning_rate in zip(optimizer.param_groups, learning_rates, strict=True):
        group["lr"] = learning_rate


class WeightAverage:
    """The exponential moving average of the parameters that train: after each step, decay * average + (1 - decay) *
    parameter. It begins with the parameters as they are.

    Args:
        parameters: by name, as the optimizer has them; those that FSDP2 splits stay split.
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
