"""Int8 weights by torchao."""

import pytest
import torch
from torchao.quantization import FqnToConfig, Int8Tensor, Int8WeightOnlyConfig
from transformers import TorchAoConfig

from clip_moe.data.symbols import SYMBOLS
from modeling_clip_moe import CLIPMoEVisionModelWithProjection, loading

# torchao's own way leaves the experts out, which are no `nn.Linear`. With "_default" instead of the second pattern,
# transformers would quantize the biases, too
EXPERTS_TOO = {
    r"re:.*\.experts\.(up|down)_proj": Int8WeightOnlyConfig(),
    r"re:.*\.self_attn\.\w+\.weight": Int8WeightOnlyConfig(),
}


@pytest.fixture(scope="module")
def batch(processor):
    return processor(images=list(SYMBOLS.load("test", "detailed", 32)["image"]), return_tensors="pt")


@torch.no_grad()
def embeds(model, batch):
    return model.eval()(batch["pixel_values"]).image_embeds


def error(actual, expected):
    """The largest relative error of an embedding."""
    return ((actual.float() - expected).norm(dim=-1) / expected.norm(dim=-1)).max().item()


def quantized(model):
    return {name for name, parameter in model.named_parameters() if isinstance(parameter, Int8Tensor)}


def quantize(cls, folder, config=None):
    return cls.from_pretrained(folder, quantization_config=TorchAoConfig(config or Int8WeightOnlyConfig()))


def test_int8_experts(repository, batch):
    tower = CLIPMoEVisionModelWithProjection.from_pretrained(repository)
    small = quantize(CLIPMoEVisionModelWithProjection, repository, FqnToConfig(EXPERTS_TOO))
    experts = small.vision_model.encoder.layers[0].mlp.experts
    assert isinstance(experts.up_proj, Int8Tensor) and isinstance(experts.down_proj, Int8Tensor)
    assert not any("bias" in name or "router" in name for name in quantized(small))
    # One scale for each output channel of each expert
    assert experts.up_proj.scale.shape == (4, tower.config.intermediate_size, 1)
    assert 0 < error(embeds(small, batch), embeds(tower, batch)) < 0.05
    # Quantized experts compute what their dequantized weights do
    exact = CLIPMoEVisionModelWithProjection.from_pretrained(repository)
    weights = dict(small.named_parameters())
    with torch.no_grad():
        for name, parameter in exact.named_parameters():
            if isinstance(weights[name], Int8Tensor):
                parameter.copy_(weights[name].dequantize())
    torch.testing.assert_close(embeds(small, batch), embeds(exact, batch), rtol=1e-3, atol=1e-3)


def test_experts_that_stay_as_they_are_are_told(repository, monkeypatch):
    told = []
    monkeypatch.setattr(loading.logger, "warning", told.append)
    quantize(CLIPMoEVisionModelWithProjection, repository, FqnToConfig(EXPERTS_TOO))
    assert not told
    quantize(CLIPMoEVisionModelWithProjection, repository)
    assert "the quantization left the experts as they are" in told[0]


@pytest.mark.parametrize("config", [Int8WeightOnlyConfig(), FqnToConfig(EXPERTS_TOO)], ids=["attention", "experts"])
def test_a_quantized_tower_saves_and_loads(repository, batch, tmp_path, config):
    tower = quantize(CLIPMoEVisionModelWithProjection, repository, config)
    tower.save_pretrained(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size < 1.1 * sum(p.numel() * (1 if isinstance(p, Int8Tensor) else 4) for p in tower.parameters())
    loaded = CLIPMoEVisionModelWithProjection.from_pretrained(tmp_path)
    assert quantized(loaded) == quantized(tower)
    torch.testing.assert_close(embeds(loaded, batch), embeds(tower, batch), rtol=1e-4, atol=1e-4)
