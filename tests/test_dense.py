"""conversion/dense.py: what went into a sparse model comes out again."""

import json

import pytest
import torch
from tiny_clip import command, error_of, moved, processor, saved, tiny_clip
from transformers import AutoModel, AutoProcessor, CLIPModel

import clip_moe
from clip_moe.conversion.dense import extract, verify
from clip_moe.conversion.presets import PRESETS
from clip_moe.conversion.upcycle import upcycle
from clip_moe.engine.provenance import Record, weights_fingerprint

COPIES = {name: preset.num_experts for name, preset in PRESETS.items()}
COPIES |= {"moe_vie": 10, "dense_price": 8}  # of three and of four parts each
CHOICES = [(name, expert) for name, copies in COPIES.items() for expert in range(copies)]
SCALES = {"text": {"1": 0.3, "3": 0.4}, "vision": {"1": 0.5, "3": 0.6}}
UNEQUAL = "differ from the source's"


def differing_keys(first, second):
    first, second = first.state_dict(), second.state_dict()
    assert first.keys() == second.keys()
    return {key for key, tensor in first.items() if not torch.equal(tensor, second[key])}


def assert_is_expert(dense, sparse, expert, scales):
    for tower, layers in scales.items():
        for layer, scale in layers.items():
            name = f"{tower}_model.encoder.layers.{layer}.mlp"
            ffn, experts = dense.get_submodule(name), sparse.get_submodule(name).experts
            assert torch.equal(ffn.fc1.weight, experts.up_proj[expert])
            assert torch.equal(ffn.fc1.bias, experts.up_proj_bias[expert])
            assert torch.equal(ffn.fc2.weight, experts.down_proj[expert] * scale)
            assert torch.equal(ffn.fc2.bias, experts.down_proj_bias[expert] * scale)


def taken(source, output, expert, *options):
    """The model that the command makes."""
    command("dense", output, "--model", source, "--take", expert, *options)
    return AutoModel.from_pretrained(output, dtype="auto")


@pytest.fixture(scope="module")
def sparse():
    """A CLIP-FMoE whose experts, base FFN, routers and gates all differ."""
    return moved(upcycle(tiny_clip(), PRESETS["clip_fmoe"]), (".experts.", ".router.", ".fusion_gate."), 1, 1.0)


@pytest.fixture(scope="module")
def folder(sparse, tmp_path_factory):
    return saved(tmp_path_factory.mktemp("dense") / "sparse", sparse)


def unnormalized_model():
    return moved(upcycle(tiny_clip(), PRESETS["clip_up"]), ".experts.", seed=1)


@pytest.fixture
def unnormalized(tmp_path):
    """The folder of a CLIP-UP with different experts, and one with its scales."""
    folder, analysis = saved(tmp_path / "sparse", unnormalized_model(), with_processor=False), tmp_path / "analysis"
    write_scales(analysis, {"weights": weights_fingerprint(str(folder)), "scales": SCALES})
    return folder, analysis


def write_scales(folder, content):
    """As an analyze stage leaves them."""
    folder.mkdir(exist_ok=True)
    Record(stage={"name": "analysis", "stage": "analyze"}, seed=0, mixed_precision="no").write(folder)
    (folder / "experts.json").write_text(json.dumps(content))


@pytest.mark.parametrize(("name", "expert"), [*CHOICES, ("clip_fmoe", "base")])
def test_gives_back_the_original_bit_for_bit(name, expert):
    dense = tiny_clip()
    back = extract(upcycle(dense, PRESETS[name]), expert, scale=1)
    assert type(back) is CLIPModel
    assert differing_keys(back, dense) == set()
    assert back.config.to_dict() == dense.config.to_dict()


@pytest.mark.parametrize("expert", [3, "base"])
def test_command_verifies_against_the_forced_expert(sparse, folder, expert, tmp_path, capsys):
    model = taken(folder, tmp_path / "out", expert)
    assert capsys.readouterr().out.count("largest difference") == 3
    assert differing_keys(model, extract(sparse, expert)) == set()
    assert AutoProcessor.from_pretrained(tmp_path / "out")(text="a cat") == processor()(text="a cat")
    for other in {0, 2, "base"} - {expert}:
        with pytest.raises(ValueError, match=UNEQUAL):
            verify(folder, tmp_path / "out", other)


def test_folds_the_scale_of_each_layer_into_the_last_one(unnormalized, tmp_path):
    folder, analysis = unnormalized
    dense = taken(folder, tmp_path / "out", 5, "--scale", analysis)  # and verifies
    assert_is_expert(dense, unnormalized_model(), 5, SCALES)
    with pytest.raises(ValueError, match=UNEQUAL):
        verify(folder, tmp_path / "out", 5, 1.0)


def test_scales_in_half_precision_and_without_capacity(tmp_path):
    """Which would drop half of the tokens when the two are compared."""
    half = unnormalized_model().bfloat16()
    half.config.text_config.eval_capacity_factor = half.config.vision_config.eval_capacity_factor = 0.5
    dense = taken(saved(tmp_path / "half", half), tmp_path / "out", 2, "--scale", 0.31)
    assert dense.dtype == torch.bfloat16


def test_one_tower_may_need_a_scale():
    sparse = unnormalized_model()
    sparse.config.text_config.norm_topk_prob = True
    dense = extract(sparse, 2, {"vision": SCALES["vision"]})
    assert_is_expert(dense, sparse, 2, {"text": {"1": 1, "3": 1}, "vision": SCALES["vision"]})


def test_bad_scales_end_in_one_line(unnormalized, tmp_path):
    folder, analysis = unnormalized
    arguments = "dense", tmp_path / "out", "--model", folder, "--take", 2
    assert "set scale to an analyze stage of this model" in error_of(clip_moe.main, *arguments)
    for content, message in (
        (
            {"weights": weights_fingerprint(str(folder)), "scales": {"text": {"1": 0.3}}},
            "layer 3 of the text tower has no scale",
        ),
        ({"weights": "another", "scales": {}}, "was made from another model than"),
    ):
        write_scales(analysis, content)
        assert message in error_of(clip_moe.main, *arguments, "--scale", analysis)


def test_bad_choices_and_sources(sparse, tmp_path):
    for expert in (-1, 4):
        with pytest.raises(ValueError, match=f"there is no expert {expert}, only 0, 1, 2, 3, base"):
            extract(sparse, expert)
    with pytest.raises(ValueError, match="there is no expert base, only 0, 1, 2, 3"):
        extract(upcycle(tiny_clip(), PRESETS["clip_moe"]), "base")
    dense = saved(tmp_path / "dense", tiny_clip())
    assert "it is dense" in error_of(clip_moe.main, "dense", tmp_path / "out", "--model", dense, "--take", 0)
