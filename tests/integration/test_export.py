"""Export: programs of torch and ONNX that compute what the model does, for any batch, and compiled training."""

import copy
from dataclasses import replace

import pytest
import torch
import transformers
from backbones import both_backbones, dense_clip
from plain_moe_vie import TINY, random_weights
from tiny_clip import moved
from torch.utils._pytree import tree_leaves
from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

from clip_moe.conversion.presets import PRESETS
from clip_moe.conversion.released_moe_vie import Released, build
from clip_moe.conversion.upcycle import upcycle
from clip_moe.data.symbols import SYMBOLS
from modeling_clip_moe import (
    CLIPMoEModel,
    CLIPMoETextModelWithProjection,
    CLIPMoEVisionModelWithProjection,
    load_balancing_loss,
)

TOWERS = {"text": CLIPMoETextModelWithProjection, "vision": CLIPMoEVisionModelWithProjection}
BATCH = torch.export.Dim("batch", min=1, max=64)


@pytest.fixture(scope="module")
def fused(backbone) -> CLIPMoEModel:
    """A model with fusion gates, whose experts differ."""
    return moved(upcycle(dense_clip(backbone), PRESETS["clip_fmoe"], seed=0).eval(), ("experts", "gate"), 0, scale=0.1)


@pytest.fixture(scope="module")
def batch(processor):
    """Makes the inputs of a part of the model, with captions of different lengths."""

    def make(size, part="whole"):
        rows = SYMBOLS.load("test", "web", size, seed=size)
        arguments = {
            "text": {"text": list(rows["caption"])},
            "vision": {"images": list(rows["image"])},
            "whole": {"text": list(rows["caption"]), "images": list(rows["image"])},
        }[part]
        padding = {} if part == "vision" else {"padding": "max_length", "max_length": 24, "truncation": True}
        return dict(processor(**arguments, **padding, return_tensors="pt"))

    return make


def any_batch(inputs):
    return {name: {0: BATCH} for name in inputs}


def assert_same(program, model, inputs, tolerance):
    with torch.no_grad():
        found, expected = tree_leaves(program(**inputs)), tree_leaves(model(**inputs))
    assert len(expected) >= 2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@both_backbones
def test_a_saved_program_takes_any_batch(fused, batch, tmp_path):
    example = batch(3)
    with torch.no_grad():
        program = torch.export.export(fused, (), example, dynamic_shapes=any_batch(example))
        torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for size in (1, 7):
        assert_same(loaded, fused, batch(size), 1e-5)


@pytest.mark.parametrize("part", ["text", "vision"])
def test_onnx_of_a_tower(repository, batch, tmp_path, part):
    check_onnx(TOWERS[part].from_pretrained(repository).eval(), batch, part, tmp_path)


@both_backbones
def test_onnx_of_the_whole_model(fused, batch, tmp_path):
    check_onnx(fused, batch, "whole", tmp_path)


def test_onnx_of_other_routers_and_experts(backbone, batch, tmp_path):
    """Narrow experts, shared ones, and biases."""
    changes = {"moe_intermediate_size": 128, "num_shared_experts": 1, "norm_topk_prob": True, "capacity_factor": None}
    routing = dict.fromkeys(("text_config", "vision_config"), {"scoring_func": "sigmoid", "use_expert_bias": True})
    sparse = upcycle(dense_clip(backbone), replace(PRESETS["clip_up"], **changes), routing=routing)
    check_onnx(moved(sparse, ("experts", "router"), 0, scale=0.1), batch, "whole", tmp_path)


def test_onnx_of_a_moe_vies_tower(tmp_path):
    """Gated experts, rotary positions, attention pooling."""
    settings = Released(TINY.text_heads, TINY.pooling_heads, TINY.top_k, TINY.image)
    tower = build(random_weights(TINY, dtype=torch.float32), settings).vision_model
    check_onnx(tower, lambda size, part: {"pixel_values": torch.randn(size, 3, 8, 8)}, "vision", tmp_path)


def check_onnx(model, batch, part, folder):
    example = batch(3, part)
    exported = OnnxExporter().export(model, example, OnnxConfig(dynamic_shapes=any_batch(example)))
    # transformers 5.17 returns torch's program
    exported.save_pretrained(folder) if hasattr(exported, "save_pretrained") else exported.save(folder / "model.onnx")
    assert (folder / "model.onnx").exists()
    for size in (1, 7):
        assert_same(exported, model, batch(size, part), 1e-4)


def test_compiled_training_has_the_same_gradients(fused, batch):
    if [int(part) for part in transformers.__version__.split(".")[:2]] < [5, 23]:
        pytest.skip("the backward of grouped_mm in transformers 5.17 has data-dependent sizes: see docs/limits.md")
    tower, pixels, results = copy.deepcopy(fused.vision_model), batch(4, "vision")["pixel_values"], []
    torch.compiler.reset()
    for candidate in (tower, torch.compile(tower, fullgraph=True)):
        tower.zero_grad()
        output = candidate(pixels, output_router_logits=True)
        loss = output.pooler_output.square().mean() + load_balancing_loss(output.router_logits, 1)
        loss.backward()
        results.append((loss, {name: p.grad.clone() for name, p in tower.named_parameters()}))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    assert tower.get_parameter("encoder.layers.1.mlp.router.weight").grad.abs().max() > 0
