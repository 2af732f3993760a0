"""Other beginnings of experts than equal copies of the dense FFN, so that they differ before training."""

import torch
from torch import Tensor, nn

from conversion.presets import ExpertInit
from modeling_clip_moe.experts import CLIPMoEExperts

# Of the stacked tensors, the axis of the hidden units; the bias of `down_proj` has none
UNITS = {"up_proj": 1, "up_proj_bias": 1, "down_proj": 2}


@torch.no_grad()
def init_experts(model: nn.Module, how: ExpertInit, seed: int) -> None:
    """Let the experts of an upcycled model, which are copies, begin otherwise, in place."""
    generator = torch.Generator().manual_seed(seed)
    for experts in model.modules():
        if not isinstance(experts, CLIPMoEExperts) or how.kind == "copies":
            continue
        tensors = {name: getattr(experts, name) for name in (*UNITS, "down_proj_bias")}
        if how.kind == "noise":
            for tensor in tensors.values():
                tensor.add_(tensor.std() * how.noise * torch.randn(tensor.shape, generator=generator).to(tensor))
        elif how.kind == "random":
            for tensor in tensors.values():
                tensor.copy_(_drawn_like(tensor, generator))
        else:
            for expert in range(experts.num_experts):
                chosen = _units(experts.up_proj.shape[1], how.ratio, generator)
                for name, axis in UNITS.items():
                    if how.units == "tensor" and name != "up_proj_bias":  # a bias goes with its matrix
                        chosen = _units(experts.up_proj.shape[1], how.ratio, generator)
                    place = (expert, chosen) if axis == 1 else (expert, slice(None), chosen)
                    tensors[name][place] = _drawn_like(tensors[name][place], generator)


def _units(number: int, ratio: float, generator: torch.Generator) -> Tensor:
    """Which hidden units are drawn anew: `ratio` of all. The permutation of units before that, which the paper has,
    changes nothing that an expert computes."""
    return torch.randperm(number, generator=generator)[: round(ratio * number)]


def _drawn_like(values: Tensor, generator: torch.Generator) -> Tensor:
    """From a normal distribution with the mean and the standard deviation of the values."""
    drawn = torch.randn(values.shape, generator=generator).to(values)
    return values.mean() + drawn * values.std(correction=0)
