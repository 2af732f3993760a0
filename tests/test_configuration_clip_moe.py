"""Configuration: defaults, refusals that name field and value, and files."""

import ast
import re
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CLIPTextConfig, CLIPVisionConfig

import modeling_clip_moe
from modeling_clip_moe import CLIPMoETextConfig, CLIPMoEVisionConfig, CLIPMoEVisionModel
from modeling_clip_moe.families import FAMILIES


@pytest.mark.parametrize(
    ("config_class", "stock_class"), [(CLIPMoETextConfig, CLIPTextConfig), (CLIPMoEVisionConfig, CLIPVisionConfig)]
)
def test_towers_have_the_fields_and_defaults_of_clip(config_class, stock_class):
    config, stock = config_class().to_dict(), stock_class().to_dict()
    for name in ("model_type", "auto_map"):
        config.pop(name), stock.pop(name, None)
    assert stock.items() <= config.items()
    assert config["moe_layers"] == []


@pytest.mark.parametrize("config_class", [CLIPMoETextConfig, CLIPMoEVisionConfig])
@pytest.mark.parametrize(
    "fields",
    [
        {"num_experts_per_tok": 5, "num_experts": 4},
        {"num_experts_per_tok": 0},
        {"moe_layers": [3, 12]},
        {"moe_layers": [1, 1]},
        {"capacity_factor": 0},
        {"capacity_factor": float("nan")},
        {"eval_capacity_factor": 0.0},
        {"capacity_group_size": 0},
        {"router_jitter_noise": 1.0},
        {"norm_before_capacity": True, "norm_topk_prob": False},
        # Of the wrong type
        {"num_experts": "four"},
        {"moe_layers": [0.5]},
        {"capacity_factor": "2"},
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_field_and_value(config_class, fields):
    name, value = next(iter(fields.items()))
    message = rf"(?s){name}.*({re.escape(str(value))}|Invalid item)"
    with pytest.raises((ValueError, StrictDataclassError), match=message):
        config_class(**fields)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_fields_of_a_tower_are_refused_beside_the_towers(family):
    with pytest.raises(ValueError, match="^num_experts, moe_layers must be in text_config or vision_config, not bes"):
        family.sparse.config_class(num_experts=16, moe_layers=[1, 3])


@pytest.mark.parametrize(
    ("fields", "ffns"),
    [
        ({}, ["mlp"]),
        ({"moe_layers": [0, 1]}, []),
        ({"moe_layers": [1]}, ["mlp"]),
        ({"moe_layers": [0, 1], "fusion_gate": True}, ["mlp.base"]),
        ({"moe_layers": [1], "fusion_gate": True}, ["mlp", "mlp.base"]),
        ({"moe_layers": [1], "use_gated_mlp": True, "num_shared_experts": 1}, ["mlp", "mlp.shared_experts"]),
    ],
    ids=str,
)
def test_the_plan_of_tensor_parallelism_names_the_modules_that_are_there(fields, ffns):
    config = CLIPMoEVisionConfig(hidden_size=8, num_attention_heads=1, num_hidden_layers=2, **fields)
    with torch.device("meta"):
        names = {re.sub(r"\.\d+\.", ".*.", name) for name, _ in CLIPMoEVisionModel(config).named_modules()}
    plan = config.base_model_tp_plan
    expected = {f"self_attn.{name}_proj": "colwise" for name in "qkv"} | {"self_attn.out_proj": "rowwise"}
    first, last = (["gate_proj", "up_proj"], "down_proj") if config.use_gated_mlp else (["fc1"], "fc2")
    for ffn in ffns:
        expected |= {f"{ffn}.{name}": "colwise" for name in first} | {f"{ffn}.{last}": "rowwise"}
    assert {name.removeprefix("encoder.layers.*."): style for name, style in plan.items()} == expected
    assert plan.keys() <= names and "base_model_tp_plan" not in config.to_dict()


def test_a_classifier_of_clip_alone_is_named_in_its_configuration():
    maps = {family.model_type: {*family.sparse.config_class().auto_map} for family in FAMILIES}
    whole = {"AutoConfig", "AutoModel", "AutoModelForZeroShotImageClassification"}
    assert maps.pop("clip") == whole | {"AutoModelForImageClassification"}
    assert all(auto_map == whole for auto_map in maps.values())


def test_the_package_has_the_names_it_lists_and_none_left_of_its_registration():
    names = vars(modeling_clip_moe)
    assert {*modeling_clip_moe.__all__} <= names.keys() and not {"family", "model"} & names.keys()


def test_the_code_needs_nothing_but_torch_and_transformers():
    """Of what a file names at its top; an adapter is for another library."""
    allowed = {*sys.stdlib_module_names, "huggingface_hub", "safetensors", "torch", "transformers"}
    for path in Path(modeling_clip_moe.__file__).parent.glob("*.py"):
        nodes = ast.parse(path.read_text()).body
        names = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
        names |= {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
        others = {"open_clip_adapter.py": {"PIL"}}.get(path.name, set())
        assert {name.partition(".")[0] for name in names} - allowed == others, path.name
