"""One CLIP whose parameters are the weighted means of those of several."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from clip_moe.conversion.checkpoints import load_clip, load_model
from clip_moe.conversion.upcycle import architecture
from modeling_clip_moe.families import TOWER_CONFIGS


def shape(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """The part of a configuration that must be equal for parameters to be averaged."""
    parts = (config, config.text_config, config.vision_config)
    return [{k: v for k, v in architecture(part, type(part)).items() if k not in TOWER_CONFIGS} for part in parts]


@torch.no_grad()
def average(sources: Sequence[str | Path], weights: Sequence[float] | None = None) -> PreTrainedModel:
    """The mean of the parameters of models, and of their experts' biases, computed in float64. Two models are in memory
    at a time.

    Args:
        weights: one for each model, which sum to 1; some below 0 and above 1 lead beyond the models. None: all alike.
    """
    if weights is not None and not (len(weights) == len(sources) and abs(sum(weights) - 1) < 1e-6):
        raise ValueError(f"the weights {list(weights)} of {len(sources)} models must be as many, and sum to 1")
    first, *later = weights or [1.0] * len(sources)
    mean = load_clip(sources[0])
    sums = {name: first * tensor.double() for name, tensor in mean.state_dict().items()}
    dtype = mean.dtype
    for source, weight in zip(sources[1:], later, strict=True):
        model = load_model(type(mean), source)
        if shape(model.config) != shape(mean.config):
            raise ValueError(f"{source} has another configuration than {sources[0]}: they have no mean")
        dtype = torch.promote_types(dtype, model.dtype)
        for name, tensor in model.state_dict().items():
            sums[name] += weight * tensor.double()
    mean.to(dtype)  # bfloat16 would round half of a small step away
    for name, tensor in mean.state_dict().items():
        tensor.copy_(sums[name] / (1 if weights else len(sources)))
    return mean
