"""CLIP-FMoE's recipe run whole on models of a few thousand parameters: what moves, kept hidden states, mistakes."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import load_from_disk
from safetensors.numpy import load_file as load_arrays
from safetensors.torch import load_file, save_file
from tiny_recipes import tiny_run
from tiny_runs import as_made_before, losses, stored
from transformers import AutoModel, AutoProcessor, CLIPModel

from conversion.checkpoints import model_outputs, sample_inputs
from conversion.presets import PRESETS
from conversion.processors import copy_processor
from conversion.upcycle import upcycle
from training.engine import checkpoint_layers
from training.feature_clusters import FeatureClusters
from training.features import HiddenStates
from training.loader import PairLoader
from training.optimizers import set_trainable
from training.recipe import load_recipe

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return tiny_run("clip_fmoe", tmp_path_factory)


@pytest.fixture(scope="module")
def whole(run):
    """The finished recipe, run at once; tests only read it."""
    return run("whole")


def weights(folder):
    return load_file(folder / "model.safetensors")


def moved(before, after):
    return {name for name in before if not torch.equal(before[name], after[name])}


def test_fused_models_start_as_the_dense_one(whole):
    dense, fused = (AutoModel.from_pretrained(whole / name) for name in ("dense", "fused"))
    inputs = sample_inputs(dense.config)
    found = model_outputs(fused, inputs)
    assert all(torch.equal(found[name], expected) for name, expected in model_outputs(dense, inputs).items())


def test_only_copies_and_gates_move_in_stage_1_and_only_routers_and_gates_in_stage_2(whole):
    fused = weights(whole / "fused")
    for name in ("expert_1", "expert_2"):
        names = moved(fused, weights(whole / name))
        assert names == {name for name in fused if re.search(r"layers\.3\.mlp\.(experts|fusion_gate)\.", name)}
        assert len(names) == 2 * (4 + 1)
    unified = weights(whole / "unified")
    names = moved(unified, weights(whole / "clip_fmoe"))
    assert names == {name for name in unified if re.search(r"layers\.3\.mlp\.(router|fusion_gate)\.", name)}
    assert len(names) == 2 * (1 + 1)


def test_every_expert_has_its_own_cluster(whole):
    arrays = load_arrays(whole / "sub_clusters" / "clusters.safetensors")
    first_level = load_arrays(whole / "clusters" / "clusters.safetensors")["labels"]
    assert (arrays["tuples"][arrays["labels"], 0] == first_level).all()
    assert arrays["tuples"].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    for number, name in enumerate(("expert_1", "expert_2")):
        stage = next(s for s in load_recipe(whole / "recipe.yaml").stages if s.name == name)
        clusters = FeatureClusters(**arrays)
        labels = stage.labels(clusters, 8, Accelerator(cpu=True))
        assert ((labels >= 0) == (first_level == number)).all()
    steps = [len(losses(whole / name)) for name in ("expert_1", "expert_2")]
    sizes = np.bincount(arrays["labels"])
    assert steps == [2 * sum(size // 8 for size in sizes[:2]), 2 * sum(size // 8 for size in sizes[2:])]


def test_clusters_of_captions_are_those_of_the_loss(run, whole, tmp_path):
    """Text features are the captions' mean, weighted as the loss weighs them, not the raw caption's."""
    shutil.copytree(whole, tmp_path / "out")
    rows = load_from_disk(whole / "captions")
    model, processor = (kind.from_pretrained(whole / "dense") for kind in (AutoModel, AutoProcessor))
    found = {name: stored(whole / "features", name) for name in ("image", "text")}
    shutil.rmtree(tmp_path / "out" / "features")
    run("x", {"output_dir": str(tmp_path / "out"), "features.caption_weights": None}, only=["features"])
    raw = {name: stored(tmp_path / "out" / "features", name) for name in ("image", "text")}
    assert np.array_equal(found["image"], raw["image"])
    missing = 0
    for row, feature, of_raw in zip(rows, found["text"], raw["text"], strict=True):
        there = [caption for caption in row["caption"] if caption]
        missing += len(there) < 3
        texts = model.get_text_features(**processor.tokenizer(there, padding=True, return_tensors="pt")).pooler_output
        texts = torch.nn.functional.normalize(texts.detach(), dim=-1)
        mean = sum(weight * text for weight, text in zip((0.1, 0.6, 0.3), texts, strict=False))
        np.testing.assert_allclose(feature, torch.nn.functional.normalize(mean, dim=0), atol=1e-5)
        np.testing.assert_allclose(of_raw, texts[0], atol=1e-5)
    assert 0 < missing < len(rows)


def test_captions_are_stored_with_the_dataset(whole):
    rows = load_from_disk(whole / "captions")
    assert len(rows) == 120 and {len(captions) for captions in rows["caption"]} == {3}


def test_kept_hidden_states_change_no_loss(run, whole):
    output = run.folder / "without"
    shutil.copytree(whole, output)
    for name in ("expert_1", "expert_2", "unified", "clip_fmoe"):
        shutil.rmtree(output / name)
    run("without", {"defaults.train.hidden_states": None}, only=["expert_1", "expert_2", "unified", "clip_fmoe"])
    for name in ("expert_1", "expert_2", "clip_fmoe"):
        torch.testing.assert_close(losses(output / name), losses(whole / name), atol=1e-5, rtol=0)
        torch.testing.assert_close(weights(output / name), weights(whole / name), atol=1e-4, rtol=0)


def test_kept_hidden_states_are_what_is_trained_on(run, whole):
    """Other states give other losses; no image is read, and no layer below is computed."""
    output = run.folder / "altered"
    shutil.copytree(whole, output)
    shutil.rmtree(output / "expert_1")
    for path in (output / "states").glob("*.safetensors"):
        tensors = load_file(path)
        save_file({**tensors, "vision": tensors["vision"].roll(1, 0)}, path)
    run("altered", only=["expert_1"])
    assert losses(output / "expert_1")[0] != pytest.approx(losses(whole / "expert_1")[0], abs=1e-3)


def test_layers_below_are_skipped(run, whole):
    model = AutoModel.from_pretrained(whole / "fused")
    stage = load_recipe(run.folder / "recipe.yaml", {"output_dir": str(whole)}).stages[7]
    rows = load_from_disk(whole / "captions")
    loader = PairLoader(
        rows,
        AutoProcessor.from_pretrained(whole / "dense"),
        stage.data,
        4,
        caption_weights=stage.caption_weights,
        hidden_states=HiddenStates(whole / "states", model, fingerprint_of(whole), 3),
    )
    batch = next(loader.in_order(30, 34))  # across the border of two parts
    assert "pixel_values" not in batch
    whole_batch = next(
        PairLoader(
            rows,
            AutoProcessor.from_pretrained(whole / "dense"),
            stage.data,
            4,
            caption_weights=stage.caption_weights,
        ).in_order(30, 34)
    )
    called = []
    for tower in (model.text_model, model.vision_model):
        for number, layer in enumerate(tower.encoder.layers):
            layer.register_forward_pre_hook(lambda *_, number=number: called.append(number))
    mask, expected_mask = batch.pop("caption_mask"), whole_batch.pop("caption_mask")
    assert torch.equal(mask, expected_mask)
    with torch.no_grad():
        found = model(**batch)
        assert called == [3, 3]
        expected = model(**whole_batch)
    torch.testing.assert_close(found.image_embeds, expected.image_embeds, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found.text_embeds, expected.text_embeds, atol=1e-6, rtol=1e-5)


def fingerprint_of(folder):
    return json.loads((folder / "states" / "index.json").read_text())["dataset_fingerprint"]


def test_hidden_states_go_on_where_they_stopped(run, whole, monkeypatch):
    output = run.folder / "states_again"
    shutil.copytree(whole, output)
    shutil.rmtree(output / "states")
    original, calls = PairLoader.in_order, []

    def in_order(loader, start, stop):
        calls.append(start)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(loader, start, stop)

    with monkeypatch.context() as patch:
        patch.setattr(PairLoader, "in_order", in_order)
        with pytest.raises(KeyboardInterrupt):
            run("states_again", only=["states"])
    done = sum(path.stat().st_size for path in (output / "states.partial").glob("*.safetensors"))
    size = sum(path.stat().st_size for path in (whole / "states").glob("*.safetensors"))
    usage = shutil.disk_usage(output)
    with monkeypatch.context() as patch:  # a disk with room for the rest, but not for all
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=size - done))
        run("states_again", only=["states"])
    for path in (whole / "states").glob("*.safetensors"):
        first, second = load_file(path), load_file(output / "states" / path.name)
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_size_is_announced_before_it_is_written(run, whole, capsys):
    shutil.copytree(whole, run.folder / "announced")
    shutil.rmtree(run.folder / "announced" / "states")
    run("announced", only=["states"])
    files = list((run.folder / "announced" / "states").glob("*.safetensors"))
    arrays = [load_file(file) for file in files]
    size = sum(array[name].numel() * 4 for array in arrays for name in ("vision", "text"))
    tokens = sum(len(array["text"]) for array in arrays)
    assert f"of 120 images and {tokens} text tokens take {size / 1e6:,.2f} MB in" in capsys.readouterr().out
    assert len(files) == 5  # of 8 batches of 3


def test_no_backward_below_the_first_trainable_layer(whole):
    model = AutoModel.from_pretrained(whole / "fused").train()
    set_trainable(model, r"\.(experts|fusion_gate)\.")
    checkpoint_layers(model)
    inputs = []
    hooks = [
        tower.encoder.layers[number].register_forward_pre_hook(lambda _, args: inputs.append(args[0].requires_grad))
        for tower in (model.text_model, model.vision_model)
        for number in range(4)
    ]
    model(**sample_inputs(model.config)).logits_per_image.sum().backward()
    assert len(hooks) == 8 and len(inputs) >= 8 and not any(inputs)


def test_experts_in_separate_runs(run, whole):
    run("separate", experts=[2])
    assert not (run.folder / "separate" / "expert_1").exists()
    run("separate", experts=[1])
    assert not (run.folder / "separate" / "unified").exists()
    run("separate")
    for name in ("expert_1", "expert_2", "clip_fmoe"):
        first, second = weights(whole / name), weights(run.folder / "separate" / name)
        assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.slow
def test_two_processes_end_in_the_same_model(run, whole):
    command = [str(Path(sys.executable).with_name("accelerate")), "launch", "--cpu", "--num_processes", "2"]
    command += ["training/upcycle.py", "--config", str(run.folder / "recipe.yaml")]
    command += ["--output-dir", str(run.folder / "two")]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("expert_1", "expert_2", "unified", "clip_fmoe"):
        torch.testing.assert_close(weights(run.folder / "two" / name), weights(whole / name), atol=1e-4, rtol=0)
        if name != "unified":
            torch.testing.assert_close(losses(run.folder / "two" / name), losses(whole / name), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("overrides", "only", "message"),
    [
        ({"expert_1.cluster": 5}, "expert_1", r"there is no cluster 5: those of sub_clusters are 0 to 1"),
        ({"expert_1.global_batch_size": 80}, "expert_1", r"none of the 2 clusters .* largest has \d+ samples"),
        ({"expert_1.trainable": r"layers\.2\.mlp"}, "expert_1", r"but text_model\.encoder\.layers\.2\.mlp.* train"),
        ({"expert_1.hidden_states": "features"}, "expert_1", "features is a stage of type embed, not hidden_states"),
        ({"expert_1.caption_weights": [0.5, 0.5]}, "expert_1", "states is of 3 captions of an image, not of 2"),
        (
            {"expert_1.caption_weights": [0.5, 0.5], "expert_1.hidden_states": None},
            "expert_1",
            "2 weights, but the images of captions have 3 captions",
        ),
        ({"expert_1.caption_weights": None}, "expert_1", "states is of 3 captions of an image, not of 1"),
        ({"sub_clusters.num_image_clusters": 99}, "sub_clusters", "samples each cannot make 99 clusters"),
        ({"captions.captions": [{"policy": "full", "column": "alt"}]}, "captions", "has no column 'alt'"),
        ({"unified.experts": ["expert_1"], "unified.changes": {"num_experts_per_tok": 2}}, "unified", "per_tok"),
        ({"unified.experts": ["expert_1", "dense"]}, "unified", "a model of type 'clip_moe' is needed"),
        ({"unified.changes": {"norm_topk_prob": False}}, "unified", "sparse already, which settles norm_topk_prob"),
        ({"unified.towers": ["vision"]}, "unified", "sparse already, which settles towers"),
        ({"unified.changes": {"fusion_gate": False}}, "unified", "trained with fusion gates, which cannot be left out"),
        ({"states.caption_weights": None}, "states", "need caption_weights where images have several captions"),
        ({"states.model": "towers"}, "states", "text_model has no sparse layer, so no layers below it"),
        (
            {"expert_1.model": "dense", "expert_1.trainable": "fc1"},
            "expert_1",
            "expert_1.hidden_states: they go with a sparse model, but dense is dense",
        ),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_mistakes(run, whole, tmp_path, overrides, only, message):
    shutil.copytree(whole, tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / only)
    if overrides.get("states.model") == "towers":
        dense = CLIPModel.from_pretrained(whole / "dense")
        overrides = {"states.model": str(tmp_path / "towers")}
        upcycle(dense, PRESETS["clip_fmoe"], ["vision"]).save_pretrained(tmp_path / "towers")
        copy_processor(whole / "dense", tmp_path / "towers")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run("mistakes", {**overrides, "output_dir": str(tmp_path / "out")}, only=[only])
    assert not (tmp_path / "out" / only).exists()


@pytest.mark.parametrize(
    ("value", "message"), [([0.5, 0.6], "sum to 1.1, not to 1"), ([-0.5, 1.5], "greater than or equal to 0")]
)
def test_weights_of_captions(run, value, message):
    with pytest.raises(ValueError, match=message):
        load_recipe(run.folder / "recipe.yaml", {"expert_1.caption_weights": value})


def test_hidden_states_of_other_weights_or_data(run, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "out")
    tensors = weights(whole / "fused")
    tensors["vision_model.encoder.layers.1.mlp.fc1.weight"][0, 0] += 1
    save_file(tensors, tmp_path / "out" / "fused" / "model.safetensors", {"format": "pt"})
    as_made_before(tmp_path / "out" / "fused")
    shutil.rmtree(tmp_path / "out" / "expert_1")
    with pytest.raises(ValueError, match="are of a model with other weights below the sparse layers"):
        run("x", {"output_dir": str(tmp_path / "out")}, only=["expert_1"])
    index = json.loads((tmp_path / "out" / "states" / "index.json").read_text())
    index["dataset_fingerprint"] = "another"
    (tmp_path / "out" / "states" / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="are of another dataset"):
        run("x", {"output_dir": str(tmp_path / "out")}, only=["expert_1"])


def test_a_full_disk_is_noticed_before(run, whole, tmp_path, monkeypatch):
    shutil.copytree(whole, tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "states")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(OSError, match=r"take 0\.[1-9]\d MB more, but only 0\.00 MB are free"):
        run("x", {"output_dir": str(tmp_path / "out")}, only=["states"])
