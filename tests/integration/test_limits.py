"""What docs/limits.md says cannot work: each of these tests fails on the day when it can."""

import pytest
import torch
from torchao.quantization import FqnToConfig, Int8WeightOnlyConfig
from transformers import CLIPModel, CLIPVisionModelWithProjection, TorchAoConfig
from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

from modeling_clip_moe import CLIPMoEModel, CLIPMoEVisionModelWithProjection

EXPERTS = TorchAoConfig(FqnToConfig({r"re:.*\.experts\.(up|down)_proj": Int8WeightOnlyConfig()}))
ATTENTION = TorchAoConfig(Int8WeightOnlyConfig())


def test_the_loop_over_experts_has_no_onnx(repository):
    tower = CLIPMoEVisionModelWithProjection.from_pretrained(repository, experts_implementation="eager").eval()
    with pytest.raises(torch.onnx.OnnxExporterError, match="Failed to decompose"):
        OnnxExporter().export(tower, {"pixel_values": torch.randn(2, 3, 32, 32)}, OnnxConfig())


@pytest.mark.parametrize(
    "name, operation", [("grouped", "transpose"), ("grouped_mm", "transpose"), ("batched_mm", "bmm")]
)
def test_int8_experts_need_the_loop(repository, name, operation):
    tower = CLIPMoEVisionModelWithProjection.from_pretrained(
        repository, quantization_config=EXPERTS, experts_implementation=name
    )
    with pytest.raises(NotImplementedError, match=operation):
        tower(torch.randn(1, 3, 32, 32))


def test_int8_of_a_whole_model(repository, tmp_path):
    with pytest.raises(ValueError, match="not enough values to unpack"):
        CLIPMoEModel.from_pretrained(repository, quantization_config=EXPERTS)
    CLIPMoEModel.from_pretrained(repository, quantization_config=ATTENTION).save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="automatic conversion of the weights"):
        CLIPMoEModel.from_pretrained(tmp_path)


def test_what_clips_own_classes_do_not_refuse(repository, tmp_path):
    """Folders in int8, and mismatched sizes that are ignored."""
    tower = CLIPMoEVisionModelWithProjection.from_pretrained(repository, quantization_config=ATTENTION)
    tower.save_pretrained(tmp_path)
    for model_class, folder, options in (
        (CLIPVisionModelWithProjection, tmp_path, {}),
        (CLIPModel, repository, {"ignore_mismatched_sizes": True}),
    ):
        _, info = model_class.from_pretrained(folder, output_loading_info=True, **options)
        assert any("mlp.fc2.weight" in name for name in info["missing_keys"])
