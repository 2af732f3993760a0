"""One CLIP whose parameters are the weighted means of those of several."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from clip_moe.conversion.checkpoints import load_clip, load_model
from clip_moe.conversion.upcycle import architecture, sparse_blocks
from modeling_clip_moe.families import TOWER_CONFIGS

logger = logging.getLogger(__name__)

# Share of the norms below which a gain in similarity is rounding
ROUNDING = 1e-12


def shape(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """The part of a configuration that must be equal for parameters to be averaged."""
    parts = (config, config.text_config, config.vision_config)
    return [{k: v for k, v in architecture(part, type(part)).items() if k not in TOWER_CONFIGS} for part in parts]


@torch.no_grad()
def average(sources: Sequence[str | Path], weights: Sequence[float] | None = None) -> PreTrainedModel:
    """The mean of the parameters of models, and of their experts' biases, computed in float64. Experts are averaged
    with those of the first model that they are most like. Two models are in memory at a time.

    Args:
        weights: one for each model, which sum to 1; some below 0 and above 1 lead beyond the models. None: all alike.
    """
    first, *later = weights or [1.0] * len(sources)
    mean = load_clip(sources[0])
    sums = {name: first * tensor.double() for name, tensor in mean.state_dict().items()}
    dtype = mean.dtype
    for source, weight in zip(sources[1:], later, strict=True):
        model = load_model(type(mean), source)
        if shape(model.config) != shape(mean.config):
            raise ValueError(f"{source} has another configuration than {sources[0]}: they have no mean")
        if changed := match_experts(model, mean):
            logger.warning("the experts of %s are averaged in another order in %s", source, ", ".join(changed))
        dtype = torch.promote_types(dtype, model.dtype)
        for name, tensor in model.state_dict().items():
            sums[name] += weight * tensor.double()
    mean.to(dtype)  # bfloat16 would round half of a small step away
    for name, tensor in mean.state_dict().items():
        tensor.copy_(sums[name] / (1 if weights else len(sources)))
    return mean


@torch.no_grad()
def match_experts(model: PreTrainedModel, reference: PreTrainedModel) -> list[str]:
    """Renumbers the experts of each layer of a model, which changes nothing that it computes, where another order is
    closer to that of `reference` in squared distance of router rows and experts (Git Re-Basin, arXiv:2209.04836).

    Returns:
        The layers whose order changed.
    """
    changed = []
    targets = sparse_blocks(reference)
    for layer, block in sparse_blocks(model).items():
        similarity, scale = torch.zeros(block.num_experts, block.num_experts, dtype=torch.float64), 0.0
        for tensor, target in zip(_expert_tensors(block), _expert_tensors(targets[layer]), strict=True):
            rows, target_rows = (part.double().reshape(len(part), -1) for part in (tensor, target))
            similarity += target_rows @ rows.T
            scale += (rows.norm() * target_rows.norm()).item()
        order = torch.from_numpy(linear_sum_assignment(similarity.numpy(), maximize=True)[1])
        if similarity.gather(1, order[:, None]).sum() - similarity.trace() > ROUNDING * scale:
            changed.append(layer)
            for tensor in _expert_tensors(block):
                tensor.copy_(tensor[order])
    return changed


def _expert_tensors(block: nn.Module) -> list[torch.Tensor]:
    """The tensors of a sparse block whose first axis is that of its experts."""
    tensors = list(block.router.state_dict().values()) + list(block.experts.state_dict().values())
    return [tensor for tensor in tensors if tensor.shape[:1] == (block.num_experts,)]
