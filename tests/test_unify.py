"""conversion/unify.py: every expert computes what its dense model did."""

import dataclasses

import pytest
import torch
from tiny_clip import processor, tiny_clip
from transformers import AutoModel, AutoProcessor

from conversion.checkpoints import model_outputs, sample_inputs
from conversion.dense import ONLY_EXPERTS, extract, set_fusion_gates
from conversion.presets import PRESETS
from conversion.unify import convert, main, unify, unify_sparse, verify
from conversion.upcycle import upcycle


def trained(seed, pattern=".mlp."):
    """The tiny CLIP with other weights where a name has the pattern."""
    model, generator = tiny_clip(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if pattern in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) / 5)
    return model


@pytest.fixture
def folders(tmp_path):
    names = [str(tmp_path / name) for name in ("base", "first", "second")]
    for name, model in zip(names, (tiny_clip(), trained(1), trained(2)), strict=True):
        model.save_pretrained(name)
    processor().save_pretrained(names[0])
    return names


def test_every_expert_is_its_dense_model():
    dense = [tiny_clip(), *(trained(seed) for seed in range(1, 12))]  # more than ten: "10" sorts before "2" as text
    sparse = unify(dense[0], dense[1:])
    assert sparse.config.text_config.num_experts == sparse.config.vision_config.num_experts == 12
    assert sparse.config.text_config.moe_layers == sparse.config.vision_config.moe_layers == [0, 1, 2, 3]
    for number, model in enumerate(dense):
        back = extract(sparse, number).state_dict()
        assert all(torch.equal(tensor, back[name]) for name, tensor in model.state_dict().items())
        inputs = sample_inputs(model.config)
        with sparse.force_expert(number):
            forced = model_outputs(sparse, inputs)
        for name, expected in model_outputs(model, inputs).items():
            torch.testing.assert_close(forced[name], expected, atol=1e-5, rtol=1e-5, msg=name)


def test_weights_need_not_sum_to_one(folders, tmp_path):
    preset = dataclasses.replace(PRESETS["clip_moe"], norm_topk_prob=False)
    convert(folders[0], folders[1:], tmp_path / "sparse", preset)  # and verifies


def test_routers_are_seeded_and_routing_is_the_papers():
    first, same, other = (unify(tiny_clip(), [trained(1)], seed=seed) for seed in (0, 0, 1))
    routers = [[t for name, t in m.state_dict().items() if ".router." in name] for m in (first, same, other)]
    assert len(routers[0]) == 8
    assert all(torch.equal(a, b) for a, b in zip(routers[0], routers[1], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(routers[0], routers[2], strict=True))
    assert first.config.vision_config.norm_topk_prob and first.config.vision_config.num_experts_per_tok == 2
    assert first.config.router_aux_loss_coef == 0.01


@pytest.mark.parametrize(
    ("experts", "changes", "message"),
    [
        ([], {}, "no experts to unify"),
        ([trained(1), trained(2, "text_projection")], {}, "expert 2 .* differs in text_projection.weight$"),
        ([trained(1, "layers.2.self_attn.q")], {}, r"differs in text_model\.encoder\.layers\.2\.self_attn\.q_proj"),
        ([tiny_clip(text_layers=5)], {}, "expert 1 was not trained from this base"),
        ([tiny_clip(text_layers=3)], {}, "expert 1 was not trained from this base"),
        ([trained(1)], {"num_experts_per_tok": 3}, "num_experts_per_tok"),
    ],
)
def test_what_cannot_be_unified(experts, changes, message):
    with pytest.raises(Exception, match=message):
        unify(tiny_clip(), experts, dataclasses.replace(PRESETS["clip_moe"], **changes))


def test_an_expert_trained_in_a_tower_that_stays_dense():
    with pytest.raises(ValueError, match=r"differs in text_model\.encoder\.layers\.0\.mlp"):
        unify(tiny_clip(), [trained(1)], towers=["vision"])
    sparse = unify(tiny_clip(), [trained(1, "vision_model.encoder.layers.1.mlp")], towers=["vision"])
    assert sparse.config.text_config.moe_layers == []


def test_command(folders, tmp_path, capsys):
    main([folders[0], str(tmp_path / "out"), "--experts", *folders[1:]])
    assert capsys.readouterr().out.count("largest difference in expert") == 9
    assert AutoModel.from_pretrained(tmp_path / "out").config.text_config.num_experts == 3
    assert AutoProcessor.from_pretrained(tmp_path / "out")(text="a cat") == processor()(text="a cat")
    with pytest.raises(ValueError, match="does not compute what the source does: see expert 1: "):
        verify(folders[0], [folders[2], folders[1]], tmp_path / "out")


def test_command_ends_in_one_line(folders, tmp_path):
    trained(3, "visual_projection").save_pretrained(tmp_path / "strange")
    with pytest.raises(SystemExit) as exit:
        main([folders[0], str(tmp_path / "out"), "--experts", folders[1], str(tmp_path / "strange")])
    assert exit.value.code.startswith("error: expert 2 was not trained from this base")
    assert "visual_projection.weight" in exit.value.code
    assert not (tmp_path / "out").exists()


def one_expert(fusion_gate=True, seed=None):
    """The tiny CLIP with one expert in each sparse layer; with a seed, trained ones."""
    preset = dataclasses.replace(PRESETS["clip_fmoe"], num_experts=1, num_experts_per_tok=1, fusion_gate=fusion_gate)
    model = upcycle(tiny_clip(), preset)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".experts." in name or ".fusion_gate." in name:
                    parameter.add_(torch.randn(parameter.shape, generator=generator) / 5)
    return model


def test_fused_models_compute_the_dense_one_at_the_start():
    inputs = sample_inputs(tiny_clip().config)
    found = model_outputs(one_expert(), inputs)
    for name, expected in model_outputs(tiny_clip(), inputs).items():
        torch.testing.assert_close(found[name], expected, atol=1e-5, rtol=1e-5, msg=name)


def test_gates_are_averaged_to_the_bit_and_experts_stacked():
    base, experts = one_expert(), [one_expert(seed=seed) for seed in range(3)]
    sparse = unify_sparse(base, experts, num_experts_per_tok=2, seed=5)
    state, states = sparse.state_dict(), [expert.state_dict() for expert in experts]
    gates = [name for name in state if ".fusion_gate." in name]
    stacks = [name for name in state if ".experts." in name]
    assert len(gates) == 2 * 1 and len(stacks) == 4 * 2 * 1
    for name in gates:
        assert torch.equal(state[name], torch.stack([s[name] for s in states]).mean(dim=0)), name
    for name in stacks:
        assert torch.equal(state[name], torch.cat([s[name] for s in states])), name
    for name in set(state) - set(gates) - set(stacks):
        if ".router." not in name:
            assert torch.equal(state[name], base.state_dict()[name]), name
    config = sparse.config.vision_config
    assert (config.num_experts, config.num_experts_per_tok, config.fusion_gate) == (3, 2, True)
    assert torch.equal(unify_sparse(base, experts, seed=5).logit_scale, sparse.logit_scale)


def test_new_gates_and_none():
    """CLIP-FMoE's ablations: experts trained without gates, unified with new ones, or without any."""
    base, experts = one_expert(False), [one_expert(False, seed) for seed in range(3)]
    dense = tiny_clip().state_dict()
    gated = unify_sparse(base, experts, fusion_gate=True)
    plain = unify_sparse(base, experts, fusion_gate=False)
    with_base = unify_sparse(base, experts, fusion_gate=False, base_expert=True)
    ffn = "vision_model.encoder.layers.3.mlp"
    assert torch.equal(gated.state_dict()[f"{ffn}.base.fc1.weight"], dense[f"{ffn}.fc1.weight"])
    assert gated.state_dict()[f"{ffn}.fusion_gate.proj.weight"].std() == pytest.approx(0.02, rel=0.1)
    assert [len(m.state_dict()[f"{ffn}.experts.up_proj"]) for m in (gated, plain, with_base)] == [3, 3, 4]
    assert torch.equal(with_base.state_dict()[f"{ffn}.experts.up_proj"][0], dense[f"{ffn}.fc1.weight"])
    assert not any(".base." in name or ".fusion_gate." in name for name in plain.state_dict())
    for model, number in ((gated, 0), (plain, 0), (with_base, 1)):
        set_fusion_gates(model, ONLY_EXPERTS)
        inputs = sample_inputs(model.config)
        with model.force_expert(number):
            found = model_outputs(model, inputs)
        for name, expected in model_outputs(experts[0], inputs).items():
            torch.testing.assert_close(found[name], expected, atol=1e-5, rtol=1e-5, msg=name)


def other_layers():
    preset = dataclasses.replace(PRESETS["clip_fmoe"], num_experts=1, num_experts_per_tok=1, sparse_layers=[1])
    return upcycle(tiny_clip(), preset)


def moved(name):
    model = one_expert(seed=1)
    with torch.no_grad():
        model.get_parameter(name).add_(1e-3)
    return model


@pytest.mark.parametrize(
    ("base", "experts", "top_k", "message"),
    [
        (one_expert(), [], 1, "no experts to unify"),
        (one_expert(), [one_expert(seed=1), other_layers()], 2, r"expert 2 .* differs in .*layers\.[13]\.mlp"),
        (one_expert(), [one_expert(False, 1)], 1, r"expert 1 .* differs in .*fusion_gate"),
        (
            one_expert(),
            [moved("vision_model.encoder.layers.3.mlp.base.fc1.weight")],
            1,
            r"differs in vision_model\.encoder\.layers\.3\.mlp\.base\.fc1\.weight$",
        ),
        (one_expert(), [one_expert(seed=1)], 2, "num_experts_per_tok"),
        (upcycle(tiny_clip(), PRESETS["clip_fmoe"]), [one_expert(seed=1)], 1, "sparse layers with one expert each"),
    ],
)
def test_what_cannot_be_unified_of_sparse_models(base, experts, top_k, message):
    with pytest.raises(Exception, match=message):
        unify_sparse(base, experts, top_k)


def test_command_with_fused_models(tmp_path, capsys):
    names = [str(tmp_path / name) for name in ("base", "first", "second")]
    for name, model in zip(names, (one_expert(), one_expert(seed=1), one_expert(seed=2)), strict=True):
        model.save_pretrained(name)
    main([names[0], str(tmp_path / "out"), "--experts", *names[1:]])
    assert capsys.readouterr().out.count("largest difference in expert") == 6
    assert AutoModel.from_pretrained(tmp_path / "out").config.text_config.num_experts == 2
    with pytest.raises(ValueError, match="does not compute what the source does: see expert 0: "):
        verify(names[0], [names[2], names[1]], tmp_path / "out")


def test_layers_of_a_sparse_base_are_settled(tmp_path):
    one_expert().save_pretrained(tmp_path / "base")
    base = str(tmp_path / "base")
    with pytest.raises(SystemExit, match="--sparse-layers: .* is sparse already"):
        main([base, str(tmp_path / "out"), "--experts", base, base, "--sparse-layers", "0"])
    assert not (tmp_path / "out").exists()
