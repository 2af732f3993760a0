"""Export: programs of torch and ONNX that compute what the model does, for any batch, and compiled training."""

import onnxruntime
import pytest
import torch
import transformers
from backbones import both_backbones, dense_clip
from tiny_clip import moved
from torch.utils._pytree import tree_leaves
from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

from conversion.presets import PRESETS
from conversion.upcycle import upcycle
from data import symbols
from modeling_clip_moe import CLIPMoEModel, CLIPMoETextModelWithProjection, CLIPMoEVisionModelWithProjection

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
        rows = symbols.load("test", "web", size, seed=size)
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


def assert_same(actual, expected, tolerance):
    compared = 0
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(torch.as_tensor(actual[name]), value, rtol=tolerance, atol=tolerance)
            compared += 1
    assert compared >= 2


@both_backbones
@pytest.mark.parametrize("name", ["by_device", "eager"])
def test_a_saved_program_takes_any_batch(fused, batch, tmp_path, name):
    fused.set_experts_implementation(name)
    example = batch(3)
    with torch.no_grad():
        program = torch.export.export(fused, (), example, dynamic_shapes=any_batch(example))
        torch.export.save(program, tmp_path / "model.pt2")
        loaded = torch.export.load(tmp_path / "model.pt2").module()
        for size in (1, 7):
            assert_same(loaded(**batch(size)), fused(**batch(size)), 1e-5)


@both_backbones
@pytest.mark.parametrize("part", ["text", "vision"])
def test_onnx_of_a_tower(repository, batch, tmp_path, part):
    check_onnx(TOWERS[part].from_pretrained(repository).eval(), batch, part, tmp_path)


@both_backbones
@pytest.mark.parametrize("name", ["by_device", "grouped_mm", "batched_mm"])
def test_onnx_of_the_whole_model(fused, batch, tmp_path, name):
    fused.set_experts_implementation(name)
    check_onnx(fused, batch, "whole", tmp_path)


@pytest.mark.parametrize("capacity_factor", [None, 1.25])
def test_onnx_by_the_older_exporter(repository, batch, tmp_path, capacity_factor):
    tower = CLIPMoEVisionModelWithProjection.from_pretrained(repository).eval()
    tower.config.eval_capacity_factor = capacity_factor
    (pixels,) = batch(3, "vision").values()
    names = {"input_names": ["pixels"], "dynamic_axes": {"pixels": {0: "batch"}}}
    torch.onnx.export(tower, (pixels,), tmp_path / "model.onnx", dynamo=False, **names)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    for size in (3, 7):
        (pixels,) = batch(size, "vision").values()
        with torch.no_grad():
            expected = tower(pixels).image_embeds
        found = torch.from_numpy(session.run(None, {"pixels": pixels.numpy()})[0])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def check_onnx(model, batch, part, folder):
    example = batch(3, part)
    exported = OnnxExporter().export(model, example, OnnxConfig(dynamic_shapes=any_batch(example)))
    # transformers 5.17 returns torch's program
    exported.save_pretrained(folder) if hasattr(exported, "save_pretrained") else exported.save(folder / "model.onnx")
    assert (folder / "model.onnx").exists()
    for size in (1, 7):
        inputs = batch(size, part)
        with torch.no_grad():
            found, expected = tree_leaves(exported(**inputs)), tree_leaves(model(**inputs))
        assert len(found) == len(expected) >= 2
        for actual, value in zip(found, expected, strict=True):
            torch.testing.assert_close(actual, value, rtol=1e-4, atol=1e-4)


@both_backbones
@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_compiled_training_has_the_same_gradients(fused, batch, backend):
    if [int(part) for part in transformers.__version__.split(".")[:2]] < [5, 23]:
        pytest.skip("the backward of grouped_mm in transformers 5.17 has data-dependent sizes: see docs/limits.md")
    fused.set_experts_implementation("by_device")
    torch.compiler.reset()
    compiled = torch.compile(fused, fullgraph=True, backend=backend)
    inputs, results = batch(4), []
    for candidate in (fused, compiled):
        fused.zero_grad()
        output = candidate(**inputs, return_loss=True, output_router_logits=True)
        output.loss.backward()
        results.append((output.loss, {name: p.grad.clone() for name, p in fused.named_parameters()}))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    assert fused.get_parameter("vision_model.encoder.layers.1.mlp.router.weight").grad.abs().max() > 0
