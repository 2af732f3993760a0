"""What trains and what decays."""

import pytest
from tiny_clip_moe import tiny_model

from training.optimizers import parameter_groups, set_trainable


@pytest.fixture
def model():
    return tiny_model([1], fusion_gate=True)


def test_routers_only(model):
    """Whatever trained before."""
    set_trainable(model, "logit_scale")
    trainable, frozen = set_trainable(model, r"\.router\.")
    assert trainable == [f"{tower}_model.encoder.layers.1.mlp.router.weight" for tower in ("text", "vision")]
    assert {*trainable, *frozen} == {name for name, _ in model.named_parameters()} and not {*trainable} & {*frozen}
    assert {name for name, p in model.named_parameters() if p.requires_grad} == set(trainable)


def test_bad_patterns(model):
    for pattern, message in (("rooter", "'rooter' is found in no"), ("(", "not a regular")):
        with pytest.raises(ValueError, match=message):
            set_trainable(model, pattern)


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
    assert sizes == [[4, 5], [9, 0]]  # two matrices and two biases, in both towers, and the scale
