"""conversion/dense.py: what went into a sparse model comes out again."""

import os
import subprocess
import sys

import pytest
import torch
from test_upcycle import processor, tiny_clip
from transformers import AutoModel, AutoProcessor, CLIPModel

from conversion.dense import extract, main, verify
from conversion.upcycle import PRESETS, upcycle
from modeling_clip_moe import CLIPMoEConfig, CLIPMoEModel

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
    back = extract(upcycle(dense, PRESETS[name]), expert)
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


def test_verification_does_without_capacity_and_unequal_weights(tmp_path):
    sparse = upcycle(tiny_clip(), PRESETS["clip_up"])
    sparse.config.text_config.eval_capacity_factor = sparse.config.vision_config.eval_capacity_factor = 0.5
    sparse.save_pretrained(tmp_path / "sparse")
    main([str(tmp_path / "sparse"), str(tmp_path / "out"), "--expert", "5"])


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
    assert (tmp_path / "out" / "model.safetensors").is_file()


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
