"""How experts begin: what is drawn anew, and what stays the dense FFN's."""

import pytest
import torch
from tiny_clip import tiny_clip
from tiny_runs import DENSE, SPARSE, run_stages
from transformers import AutoModel

from conversion.presets import PRESETS, ExpertInit
from conversion.upcycle import shared_config, upcycle
from modeling_clip_moe import CLIPMoEModel
from modeling_clip_moe.experts import CLIPMoEExperts


@pytest.fixture(scope="module")
def dense():
    return tiny_clip()


def experts_of(dense, **how):
    sparse = upcycle(dense, PRESETS["clip_moe"], seed=1, expert_init=ExpertInit(**how))
    return [module for module in sparse.modules() if isinstance(module, CLIPMoEExperts)]


@pytest.mark.parametrize("units", ["expert", "tensor"])
def test_half_of_the_hidden_units_are_drawn_anew(dense, units):
    copies = experts_of(dense)
    for experts, before in zip(experts_of(dense, kind="drop_upcycling", units=units), copies, strict=True):
        changed = {}
        for name, axis in {"up_proj": 2, "down_proj": 1}.items():  # over the other axis
            differs = getattr(experts, name) != getattr(before, name)
            changed[name] = differs.any(axis)
            assert torch.equal(differs.all(axis), changed[name])  # whole units
            assert (changed[name].sum(1) == changed[name].shape[1] // 2).all()
        assert torch.equal(experts.up_proj_bias != before.up_proj_bias, changed["up_proj"])
        assert torch.equal(experts.down_proj_bias, before.down_proj_bias)
        assert (changed["up_proj"] == changed["down_proj"]).all() == (units == "expert")
        assert not torch.equal(changed["up_proj"][0], changed["up_proj"][1])  # each expert has others
        drawn, replaced = experts.up_proj[changed["up_proj"]], before.up_proj[changed["up_proj"]]
        assert drawn.std().item() == pytest.approx(replaced.std().item(), rel=0.15)
        assert drawn.mean().item() == pytest.approx(replaced.mean().item(), abs=0.1 * replaced.std().item())


def test_noise_is_relative_and_random_keeps_nothing(dense):
    copies = experts_of(dense)
    for noisy, random, before in zip(
        experts_of(dense, kind="noise", noise=0.1), experts_of(dense, kind="random"), copies, strict=True
    ):
        noise = noisy.up_proj - before.up_proj
        assert noise.std().item() == pytest.approx(0.1 * before.up_proj.std().item(), rel=0.1)
        assert torch.corrcoef(torch.stack([random.up_proj.flatten(), before.up_proj.flatten()]))[0, 1].abs() < 0.1
        assert random.up_proj.std().item() == pytest.approx(before.up_proj.std().item(), rel=0.1)


def test_experts_of_a_shared_encoder_are_drawn_once(dense):
    shared = CLIPMoEModel(shared_config(dense.config)).eval()
    copies, experts = (experts_of(shared, **init) for init in ({}, {"kind": "drop_upcycling"}))
    changed = (experts[0].up_proj != copies[0].up_proj).any(-1)
    assert (changed.sum(1) == changed.shape[1] // 2).all()


def test_a_recipe_chooses_and_repeats_it(tmp_path, capsys):
    """Only copies are compared with the dense model."""
    run_stages(tmp_path / "copies", [DENSE, SPARSE])
    assert "largest difference" in capsys.readouterr().out
    stage = {**SPARSE, "expert_init": {"kind": "drop_upcycling"}}
    first, again = (run_stages(tmp_path / name, [DENSE, stage]) / "sparse" for name in ("first", "again"))
    assert "largest difference" not in capsys.readouterr().out
    for one, other in zip(*(AutoModel.from_pretrained(folder).parameters() for folder in (first, again)), strict=True):
        assert torch.equal(one, other)


REFUSED = {
    "sparse.expert_init: noise: copies takes none": {"noise": 0.1},
    "expert_init.ratio: Input should be greater than 0": {"kind": "drop_upcycling", "ratio": 0},
    "expert_init.kind: Input should be 'copies', 'noise', 'drop_upcycling' or 'random'": {"kind": "svd"},
    "sparse.expert_init.rate: there is no such key: did you mean 'ratio'": {"kind": "noise", "rate": 1},
}


@pytest.mark.parametrize(("message", "init"), REFUSED.items(), ids=[*map(str, REFUSED.values())])
def test_what_makes_no_sense_is_one_line(tmp_path, message, init):
    with pytest.raises(ValueError, match=message):
        run_stages(tmp_path, [DENSE, {**SPARSE, "expert_init": init}])
