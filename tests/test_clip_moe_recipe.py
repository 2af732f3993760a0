"""CLIP-MoE's recipe run whole on models of a few thousand parameters: what moves, how it resumes, in how many parts."""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file as load_arrays
from safetensors.torch import load_file, save_file
from tiny_recipes import tiny_run
from tiny_runs import as_made_before, stored
from transformers import AutoModel, AutoProcessor

from data.contact_sheet import contact_sheet
from data.identity import data_fingerprint
from data.pairs import load_pairs
from training import runner
from training.feature_clusters import load_feature_clusters
from training.loader import PairLoader
from training.recipe import load_recipe

ROOT = Path(__file__).parents[1]
NAMES = "dense features_0 clusters_1 expert_1 features_1 clusters_2 expert_2 unified clip_moe".split()
MODELS = ["dense", "expert_1", "expert_2", "unified", "clip_moe"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return tiny_run("clip_moe", tmp_path_factory)


@pytest.fixture(scope="module")
def whole(run):
    """The finished recipe, run at once; tests only read it."""
    return run("whole")


def weights(folder):
    return load_file(folder / "model.safetensors")


def same_files(first, second):
    """Whether the stages of two runs hold the same bits."""
    for name in NAMES:
        for path in (first / name).glob("*.safetensors"):
            expected, found = load_file(path), load_file(second / name / path.name)
            if expected.keys() != found.keys() or not all(torch.equal(expected[key], found[key]) for key in expected):
                return False
    return True


def same_features(first, second):
    folders = (first / "features_0", second / "features_0")
    return all(np.array_equal(*(stored(folder, name) for folder in folders)) for name in ("image", "text"))


def start(run, output):
    command = [sys.executable, "-m", "training.upcycle", "--config", str(run.folder / "recipe.yaml")]
    return subprocess.Popen(
        [*command, "--output-dir", str(run.folder / output)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def test_all_stages_are_there(whole):
    assert {path.name for path in whole.iterdir()} == {*NAMES, "recipe.yaml"}
    model = AutoModel.from_pretrained(whole / "clip_moe")
    assert model.config.vision_config.num_experts == 3
    assert not list(whole.glob("*/checkpoints"))


def test_sheets_show_the_clusters_of_a_stage_and_of_all_so_far(whole, tmp_path):
    pairs = load_pairs(load_recipe(whole / "recipe.yaml").stages[1].data)
    clusters = load_feature_clusters(whole / "clusters_2", data_fingerprint(pairs))
    image, text = np.divmod(clusters.tuples[clusters.labels, 1], 2)
    titles = {
        "clusters.png": [f"image {i}, text {t}" for i, t in zip(image, text, strict=True)],
        "accumulated_clusters.png": [f"cluster {label}" for label in clusters.labels],
    }
    for name, of_samples in titles.items():
        contact_sheet(tmp_path / name, pairs, np.array(of_samples), None, seed=0)
        assert (whole / "clusters_2" / name).read_bytes() == (tmp_path / name).read_bytes()


def test_only_ffns_move_in_mcl(whole):
    for before, after in (("dense", "expert_1"), ("expert_1", "expert_2")):
        old, new = weights(whole / before), weights(whole / after)
        assert old.keys() == new.keys()
        moved = {name for name in old if not torch.equal(old[name], new[name])}
        assert moved == {name for name in old if re.search(r"\.layers\.\d+\.mlp\.fc[12]\.(weight|bias)$", name)}
        assert len(moved) == 16


def test_only_routers_move_in_router_training(whole):
    old, new = weights(whole / "unified"), weights(whole / "clip_moe")
    moved = {name for name in old if not torch.equal(old[name], new[name])}
    assert moved == {name for name in old if name.endswith(".mlp.router.weight")}
    assert len(moved) == 4


def test_experts_are_the_ffns_of_the_stages(whole):
    experts = weights(whole / "clip_moe")
    for number, name in enumerate(("dense", "expert_1", "expert_2")):
        dense = weights(whole / name)
        for tower in ("text_model", "vision_model"):
            for layer in range(2):
                ffn = f"{tower}.encoder.layers.{layer}.mlp"
                assert torch.equal(experts[f"{ffn}.experts.up_proj"][number], dense[f"{ffn}.fc1.weight"])
                assert torch.equal(experts[f"{ffn}.experts.down_proj_bias"][number], dense[f"{ffn}.fc2.bias"])


def test_features_and_labels(whole, run):
    data = load_recipe(run.folder / "recipe.yaml").stages[1].data
    rows = load_pairs(data)
    features = {name: stored(whole / "features_0", name) for name in ("image", "text")}
    for array in features.values():
        assert array.shape == (90, 16)
        np.testing.assert_allclose(np.linalg.norm(array, axis=1), 1, atol=1e-5)
    model = AutoModel.from_pretrained(whole / "dense")
    processor = AutoProcessor.from_pretrained(whole / "dense")
    for index in (0, 57, 89):  # the dense model's own embedding of that row
        row = rows[index]
        inputs = processor(text=[row["caption"]], images=[row["image"]], return_tensors="pt", truncation=True)
        with torch.no_grad():
            outputs = model(**inputs)
        np.testing.assert_allclose(features["image"][index], outputs.image_embeds[0], atol=1e-5)
        np.testing.assert_allclose(features["text"][index], outputs.text_embeds[0], atol=1e-5)
    first = load_feature_clusters(whole / "clusters_1", data_fingerprint(rows))
    second = load_feature_clusters(whole / "clusters_2", data_fingerprint(rows))
    assert (second.tuples[second.labels][:, :1] == first.tuples[first.labels]).all()
    assert set(second.tuples[:, 1]) <= set(range(4)) and len(second.tuples) > len(first.tuples)


def test_unused_samples_are_reported_before_training(run, whole, capsys):
    sizes = np.bincount(load_arrays(whole / "clusters_1" / "clusters.safetensors")["labels"])
    unused = 90 - sum(size // 8 * 8 for size in sizes.tolist())
    shutil.copytree(whole, run.folder / "reported")
    shutil.rmtree(run.folder / "reported" / "expert_1")
    run("reported", {"expert_1.small_clusters": "drop"}, only=["expert_1"])
    printed = capsys.readouterr().out
    small = (sizes < 8).sum()
    expected = (
        f"small_clusters: drop (chosen), {small} of them smaller than a batch; batches of one cluster leave {unused}"
    )
    assert f"{expected} of 90 samples" in printed
    assert "small_clusters: merge, 0 of them" in printed
    assert printed.index("unused in an epoch") < printed.index("6 steps of 8 pairs")


@pytest.mark.slow
def test_killed_inside_stages(run, whole):
    """SIGKILL while an expert and while the routers train, after their first checkpoint: they go on from there, and end
    in the same bits."""
    output = run.folder / "killed"
    for name in ("expert_1", "clip_moe"):
        checkpoint = output / f"{name}.partial" / "checkpoints" / "step-00000002"
        process = start(run, "killed")
        while process.poll() is None and not checkpoint.exists():
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "it finished before it was killed"
        assert checkpoint.parent.is_dir() and not (output / name).exists()
        first = (output / f"{name}.partial" / "log.jsonl").read_text().splitlines()[:2]
        run("killed", only=[name])
        assert (output / name / "log.jsonl").read_text().splitlines()[:2] == first  # with the speed of that run
    run("killed")
    assert same_files(whole, output)


@pytest.mark.parametrize("place", ["before the rename", "while checkpoints are deleted"])
def test_stopped_at_the_end_of_a_stage(run, whole, monkeypatch, place):
    """All is written but not renamed, or renamed and half cleaned up: nothing is lost or repeated."""
    output = run.folder / place
    shutil.copytree(whole, output)
    shutil.rmtree(output / "expert_2")
    count = itertools.count()

    replace, rmtree = os.replace, shutil.rmtree

    def stop_before_rename(old, new):
        if Path(new) == output / "expert_2":
            raise KeyboardInterrupt
        replace(old, new)

    def stop_in_between(folder, **options):
        if Path(folder) == output / "expert_2" / "checkpoints":
            next(Path(folder).iterdir()).rename(output / "half")
            raise KeyboardInterrupt
        rmtree(folder, **options)

    with monkeypatch.context() as patch:
        if place == "before the rename":
            patch.setattr(runner.os, "replace", stop_before_rename)
        else:
            patch.setattr(runner.shutil, "rmtree", stop_in_between)
        with pytest.raises(KeyboardInterrupt):
            run(place, only=["expert_2"])
    step = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *args: next(count) and None or step(*args))
    run(place, only=["expert_2"])
    assert next(count) == (2 if place == "before the rename" else 0)  # from the checkpoint of step 4, and not at all
    assert not (output / "expert_2" / "checkpoints").exists()
    shutil.rmtree(output / "half", ignore_errors=True)
    assert same_files(whole, output)


@pytest.mark.parametrize("last", range(1, len(NAMES)))
@pytest.mark.slow
def test_started_again_at_every_boundary(run, whole, last, monkeypatch):
    """A run that ends right after stage number `last` goes on with the next one and repeats none."""
    output = run.folder / f"boundary_{last}"

    class Stop(Exception):
        pass

    made = []
    original = runner.Runner.run_stage

    def stop_after(run_, stage):
        original(run_, stage)
        made.append(stage.name)
        if len(made) == last:
            raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(runner.Runner, "run_stage", stop_after)
        with pytest.raises(Stop):
            run(output.name)
    assert made == NAMES[:last]
    written = {name: (output / name).stat().st_mtime_ns for name in made}
    run(output.name)
    assert {name: (output / name).stat().st_mtime_ns for name in made} == written
    assert same_files(whole, output)


def test_interrupted_embedding_keeps_its_parts(run, whole, monkeypatch):
    output = run.folder / "parts"
    run("parts", only=["dense"])
    calls = []
    original = PairLoader.in_order

    def in_order(loader, start, stop):
        calls.append(start)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(loader, start, stop)

    with monkeypatch.context() as patch:
        patch.setattr(PairLoader, "in_order", in_order)
        with pytest.raises(KeyboardInterrupt):
            run("parts", only=["features_0"])
    assert calls == [0, 32, 64] and not (output / "features_0").exists()
    resumed = []
    monkeypatch.setattr(PairLoader, "in_order", lambda *args: resumed.append(args[1]) or original(*args))
    run("parts", only=["features_0"])
    assert resumed == [64]
    assert same_features(whole, output)


def test_experts_in_separate_runs(run, whole):
    with pytest.raises(ValueError, match="the stage 'expert_1' has not finished"):
        run("separate", experts=[2])
    output = run("separate", experts=[1])
    stages_done = {path.parent.name for path in output.glob("*/manifest.json") if path.parent.suffix != ".partial"}
    assert stages_done == {"dense", "features_0", "clusters_1", "expert_1"}
    with pytest.raises(ValueError, match="the stage 'expert_2' has not finished"):
        run("separate", only=["unified"])
    with pytest.raises(ValueError, match=r"trains no expert \[7\]; its experts are \[1, 2\]"):
        run("separate", experts=[7])
    run("separate", experts=[2])
    assert not (output / "unified").exists()
    run("separate")
    assert same_files(whole, output)


def test_experts_that_start_from_the_base(run, whole):
    """The released code's way: every stage trains the base's FFNs."""
    output = run.folder / "from_base"
    shutil.copytree(whole, output)
    for name in ("expert_2", "unified", "clip_moe"):
        shutil.rmtree(output / name)
    run("from_base", {"expert_2.model": "dense"}, only=["expert_2", "unified"])
    assert not torch.equal(
        weights(output / "expert_2")["text_model.encoder.layers.0.mlp.fc1.weight"],
        weights(whole / "expert_2")["text_model.encoder.layers.0.mlp.fc1.weight"],
    )


@pytest.mark.slow
def test_two_processes_end_in_the_same_model(run, whole):
    command = [str(Path(sys.executable).with_name("accelerate")), "launch", "--cpu", "--num_processes", "2"]
    command += ["training/upcycle.py", "--config", str(run.folder / "recipe.yaml")]
    command += ["--output-dir", str(run.folder / "two")]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    two = run.folder / "two"
    assert same_features(whole, two)  # to the bit
    for name in ("clusters_1", "clusters_2"):
        first, second = (load_arrays(f / name / "clusters.safetensors")["labels"] for f in (whole, two))
        assert (first == second).all()
    for name in MODELS:
        torch.testing.assert_close(weights(two / name), weights(whole / name), atol=1e-4, rtol=0)
    log = [json.loads(line)["loss"] for line in (two / "clip_moe" / "log.jsonl").read_text().splitlines()]
    expected = [json.loads(line)["loss"] for line in (whole / "clip_moe" / "log.jsonl").read_text().splitlines()]
    torch.testing.assert_close(log, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("overrides", "only", "message"),
    [
        ({"clusters_1.num_image_clusters": 91}, "clusters_1", "90 samples cannot make 91 clusters: ask for fewer"),
        ({"expert_1.data.num_samples": 80}, "expert_1", "clusters_1 is of other data: the number of pairs is 90"),
        ({"expert_1.data.seed": 1}, "expert_1", "clusters_1 is of other data: seed is 0 there"),
        (
            {"expert_1.global_batch_size": 90, "expert_1.small_clusters": "drop"},
            "expert_1",
            "none of the . clusters fills a global batch of 90",
        ),
        ({"clusters_1.features": "dense"}, "clusters_1", "dense is a stage of type initialize, not embed"),
        ({"expert_1.clusters": "features_0"}, "expert_1", "features_0 is a stage of type embed, not cluster"),
        ({"unified.experts": ["expert_1", "clip_moe"]}, "unified", "unified.experts.1: clip_moe is a later stage"),
        ({"unified.changes": {"experts": 2}}, "unified", "a preset has no experts"),
        ({"unified.changes": {"num_experts": 2}}, "unified", "a preset has no num_experts to change"),
        (
            {"unified.changes": {"sparse_layers": [9]}},
            "unified",
            "sparse_layers of the text tower has 9, but that tower has",
        ),
        (
            {"expert_1.max_steps": None, "expert_1.num_epochs": 1, "expert_1.gradient_accumulation_steps": 10}
            | {"expert_1.global_batch_size": 90},
            "expert_1",
            "an epoch of . batches has no step of 10 accumulation steps",
        ),
        ({"clip_moe.balance_top_k": 4}, "clip_moe", "clip_moe.balance_top_k: 4 of 3 experts"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_mistakes(run, whole, tmp_path, overrides, only, message):
    shutil.copytree(whole, tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / only)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run("mistakes", {**overrides, "output_dir": str(tmp_path / "out")}, only=[only])
    assert not (tmp_path / "out" / only).exists()


def test_an_expert_of_another_base_is_refused(run, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "unified")
    tensors = weights(tmp_path / "out" / "expert_2")
    name = "vision_model.encoder.layers.1.self_attn.q_proj.weight"
    tensors[name][0, 0] += 1e-4
    save_file(tensors, tmp_path / "out" / "expert_2" / "model.safetensors", {"format": "pt"})
    as_made_before(tmp_path / "out" / "expert_2")
    with pytest.raises(ValueError, match=f"expert 2 was not trained from this base.*{re.escape(name)}"):
        run("x", {"output_dir": str(tmp_path / "out")}, only=["unified"])


def test_a_base_in_half_precision(run, whole, tmp_path):
    """Experts train in float32; the sparse model keeps it."""
    output = tmp_path / "out"
    shutil.copytree(whole, output)
    for name in ("expert_1", "unified"):
        shutil.rmtree(output / name)
    AutoModel.from_pretrained(output / "dense", dtype=torch.float16).save_pretrained(output / "dense")
    as_made_before(output / "dense")
    run("x", {"output_dir": str(output), "unified.experts": ["expert_1"]}, only=["expert_1", "unified"])
    tensors = weights(output / "unified")
    ffn = "text_model.encoder.layers.0.mlp"
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert torch.equal(tensors[f"{ffn}.experts.up_proj"][1], weights(output / "expert_1")[f"{ffn}.fc1.weight"])


def test_features_that_are_not_finite(run, whole, tmp_path):
    """Of weights that are: their products are too large."""
    shutil.copytree(whole, tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "features_1")
    tensors = weights(tmp_path / "out" / "expert_1")
    tensors["visual_projection.weight"][:] = 3e38
    save_file(tensors, tmp_path / "out" / "expert_1" / "model.safetensors", {"format": "pt"})
    as_made_before(tmp_path / "out" / "expert_1")
    with pytest.raises(ValueError, match="32 image features of the pairs from 0 on are not finite"):
        run("x", {"output_dir": str(tmp_path / "out")}, only=["features_1"])
