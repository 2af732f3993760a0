"""The stage `dense`: an expert of a sparse model as a stage of a recipe."""

import json

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tiny_clip import processor, tiny_clip

from records.provenance import weights_fingerprint
from training.recipe import load_recipe
from training.runner import run_recipe


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the upcycling of a tiny CLIP, and one expert of that; returns the folders of both dense models."""
    monkeypatch.chdir(tmp_path)
    tiny_clip().save_pretrained("tiny")
    processor().save_pretrained("tiny")

    def run(preset, only=None, **settings):
        stages = [
            {"name": "sparse", "stage": "upcycle", "model": "tiny", "preset": preset},
            {"name": "expert", "stage": "dense", "model": "sparse", **settings},
        ]
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"output_dir": "out", "stages": stages}))
        run_recipe(load_recipe("recipe.yaml"), only)
        return tmp_path / "tiny", tmp_path / "out/expert"

    return run


def weights(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(("preset", "settings"), [("clip_moe", {"take": 1}), ("clip_fmoe", {"take": "base"})])
def test_gives_back_the_model_that_was_upcycled(run, preset, settings):
    before, after = map(weights, run(preset, **settings))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_scales_of_an_analysis_reach_the_last_layer(run, tmp_path):
    run("clip_up", only=["sparse"], take=0, scale=1.0)
    (tmp_path / "scales").mkdir()
    scales = {"text": {"1": 0.5, "3": 0.25}, "vision": {"1": 2.0, "3": 1.0}}
    analysis = {"weights": weights_fingerprint("out/sparse"), "scales": scales}
    (tmp_path / "scales/experts.json").write_text(json.dumps(analysis))
    (tmp_path / "scales/manifest.json").write_text(json.dumps({"stage": {"stage": "analyze"}}))  # as of another run
    before, after = map(weights, run("clip_up", take=5, scale="scales"))
    for tower, layers in scales.items():
        for layer, scale in layers.items():
            name = f"{tower}_model.encoder.layers.{layer}.mlp.fc2.weight"
            assert torch.equal(after[name], before[name] * scale)
