"""How far upcycled models of quarters of an FFN are from their dense model, and what they cost.

python -m lab.starts --output lab/results/starts.md
"""

import dataclasses
from collections.abc import Iterator

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from clip_moe.conversion.presets import PRESETS, Preset
from clip_moe.conversion.upcycle import inexact_starts, sparse_ffns, upcycle
from clip_moe.conversion.verification import sample_inputs
from clip_moe.engine.command_line import command
from clip_moe.evaluation.costs import count_multiply_adds, count_parameters, meta_model, paper_config
from lab.speed.page import Output, page, table
from modeling_clip_moe.families import model_class

# Routed experts, shared ones, and routed ones of a token
SHAPES = ((31, 1, 3), (30, 1, 3), (24, 1, 3), (32, 0, 4), (64, 0, 4))
# CLIP's FFN, and a SwiGLU
SIZES = ("ViT-B/32", "ViE-B/16")
NUM_IMAGES = 8


def quarters(num_experts: int, shared: int, top_k: int) -> Preset:
    """MoE-ViE's architecture with other numbers: the image tower, all layers but the first."""
    return dataclasses.replace(
        PRESETS["moe_vie"], num_experts=num_experts, num_shared_experts=shared, num_experts_per_tok=top_k
    )


def dense_config(size: str) -> PreTrainedConfig:
    """That of a paper's size, with one text layer: the text tower stays as it is."""
    config = paper_config(size)
    config.text_config.num_hidden_layers = 1
    return config


@torch.no_grad()
def distance(dense: PreTrainedModel, sparse: PreTrainedModel) -> float:
    """The largest distance of an image's embedding from the dense model's, which has length 1."""
    images = sample_inputs(dense.config, NUM_IMAGES)
    return float((sparse(**images).image_embeds - dense(**images).image_embeds).norm(dim=-1).max())


def rows(size: str, seed: int) -> Iterator[list[str]]:
    """A row of the table for the dense model and for each shape."""
    torch.manual_seed(seed)
    config = dense_config(size)
    dense = model_class(config)(config).eval()
    for numbers in (None, *SHAPES):
        sparse = dense if numbers is None else upcycle(dense, quarters(*numbers), seed=seed)
        parameters = count_parameters(meta_model(sparse.config))
        costs = [f"{parameters[name] / 1e6:.1f}" for name in ("vision", "vision_activated")]
        costs.append(f"{count_multiply_adds(meta_model(sparse.config))['image'] / 1e9:.2f}")
        if numbers is None:
            yield [size, "dense", "", *costs, "", ""]
            continue
        num_experts, shared, top_k = numbers
        routed, active = (f"{number} + {shared}" if shared else f"{number}" for number in (num_experts, top_k))
        reasons = {reason for tower in sparse_ffns(sparse.config).values() for reason in inexact_starts(tower)}
        yield [size, routed, active, *costs, f"{distance(dense, sparse):.1e}", "; ".join(reasons)]


@command
def starts(*, output: Output = None, seed: int = 0) -> str:
    """Random models of two sizes, upcycled to quarters of their FFNs: step 0, parameters and multiply-adds.

    Args:
        seed: draws the weights and the routers
    """
    titles = ["model", "experts", "active per token", "parameters, M", "activated, M", "multiply-adds, G"]
    return page(
        output,
        "# Starts of quarters",
        "Image towers of random weights whose FFNs became quarters in all layers but the first, with sigmoid scores "
        "normalized to sum to 1. *Distance* is the largest between the embeddings of the sparse and the dense model, "
        f"of length 1, over {NUM_IMAGES} random images. Parameters and multiply-adds are those of the image tower.",
        table([*titles, "distance", "why"], [row for size in SIZES for row in rows(size, seed)]),
    )


if __name__ == "__main__":
    starts.main()
