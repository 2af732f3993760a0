"""conversion/unify.py: every expert computes what its dense model did."""

import dataclasses

import pytest
import torch
from test_upcycle import processor, tiny_clip
from transformers import AutoModel, AutoProcessor

from conversion.checkpoints import model_outputs, sample_inputs
from conversion.dense import extract
from conversion.unify import main, unify, verify
from conversion.upcycle import PRESETS


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
