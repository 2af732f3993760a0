"""Which parameters train and which decay."""

import re

import pytest
import torch
from tiny_clip_moe import inputs, tiny_model
from tiny_families import tiny_dense
from torch import nn

from clip_moe.training.optimizers import parameter_groups, set_trainable, warn_of_idle_parts
from modeling_clip_moe.experts import CLIPMoEExperts
from modeling_clip_moe.families import FAMILIES, IMAGE_TOWERS
from modeling_clip_moe.sparse_moe import CLIPMoESparseMoeBlock


@pytest.fixture
def model():
    return tiny_model([1], fusion_gate=True)


def equal_experts(**moe):
    """A model as `upcycle` makes it: all experts compute the same."""
    model = tiny_model([1], **moe)
    with torch.no_grad():
        for experts in (module for module in model.modules() if isinstance(module, CLIPMoEExperts)):
            for weight in experts.parameters():
                weight.copy_(weight[:1].expand_as(weight).clone())
    return model


def idle_parts(model, trainable, caplog):
    """Parameters named as getting no gradient, and those that get none from the logits, up to rounding."""
    caplog.clear()
    set_trainable(model, trainable)
    warn_of_idle_parts("routed", model)
    named = {name for text in caplog.messages for name in re.findall(r"(\w+_model\.\S+?),? ", text)}
    model.zero_grad()
    model.train()(**inputs()).logits_per_image.square().sum().backward()
    sizes = {name: p.grad.abs().max().item() for name, p in model.named_parameters() if p.requires_grad}
    parts = {name for name in sizes if re.search(r"router|fusion_gate", name)}
    return named, {re.sub(r"(router|fusion_gate).*", r"\1", name) for name in parts if sizes[name] < 1e-3}


ROUTERS = {f"{tower}_model.encoder.layers.1.mlp.router" for tower in ("text", "vision")}


def test_routers_between_equal_experts_are_named(caplog):
    """Those that the task gives no gradient, and no others."""
    for trainable in (r"\.router\.", r"router|norm|attn"):
        assert idle_parts(equal_experts(), trainable, caplog) == (ROUTERS, ROUTERS)
    assert "routed: text_model.encoder.layers.1.mlp.router, vision_model" in caplog.text
    small = equal_experts()
    with torch.no_grad():
        for name in ROUTERS:
            small.get_submodule(name).weight.mul_(1e-4)
    assert idle_parts(small, r"\.router\.", caplog)[0] == ROUTERS
    learns = [
        (tiny_model([1]), r"\.router\."),
        (equal_experts(), "logit_scale"),  # a frozen router
        (equal_experts(norm_topk_prob=False), r"\.router\."),
        (equal_experts(norm_before_capacity=True, capacity_factor=0.5), r"\.router\."),
    ]
    for model, trainable in learns:
        assert idle_parts(model, trainable, caplog) == (set(), set())
    assert idle_parts(equal_experts(), r"\.(router|experts)\.", caplog)[0] == set()  # experts soon differ


def test_fusion_gates_between_equal_experts_are_named(caplog):
    """Those of which the base FFN computes what each expert does."""
    model = equal_experts(fusion_gate=True)
    assert idle_parts(model, "router|fusion_gate", caplog) == (ROUTERS, ROUTERS)
    with torch.no_grad():
        for block in (module for module in model.modules() if isinstance(module, CLIPMoESparseMoeBlock)):
            for linear, name in ((block.base.fc1, "up_proj"), (block.base.fc2, "down_proj")):
                linear.weight.copy_(getattr(block.experts, name)[0])
                linear.bias.copy_(getattr(block.experts, f"{name}_bias")[0])
    gates = {name.replace("router", "fusion_gate") for name in ROUTERS}
    assert idle_parts(model, "router|fusion_gate", caplog) == (ROUTERS | gates, ROUTERS | gates)
    assert idle_parts(model, r"fusion_gate|\.base\.", caplog)[0] == set()


def test_bad_patterns(model):
    for pattern, message in (("rooter", "'rooter' matches no"), ("(", "not a regular")):
        with pytest.raises(ValueError, match=message):
            set_trainable(model, pattern)


@pytest.mark.parametrize(
    ("kinds", "pattern"),
    [
        (["routers"], r"\.router\."),
        ("routers", r"\.router\."),
        (["experts", "routers"], r"\.(experts|router)\."),
        (["norms"], r"norm\d?\.|layrnorm\."),
        (["norms", "experts"], r"norm\d?\.|layrnorm\.|\.experts\."),
    ],
)
def test_kinds_of_weights(kinds, pattern):
    """Shared experts, which are for every token, are no experts that a router chooses."""
    model = tiny_model([1], num_shared_experts=1)
    named = dict(model.named_parameters())
    assert any(".shared_experts." in name for name in named)
    assert set(set_trainable(model, kinds)) == {name for name in named if re.search(pattern, name)}
    with pytest.raises(ValueError, match="the model has no routers and no experts"):
        set_trainable(tiny_model([]), ["routers", "experts"])


def test_decay_is_for_matrices(model):
    decay, no_decay = parameter_groups(model, 0.1)
    assert (decay["weight_decay"], no_decay["weight_decay"]) == (0.1, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decaying, left = ([names[id(p)] for p in group["params"]] for group in (decay, no_decay))
    assert sorted(decaying + left) == sorted(names.values())
    ends = {name.rsplit(".", 1)[-1] for name in left}
    assert ends == {"bias", "weight", "up_proj_bias", "down_proj_bias", "class_embedding", "logit_scale"}
    assert all("norm" in name or "layrnorm" in name for name in left if name.endswith("weight"))
    assert not [name for name in decaying if "norm" in name or "bias" in name]


def test_frozen_parameters_are_in_no_group(model):
    set_trainable(model, "experts|logit_scale")
    sizes = [[len(group["params"]) for group in parameter_groups(model, 0.1, decay_all)] for decay_all in (False, True)]
    assert sizes == [[4, 5], [9]]  # two matrices and two biases, in both towers, and the scale


@pytest.mark.parametrize("family", [*FAMILIES, *IMAGE_TOWERS], ids=lambda family: family.name)
def test_no_familys_norms_decay(family):
    """Whatever it calls them: `LayerNorm`, `pre_LN`, `layernorm_pre`."""
    model = tiny_dense(family)
    decaying = {id(parameter) for parameter in parameter_groups(model, 0.1)[0]["params"]}
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    assert norms and not decaying & {id(parameter) for norm in norms for parameter in norm.parameters()}
    matrices = [module for module in model.modules() if isinstance(module, nn.Linear | nn.Embedding | nn.Conv2d)]
    assert {id(module.weight) for module in matrices} <= decaying
