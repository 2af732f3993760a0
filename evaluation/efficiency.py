"""What a model costs: parameters and multiply-adds, counted on the meta device, where nothing is computed."""

import re

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPConfig, CLIPModel, PreTrainedModel

from modeling_clip_moe import CLIPMoEConfig, CLIPMoEModel


def meta_model(config: CLIPConfig | CLIPMoEConfig) -> PreTrainedModel:
    """A dense or sparse CLIP without storage, whose every matrix product can be counted."""
    with torch.device("meta"):
        if isinstance(config, CLIPConfig):
            return CLIPModel._from_config(config, attn_implementation="eager").eval()
        # One product for each token and chosen expert, so that counts do not depend on the data
        return CLIPMoEModel._from_config(
            config, attn_implementation="eager", experts_implementation="batched_mm"
        ).eval()


def count_parameters(model: PreTrainedModel, trainable: str | None = None) -> dict[str, int]:
    """Numbers of parameters.

    Args:
        trainable: a regular expression, see `training.freezing.set_trainable`.

    Returns:
        `total`; `activated`, those that one token meets: K of the E experts of each sparse layer; and with `trainable`
        the number of those whose names it is found in, under that name.
    """
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    counts = {"total": sum(sizes.values())}
    idle = 0
    for tower in (model.config.text_config, model.config.vision_config):
        prefix = "text_model." if tower is model.config.text_config else "vision_model."
        experts = sum(size for name, size in sizes.items() if name.startswith(prefix) and ".experts." in name)
        if experts:
            idle += experts * (tower.num_experts - tower.num_experts_per_tok) // tower.num_experts
    counts["activated"] = counts["total"] - idle
    if trainable is not None:
        counts["trainable"] = sum(size for name, size in sizes.items() if re.search(trainable, name))
    return counts


def count_multiply_adds(model: nn.Module) -> dict[str, int]:
    """Multiply-adds of the forward pass of one image and one text of full length.

    Args:
        model: of `meta_model`.

    Returns:
        `matrix_products`: of all layers but the attention scores; `attention_scores`: queries with keys, and the result
        with values. A FLOP count is twice their sum.
    """
    text, vision = model.config.text_config, model.config.vision_config
    inputs = {
        "input_ids": torch.zeros(1, text.max_position_embeddings, dtype=torch.long, device="meta"),
        "pixel_values": torch.zeros(1, vision.num_channels, vision.image_size, vision.image_size, device="meta"),
    }
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(**inputs)
    counts = counter.get_flop_counts()
    scores = sum(
        flops
        for module, operations in counts.items()
        if module.endswith(".self_attn")
        for operation, flops in operations.items()
        if operation == torch.ops.aten.bmm
    )
    return {"matrix_products": (sum(counts["Global"].values()) - scores) // 2, "attention_scores": scores // 2}
