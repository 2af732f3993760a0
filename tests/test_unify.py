"""conversion/unify.py: every expert computes what its dense model did."""

import dataclasses

import pytest
import torch
from tiny_clip import command, moved, processor, saved, tiny_clip
from transformers import AutoModel, AutoProcessor

from clip_moe.conversion.dense import ONLY_EXPERTS, extract, force_expert, set_fusion_gates
from clip_moe.conversion.presets import PRESETS
from clip_moe.conversion.unify import unify, verify
from clip_moe.conversion.upcycle import upcycle
from clip_moe.conversion.verification import compare

PLAIN, GATED = (dataclasses.replace(PRESETS["clip_moe"], fusion_gate=gate) for gate in (False, True))
VIE = dataclasses.replace(PRESETS["moe_vie"], sparse_layers="all", towers=("text", "vision"))
FFN = "vision_model.encoder.layers.3.mlp"


def trained(seed, pattern=".mlp."):
    """The tiny CLIP; with a seed, with other weights where a name has the pattern."""
    return tiny_clip() if seed is None else moved(tiny_clip(), pattern, seed)


def one_expert(fusion_gate=True, seed=None, **changes):
    """The tiny CLIP with one expert in each sparse layer; with a seed, trained ones."""
    changes |= {"num_experts": 1, "num_experts_per_tok": 1, "fusion_gate": fusion_gate}
    model = upcycle(tiny_clip(), dataclasses.replace(PRESETS["clip_fmoe"], **changes))
    return model if seed is None else moved(model, (".experts.", ".fusion_gate."), seed)


def fused():
    return upcycle(tiny_clip(), PRESETS["clip_fmoe"])


def assert_same_outputs(model, expected):
    compare(expected, model, tolerance=1e-5)


def test_every_expert_is_its_dense_model():
    dense = [tiny_clip(), *(trained(seed) for seed in range(1, 12))]  # more than ten: "10" sorts before "2" as text
    sparse = unify(dense[0], dense[1:])
    for config in (sparse.config.text_config, sparse.config.vision_config):
        assert (config.num_experts, config.num_experts_per_tok, config.norm_topk_prob) == (12, 2, True)
        assert config.moe_layers == [0, 1, 2, 3]
    assert sparse.config.router_aux_loss_coef == 0.01
    for number, model in enumerate(dense):
        back = extract(sparse, number).state_dict()
        assert all(torch.equal(tensor, back[name]) for name, tensor in model.state_dict().items())
        with force_expert(sparse, number):
            assert_same_outputs(sparse, model)


def test_an_expert_trained_in_a_tower_that_stays_dense():
    with pytest.raises(ValueError, match=r"differs in text_model\.encoder\.layers\.0\.mlp"):
        unify(tiny_clip(), [trained(1)], towers=["vision"])
    sparse = unify(tiny_clip(), [trained(1, "vision_model.encoder.layers.1.mlp")], towers=["vision"])
    assert sparse.config.text_config.moe_layers == []


def test_routers_are_seeded():
    first, same, other = (unify(tiny_clip(), [trained(1)], seed=seed).state_dict() for seed in (0, 0, 1))
    routers = [name for name in first if ".router." in name]
    assert len(routers) == 8 and all(torch.equal(first[name], same[name]) for name in first)
    assert [name for name in first if not torch.equal(first[name], other[name])] == routers


def test_gates_are_averaged_to_the_bit_and_experts_stacked():
    base, experts = one_expert(), [one_expert(seed=seed) for seed in range(3)]
    assert_same_outputs(base, tiny_clip())
    sparse = unify(base, experts, seed=5)
    state, states = sparse.state_dict(), [expert.state_dict() for expert in experts]
    gates = [name for name in state if ".fusion_gate." in name]
    stacks = [name for name in state if ".experts." in name]
    assert len(gates) == 2 * 1 and len(stacks) == 4 * 2 * 1
    for name, tensor in state.items():
        if name in gates:
            assert torch.equal(tensor, torch.stack([s[name] for s in states]).mean(dim=0)), name
        elif name in stacks:
            assert torch.equal(tensor, torch.cat([s[name] for s in states])), name
        elif ".router." not in name:
            assert torch.equal(tensor, base.state_dict()[name]), name
    config = sparse.config.vision_config
    assert (config.num_experts, config.num_experts_per_tok, config.fusion_gate) == (3, 2, True)


@pytest.mark.parametrize(("preset", "base_expert", "number"), [(GATED, False, 0), (PLAIN, False, 0), (VIE, True, 1)])
@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
def test_what_becomes_of_the_base(preset, base_expert, number, is_sparse):
    """Beside new gates, left out, or expert 0: of dense models, and CLIP-FMoE's ablations of models without gates."""
    base = one_expert(False) if is_sparse else tiny_clip()
    experts = [one_expert(False, seed) if is_sparse else trained(seed) for seed in range(3)]
    sparse, ffn = unify(base, experts, preset, base_expert=base_expert), tiny_clip().get_submodule(FFN).state_dict()
    state = sparse.get_submodule(FFN).state_dict()
    assert len(state["experts.up_proj"]) == 3 + number
    if preset is GATED:
        assert all(torch.equal(state[f"base.{name}"], tensor) for name, tensor in ffn.items())
        assert state["fusion_gate.proj.weight"].std() == pytest.approx(0.02, rel=0.2)
    else:
        assert not any(name.startswith(("base.", "fusion_gate.")) for name in state)
        assert torch.equal(state["experts.up_proj"][0], ffn["fc1.weight"]) == base_expert
    set_fusion_gates(sparse, ONLY_EXPERTS)
    with force_expert(sparse, number):
        assert_same_outputs(sparse, experts[0])


@pytest.mark.parametrize(
    ("base", "experts", "message"),
    [
        (tiny_clip, lambda: [trained(1), trained(2, "text_projection")], "expert 2 .* in text_projection.weight$"),
        (tiny_clip, lambda: [tiny_clip(text_layers=5)], "expert 1 was not trained from this base"),
        (one_expert, lambda: [one_expert(seed=1), one_expert(sparse_layers=[1])], r"expert 2 .*layers\.[13]\.mlp"),
        (one_expert, lambda: [one_expert(False, 1)], r"expert 1 .* differs in .*fusion_gate"),
        (one_expert, lambda: [moved(one_expert(seed=1), f"{FFN}.base.fc1.w", 2)], f"1 .* in {FFN}.base.fc1.weight$"),
        (fused, lambda: [fused(), fused()], "of the wrong shape: .*experts"),  # four experts each
    ],
)
def test_what_cannot_be_unified(base, experts, message):
    with pytest.raises(ValueError, match=message):
        unify(base(), experts(), dataclasses.replace(PLAIN, num_experts_per_tok=1))


@pytest.mark.parametrize("make", [trained, lambda seed: one_expert(seed=seed)])
def test_command(make, tmp_path, capsys):
    base, *experts = (saved(tmp_path / str(seed), make(seed)) for seed in (None, 1, 2))
    command("unify", tmp_path / "out", "--model", base, "--experts", *experts)
    number = AutoModel.from_pretrained(tmp_path / "out").config.text_config.num_experts
    assert capsys.readouterr().out.count("largest difference in expert") == 3 * number
    assert AutoProcessor.from_pretrained(tmp_path / "out")(text="a cat") == processor()(text="a cat")
    with pytest.raises(SystemExit, match="the 4 experts of a token in dense_price are parts of an FFN"):
        command("unify", tmp_path / "parts", "--model", base, "--experts", *experts, "--preset", "dense_price")
    with pytest.raises(ValueError, match="model's expert [01]: .* differ from the source's"):
        verify(base, experts[::-1], tmp_path / "out")
    preset = dataclasses.replace(PLAIN, norm_topk_prob=False)  # weights need not sum to 1
    other = saved(tmp_path / "other", unify(make(None), [make(1), make(2)], preset))
    verify(base, experts, other)
