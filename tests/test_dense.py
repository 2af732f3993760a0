"""conversion/dense.py: what went into a sparse model comes out again."""

import json
import os
import subprocess
import sys

import pytest
import torch
from tiny_clip import processor, tiny_clip
from transformers import AutoModel, AutoProcessor, CLIPModel

from conversion.dense import extract, main, verify
from conversion.presets import PRESETS
from conversion.upcycle import upcycle
from modeling_clip_moe import CLIPMoEConfig, CLIPMoEModel
from records.provenance import weights_fingerprint

CHOICES = [(name, expert) for name, preset in PRESETS.items() for expert in range(preset.num_experts)]


def differing_keys(first, second):
    first, second = first.state_dict(), second.state_dict()
    assert first.keys() == second.keys()
    return {key for key, tensor in first.items() if not torch.equal(tensor, second[key])}


@pytest.fixture
def sparse():
    """A CLIP-FMoE whose experts, base FFNs, routers and gates all differ, and its dense base."""
    model = upcycle(tiny_clip(), PRESETS["clip_fmoe"])
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in (".experts.", ".router.", ".fusion_gate.")):
                parameter.add_(torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize(("name", "expert"), [*CHOICES, ("clip_fmoe", "base")])
def test_gives_back_the_original_bit_for_bit(name, expert):
    dense = tiny_clip()
    back = extract(upcycle(dense, PRESETS[name]), expert, scale=1)
    assert type(back) is CLIPModel
    assert differing_keys(back, dense) == set()
    assert back.config.to_dict() == dense.config.to_dict()


def test_takes_the_expert_asked_for(sparse):
    layer = sparse.vision_model.encoder.layers[3].mlp
    for expert in range(4):
        ffn = extract(sparse, expert).vision_model.encoder.layers[3].mlp
        assert torch.equal(ffn.fc1.weight, layer.experts.up_proj[expert])
        assert torch.equal(ffn.fc1.bias, layer.experts.up_proj_bias[expert])
        assert torch.equal(ffn.fc2.weight, layer.experts.down_proj[expert])
        assert torch.equal(ffn.fc2.bias, layer.experts.down_proj_bias[expert])
    assert differing_keys(extract(sparse, "base"), tiny_clip()) == set()


@pytest.mark.parametrize("expert", [0, 3, "base"])
def test_command_verifies_against_the_forced_expert(sparse, expert, tmp_path, capsys):
    sparse.save_pretrained(tmp_path / "sparse")
    processor().save_pretrained(tmp_path / "sparse")
    main([str(tmp_path / "sparse"), str(tmp_path / "out"), "--expert", str(expert)])
    assert capsys.readouterr().out.count("largest difference") == 3
    assert differing_keys(AutoModel.from_pretrained(tmp_path / "out"), extract(sparse, expert)) == set()
    assert AutoProcessor.from_pretrained(tmp_path / "out")(text="a cat") == processor()(text="a cat")


def test_verification_fails_for_another_expert(sparse, tmp_path):
    sparse.save_pretrained(tmp_path / "sparse")
    extract(sparse, 1).save_pretrained(tmp_path / "dense")
    for other in (0, 2, "base"):
        with pytest.raises(ValueError, match="does not compute what the source does"):
            verify(tmp_path / "sparse", tmp_path / "dense", other)


def test_verification_does_without_capacity(tmp_path):
    sparse = upcycle(tiny_clip(), PRESETS["clip_up"])
    sparse.config.text_config.eval_capacity_factor = sparse.config.vision_config.eval_capacity_factor = 0.5
    sparse.save_pretrained(tmp_path / "sparse")
    main([str(tmp_path / "sparse"), str(tmp_path / "out"), "--expert", "5", "--scale", "1"])


SCALES = {"text": {"1": 0.3, "3": 0.4}, "vision": {"1": 0.5, "3": 0.6}}


@pytest.fixture
def unnormalized(tmp_path):
    """The folder of a CLIP-UP with different experts, and a file of its scales."""
    sparse, folder = upcycle(tiny_clip(), PRESETS["clip_up"]), tmp_path / "sparse"
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in sparse.named_parameters():
            if ".experts." in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) / 5)
    sparse.save_pretrained(folder)
    scales = tmp_path / "experts.json"
    scales.write_text(json.dumps({"weights": weights_fingerprint(str(folder)), "scales": SCALES}))
    return sparse, folder, scales


def test_folds_the_scale_of_each_layer_into_the_last_one(unnormalized, tmp_path):
    sparse, folder, scales = unnormalized
    main([str(folder), str(tmp_path / "out"), "--expert", "5", "--scale", str(scales)])  # and verifies
    dense = AutoModel.from_pretrained(tmp_path / "out")
    for tower, layers in SCALES.items():
        for layer, scale in layers.items():
            experts = sparse.get_submodule(f"{tower}_model.encoder.layers.{layer}.mlp.experts")
            ffn = dense.get_submodule(f"{tower}_model.encoder.layers.{layer}.mlp")
            assert torch.equal(ffn.fc2.weight, experts.down_proj[5] * scale)
            assert torch.equal(ffn.fc2.bias, experts.down_proj_bias[5] * scale)
            assert torch.equal(ffn.fc1.weight, experts.up_proj[5]) and torch.equal(
                ffn.fc1.bias, experts.up_proj_bias[5]
            )
    with pytest.raises(ValueError, match="does not compute what the source does"):
        verify(folder, tmp_path / "out", 5, 1.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scales_in_half_precision(unnormalized, dtype, tmp_path):
    sparse, _, _ = unnormalized
    sparse.to(dtype).save_pretrained(tmp_path / "half")
    main([str(tmp_path / "half"), str(tmp_path / "out"), "--expert", "2", "--scale", "0.31"])
    assert AutoModel.from_pretrained(tmp_path / "out", dtype="auto").dtype == dtype


def test_one_tower_may_need_a_scale(unnormalized, tmp_path):
    sparse, _, _ = unnormalized
    sparse.config.text_config.norm_topk_prob = True
    sparse.save_pretrained(tmp_path / "mixed")
    dense = extract(sparse, 2, {"vision": SCALES["vision"]})
    text, vision = (tower.encoder.layers[3].mlp for tower in (dense.text_model, dense.vision_model))
    assert torch.equal(text.fc2.weight, sparse.text_model.encoder.layers[3].mlp.experts.down_proj[2])
    assert torch.equal(vision.fc2.weight, sparse.vision_model.encoder.layers[3].mlp.experts.down_proj[2] * 0.6)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "text tower: give --scale experts.json, which `python -m evaluation.experts` makes of this model"),
        ("", "Is a directory"),
        ("{", "holds no scales: make it again"),
        ("[]", "holds no scales: make it again"),
        ('{"scales": {}}', "holds no scales: make it again"),
        ('{"weights": "FINGERPRINT", "scales": {"text": [1]}}', "holds no scales: make it again"),
        ('{"weights": "FINGERPRINT", "scales": {"text": {"1": "x"}}}', "holds no scales: make it again"),
        ('{"weights": "FINGERPRINT", "scales": {"text": {"1": NaN}}}', "must be a number above 0, not nan"),
        ('{"weights": "FINGERPRINT", "scales": {"text": {"1": 0.3}}}', "no scale for layer 3 of the text tower"),
        ('{"weights": "FINGERPRINT", "scales": {"text": {"1": 0}}}', "layer 1 of the text tower must be a number"),
        ('{"weights": "another", "scales": {}}', "was made of another model than"),
    ],
)  # fmt: skip
def test_bad_scales_end_in_one_line(unnormalized, content, message, tmp_path):
    _, folder, scales = unnormalized
    arguments = [str(folder), str(tmp_path / "out"), "--expert", "2"]
    if content is not None:
        scales.write_text(content.replace("FINGERPRINT", weights_fingerprint(str(folder))))
        arguments += ["--scale", str(scales if content else tmp_path)]
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert str(stop.value).startswith("error: ") and message in str(stop.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number", ["0", "-1", "nan", "inf"])
def test_bad_numbers_as_scale(unnormalized, number, tmp_path):
    with pytest.raises(SystemExit, match="must be a number above 0, not"):
        main([str(unnormalized[1]), str(tmp_path / "out"), "--expert", "2", f"--scale={number}"])


def test_keeps_the_sources_dtype(tmp_path):
    upcycle(tiny_clip().half(), PRESETS["clip_moe"]).save_pretrained(tmp_path / "sparse")
    main([str(tmp_path / "sparse"), str(tmp_path / "out"), "--expert", "0"])
    back = AutoModel.from_pretrained(tmp_path / "out", dtype="auto")
    assert back.dtype == torch.float16 and differing_keys(back, tiny_clip().half()) == set()


def test_as_a_program(sparse, tmp_path):
    sparse.save_pretrained(tmp_path / "sparse")
    command = [sys.executable, "-m", "conversion.dense", tmp_path / "sparse", tmp_path / "out", "--expert", "1"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert differing_keys(CLIPModel.from_pretrained(tmp_path / "out"), extract(sparse, 1)) == set()


def test_bad_choices_and_sources(sparse, tmp_path, capsys):
    with pytest.raises(ValueError, match="there is no expert -1, only 0 to 3"):
        extract(sparse, -1)
    with pytest.raises(ValueError, match="no base FFN, since fusion_gate is False"):
        extract(upcycle(tiny_clip(), PRESETS["clip_moe"]), "base")
    with pytest.raises(ValueError, match="no sparse layer"):
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        extract(CLIPMoEModel(CLIPMoEConfig(text_config=sizes, vision_config=sizes)), 0)
    tiny_clip().save_pretrained(tmp_path / "dense")
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path / "dense"), str(tmp_path / "out"), "--expert", "0"])
    assert "it is dense: conversion.upcycle makes it sparse" in str(stop.value)
    sparse.save_pretrained(tmp_path / "sparse")
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path / "sparse"), str(tmp_path / "out"), "--expert", "4"])
    assert str(stop.value) == "error: text_config: there is no expert 4, only 0 to 3"
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path / "sparse"), str(tmp_path / "out"), "--expert", "first"])
    assert stop.value.code == 2 and "'first' is neither a number nor 'base'" in capsys.readouterr().err
