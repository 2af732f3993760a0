"""The plans by which transformers splits a tower name the modules that it has, and no others."""

import re

import pytest
import torch

from modeling_clip_moe import CLIPMoETextConfig, CLIPMoETextModel, CLIPMoEVisionConfig, CLIPMoEVisionModel

TOWER = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_hidden_layers": 2}
KINDS = {
    "dense": ({}, {"mlp.fc1", "mlp.fc2"}),
    "sparse": ({"moe_layers": [0, 1]}, set()),
    "half sparse": ({"moe_layers": [1]}, {"mlp.fc1", "mlp.fc2"}),
    "with base FFNs": ({"moe_layers": [0, 1], "fusion_gate": True}, {"mlp.base.fc1", "mlp.base.fc2"}),
    "half with base FFNs": (
        {"moe_layers": [1], "fusion_gate": True},
        {"mlp.fc1", "mlp.fc2", "mlp.base.fc1", "mlp.base.fc2"},
    ),
}


@pytest.mark.parametrize(
    "config_class, model_class", [(CLIPMoETextConfig, CLIPMoETextModel), (CLIPMoEVisionConfig, CLIPMoEVisionModel)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_names_what_is_there(config_class, model_class, kind):
    changes, ffns = KINDS[kind]
    with torch.device("meta"):
        model = model_class(config_class(**TOWER, **changes))
    assert model.tp_plan == model.config.base_model_tp_plan
    names = {name for name, _ in model.named_modules()}
    found = {}
    for pattern, style in model.tp_plan.items():
        found[pattern.removeprefix("encoder.layers.*.")] = style
        assert any(re.fullmatch(pattern.replace(".", r"\.").replace("*", r"\d+"), name) for name in names), pattern
    attention = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj"}
    assert set(found) == attention | ffns
    rowwise = {name for name, style in found.items() if style == "rowwise"}
    assert rowwise == {"self_attn.out_proj"} | {name for name in ffns if name.endswith("fc2")}


def test_a_plan_is_not_saved_and_follows_its_configuration():
    config = CLIPMoEVisionConfig(**TOWER)
    assert "base_model_tp_plan" not in config.to_dict()
    config.moe_layers = [0, 1]
    assert not any("mlp" in pattern for pattern in config.base_model_tp_plan)
