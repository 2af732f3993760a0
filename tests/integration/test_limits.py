"""What docs/limits.md says cannot work: each of these tests fails on the day when it can."""

import pytest
import torch
from torchao.quantization import FqnToConfig, Int8WeightOnlyConfig
from transformers import CLIPModel, CLIPVisionModelWithProjection, TorchAoConfig
from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

from modeling_clip_moe import CLIPMoEModel, CLIPMoEVisionModelWithProjection

BASE = "training/symbol_clip"
EXPERTS = FqnToConfig({r"re:.*\.experts\.(up|down)_proj": Int8WeightOnlyConfig()})


def test_the_loop_over_experts_has_no_onnx(repository):
    tower = CLIPMoEVisionModelWithProjection.from_pretrained(repository, experts_implementation="eager").eval()
    with pytest.raises(Exception, match="constant|decompos"):
        OnnxExporter().export(tower, {"pixel_values": torch.randn(2, 3, 32, 32)}, OnnxConfig())


@pytest.mark.parametrize("name, operation", [("grouped_mm", "transpose"), ("batched_mm", "bmm")])
def test_int8_experts_need_the_loop(repository, name, operation):
    tower = CLIPMoEVisionModelWithProjection.from_pretrained(
        repository, quantization_config=TorchAoConfig(EXPERTS), experts_implementation=name
    )
    with pytest.raises(NotImplementedError, match=operation):
        tower(torch.randn(1, 3, 32, 32))


def test_int8_of_a_whole_model(repository, tmp_path):
    with pytest.raises(ValueError, match="not enough values to unpack"):
        CLIPMoEModel.from_pretrained(repository, quantization_config=TorchAoConfig(EXPERTS))
    attention = TorchAoConfig(Int8WeightOnlyConfig())
    CLIPMoEModel.from_pretrained(repository, quantization_config=attention).save_pretrained(tmp_path)
    with pytest.raises((RuntimeError, ValueError)):
        CLIPMoEModel.from_pretrained(tmp_path)


def test_folders_in_int8_are_not_refused_by_clips_own_classes(repository, tmp_path):
    attention = TorchAoConfig(Int8WeightOnlyConfig())
    CLIPMoEVisionModelWithProjection.from_pretrained(repository, quantization_config=attention).save_pretrained(
        tmp_path
    )
    _, info = CLIPVisionModelWithProjection.from_pretrained(tmp_path, output_loading_info=True)
    assert any("mlp.fc2.weight" in name for name in info["missing_keys"])


def test_mismatched_sizes_that_are_ignored_are_not_refused(repository):
    _, info = CLIPModel.from_pretrained(repository, ignore_mismatched_sizes=True, output_loading_info=True)
    assert any("mlp.fc2.weight" in name for name in info["missing_keys"])
