"""conversion/presets.py: the layers each paper makes sparse, and presets with changes."""

import pytest
from transformers import CLIPConfig

from clip_moe.conversion.presets import PRESETS, TOWERS, changed_preset, expert_width, sparse_layers
from clip_moe.conversion.upcycle import sparse_config

DENSE = CLIPConfig(text_config={"num_hidden_layers": 12}, vision_config={"num_hidden_layers": 24})  # as ViT-L/14


def test_presets_on_the_depths_of_vit_l14():
    table = {
        "clip_up": (list(range(1, 12, 2)), list(range(1, 24, 2)), 8, False, 2.0, False, 0.001),
        "clip_moe": (list(range(12)), list(range(24)), 4, True, None, False, 0.0),
        "clip_fmoe": ([7, 9, 11], [13, 15, 17, 19, 21, 23], 4, True, None, True, 0.0),
    }
    for name, (text_layers, vision_layers, experts, renormalized, capacity, gate, z_loss) in table.items():
        config = sparse_config(DENSE, PRESETS[name])
        assert config.text_config.moe_layers == text_layers and config.vision_config.moe_layers == vision_layers
        for tower in (config.text_config, config.vision_config):
            assert (tower.num_experts, tower.num_experts_per_tok) == (experts, 2)
            assert (tower.norm_topk_prob, tower.capacity_factor, tower.fusion_gate) == (renormalized, capacity, gate)
            assert tower.eval_capacity_factor is None
        balance = 0.02 if name == "clip_fmoe" else 0.01
        assert (config.router_aux_loss_coef, config.router_z_loss_coef) == (balance, z_loss)


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("all", {1: [0], 2: [0, 1], 4: [0, 1, 2, 3]}),
        ("all_but_first", {2: [1], 4: [1, 2, 3]}),
        ("every_second", {2: [1], 3: [1], 4: [1, 3], 5: [1, 3], 6: [1, 3, 5]}),
        ("second_half_every_second", {2: [1], 3: [1], 4: [3], 5: [3], 6: [3, 5], 7: [3, 5], 8: [5, 7]}),
    ],
)
def test_layers_by_name(name, layers):
    assert {number: sparse_layers(name, "text", number) for number in layers} == layers
    assert sparse_layers({"text": [0], "vision": name}, "vision", 4) == layers[4]


def test_moe_vie_at_the_width_of_its_largest_tower():
    """H/14 has FFNs of 3,413 hidden units, and experts of 854."""
    dense = CLIPConfig(vision_config={"num_hidden_layers": 32, "intermediate_size": 3413})
    config = sparse_config(dense, PRESETS["moe_vie"])
    tower = config.vision_config
    assert tower.moe_layers == list(range(1, 32)) and config.text_config.moe_layers == []
    assert (tower.num_experts, tower.num_experts_per_tok, tower.num_shared_experts) == (31, 3, 1)
    assert (tower.moe_intermediate_size, tower.scoring_func, tower.use_expert_bias) == (854, "sigmoid", True)
    assert tower.norm_topk_prob and tower.capacity_factor is None and config.router_aux_loss_coef == 0
    with pytest.raises(ValueError, match=r"moe_intermediate_size is 'a/4': .* a fraction of the FFN such as '1/4'"):
        sparse_config(DENSE, changed_preset("moe_vie", {"moe_intermediate_size": "a/4"}))


def test_presets_that_no_model_fits():
    unknown = changed_preset("clip_moe", {"sparse_layers": "every_secnd"})
    with pytest.raises(ValueError, match=r"\(did you mean 'every_second'\?\): .*, of the 24 that"):
        sparse_config(DENSE, unknown, ["vision"])
    with pytest.raises(ValueError, match="text tower is 'every_second', which chooses none: .*, of the 1 that"):
        sparse_config(CLIPConfig(text_config={"num_hidden_layers": 1}), PRESETS["dense_price"])
    for field, value in (("sparse_layers", "all"), ("moe_intermediate_size", 24)):
        with pytest.raises(ValueError, match=f"{field} names text, but .* are text, vision"):
            sparse_config(DENSE, changed_preset("clip_moe", {field: {"text": value}}), TOWERS)


@pytest.mark.parametrize("width", ["1e99999999", "1/0", "-1/4", "a quarter", 0.25, True], ids=str)
def test_widths_that_are_no_number_and_no_fraction_are_refused(width):
    with pytest.raises(ValueError, match="it must be a number of hidden units, or a fraction of the FFN such as '1/4'"):
        expert_width(width, "vision", 64)
