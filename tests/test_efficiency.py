"""The papers' parameter counts and multiply-adds, on the meta device.

The papers' own numbers stand beside ours where they differ in the last digit; CLIP-FMoE's 128.22 G does not follow from
its description: base FFN, two experts and the gate are 114.1 G, and 128.2 G is one more expert.
"""

import dataclasses

import pytest
import torch
from transformers import CLIPConfig, CLIPModel

from conversion.presets import PRESETS, sparse_layers
from conversion.upcycle import sparse_config
from evaluation.efficiency import count_multiply_adds, count_parameters, meta_model

# OpenAI's: vision width, layers, heads, patch; text width, layers, heads; projection.
SIZES = {
    "B/32": (768, 12, 12, 32, 512, 12, 8, 512),
    "B/16": (768, 12, 12, 16, 512, 12, 8, 512),
    "L/14": (1024, 24, 16, 14, 768, 12, 12, 768),
}
BASELINE = dataclasses.replace(PRESETS["clip_fmoe"], num_experts=5, num_experts_per_tok=3, fusion_gate=False)
SYSTEMS = {"dense": None, "5 experts top-3": BASELINE, **PRESETS}


def dense_config(size):
    vision, vision_layers, vision_heads, patch, text, text_layers, text_heads, projection = SIZES[size]

    def tower(width, layers, heads):
        return {
            "hidden_size": width,
            "intermediate_size": 4 * width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "projection_dim": projection,
        }

    return CLIPConfig(
        text_config=tower(text, text_layers, text_heads),
        vision_config=tower(vision, vision_layers, vision_heads) | {"patch_size": patch, "image_size": 224},
        projection_dim=projection,
    )


def build(size, system):
    preset, config = SYSTEMS[system], dense_config(size)
    return meta_model(config if preset is None else sparse_config(config, preset))


def arithmetic(size, system):
    """(parameters, multiply-adds of matrix products, of attention scores) by hand."""
    vision, vision_layers, _, patch, text, text_layers, _, projection = SIZES[size]
    preset = SYSTEMS[system]
    parameters, products, scores = 1, 0, 0  # the temperature
    patches = (224 // patch) ** 2
    for width, layers, tokens in ((vision, vision_layers, patches + 1), (text, text_layers, 77)):
        ffn = 8 * width**2 + 5 * width
        sparse = 0 if preset is None else len(sparse_layers(preset.sparse_layers, "text", layers))
        parameters += layers * (4 * width**2 + 4 * width + 4 * width) + (layers - sparse) * ffn
        products += tokens * (layers * 4 * width**2 + (layers - sparse) * 8 * width**2)
        scores += layers * 2 * tokens**2 * width
        if sparse:
            gate = width**2 if preset.fusion_gate else 0
            base = ffn if preset.fusion_gate else 0
            parameters += sparse * (preset.num_experts * (ffn + width) + base + gate)
            active = (preset.num_experts_per_tok + preset.fusion_gate) * 8 * width**2 + preset.num_experts * width
            products += tokens * sparse * (active + (width**2 if preset.fusion_gate else 0))
        parameters += tokens * width + width * projection + 2 * width  # positions, projection, last norm
        products += width * projection
    parameters += 49408 * text + vision * (3 * patch**2) + vision + 2 * vision  # embeddings, first norm
    products += patches * 3 * patch**2 * vision + projection  # patches, and the similarity
    return parameters, products, scores


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("size", SIZES)
def test_counts_are_the_arithmetic(size, system):
    model = build(size, system)
    costs = count_multiply_adds(model)
    parameters, products, scores = arithmetic(size, system)
    assert count_parameters(model)["total"] == parameters
    assert costs == {"matrix_products": products, "attention_scores": scores}


@pytest.mark.parametrize(
    ("system", "total", "multiply_adds"),
    [
        ("dense", 427.62, 84.31),  # paper: 84.38
        ("5 experts top-3", 685.78, 112.37),  # paper: 112.44
        ("clip_fmoe", 693.83, 114.1),  # paper: 693.83 and 128.22, see above
        ("clip_moe", 1202.1, None),
    ],
)
def test_papers_l14(system, total, multiply_adds):
    model = build("L/14", system)
    assert count_parameters(model)["total"] / 1e6 == pytest.approx(total, abs=0.05 if total > 1000 else 0.005)
    if multiply_adds is not None:
        assert count_multiply_adds(model)["matrix_products"] / 1e9 == pytest.approx(multiply_adds, abs=0.06)


@pytest.mark.parametrize(("size", "gflops"), [("B/32", 19.55), ("B/16", 54.20), ("L/14", 231.5)])
def test_clip_up_gflops(size, gflops):
    """CLIP-UP, Table 2: 19.6, 54.3 and 231.7."""
    costs = count_multiply_adds(build(size, "clip_up"))
    assert 2 * sum(costs.values()) / 1e9 == pytest.approx(gflops, abs=0.06)


def test_activated_parameters():
    """CLIP-MoE: 0.69 B."""
    assert count_parameters(build("L/14", "clip_moe"))["activated"] / 1e6 == pytest.approx(685.87, abs=0.005)
    dense = count_parameters(build("L/14", "dense"))
    assert dense["activated"] == dense["total"]


def test_trainable_parameters():
    """CLIP-FMoE, Table 5: 72.59 M an expert in stage 1, 8.09 M in stage 2; 322.69 M in the 5-expert baseline."""
    model = build("L/14", "clip_fmoe")
    stage_2 = count_parameters(model, r"\.(router|fusion_gate)\.")["trainable"]
    gates = count_parameters(model, r"\.fusion_gate\.")["trainable"]
    experts = count_parameters(model, r"\.experts\.")["trainable"]
    assert stage_2 / 1e6 == pytest.approx(8.095, abs=5e-4)
    assert (experts / 4 + gates) / 1e6 == pytest.approx(72.591, abs=5e-4)
    fused = dataclasses.replace(PRESETS["clip_fmoe"], num_experts=1, num_experts_per_tok=1)
    with torch.device("meta"):
        dense = CLIPModel(dense_config("L/14"))
    stage_1 = count_parameters(meta_model(sparse_config(dense.config, fused)), r"\.(experts|fusion_gate)\.")[
        "trainable"
    ]
    assert stage_1 == experts / 4 + gates
    baseline = count_parameters(build("L/14", "5 experts top-3"), r"\.(router|experts)\.")["trainable"]
    assert baseline / 1e6 == pytest.approx(322.69, abs=0.01)
