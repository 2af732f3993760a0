"""Ways to start experts other than as equal copies of the dense FFN, so that they differ before training."""

import torch
from torch import Tensor, nn

from conversion.presets import ExpertInit
from modeling_clip_moe.experts import CLIPMoEExperts

# Stacked tensor -> the axis of its hidden units; `down_proj_bias` has none
UNIT_AXIS = {"up_proj": 1, "up_proj_bias": 1, "down_proj": 2}


@torch.no_grad()
def init_experts(model: nn.Module, init: ExpertInit, seed: int) -> None:
    """Replace the copied experts of an upcycled model in place."""
    generator = torch.Generator().manual_seed(seed)
    modules = [module for module in model.modules() if isinstance(module, CLIPMoEExperts)]
    # A shared encoder has each twice
    modules = list({id(experts.up_proj): experts for experts in modules}.values())
    for experts in modules if init.kind != "copies" else ():
        tensors = {name: getattr(experts, name) for name in (*UNIT_AXIS, "down_proj_bias")}
        if init.kind == "noise":
            for tensor in tensors.values():
                tensor.add_(tensor.std() * init.noise * torch.randn(tensor.shape, generator=generator).to(tensor))
        elif init.kind == "random":
            for tensor in tensors.values():
                tensor.copy_(_drawn_like(tensor, generator))
        else:
            for expert in range(experts.num_experts):
                chosen = _units(experts.up_proj.shape[1], init.ratio, generator)
                for name, axis in UNIT_AXIS.items():
                    if init.units == "tensor" and name != "up_proj_bias":  # a bias goes with its matrix
                        chosen = _units(experts.up_proj.shape[1], init.ratio, generator)
                    place = (expert, chosen) if axis == 1 else (expert, slice(None), chosen)
                    tensors[name][place] = _drawn_like(tensors[name][place], generator)


def _units(number: int, ratio: float, generator: torch.Generator) -> Tensor:
    """Random hidden units, a share `ratio` of all. The paper permutes units first; that changes no output."""
    return torch.randperm(number, generator=generator)[: round(ratio * number)]


def _drawn_like(values: Tensor, generator: torch.Generator) -> Tensor:
    """From a normal distribution with the mean and the standard deviation of the values."""
    drawn = torch.randn(values.shape, generator=generator).to(values)
    return values.mean() + drawn * values.std(correction=0)
