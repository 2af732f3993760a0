"""Recipes on models of a few thousand parameters, and what their runs leave."""

import contextlib
import copy
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from clip_moe.engine.provenance import Record, weights_fingerprint
from clip_moe.engine.recipe import load_recipe
from clip_moe.engine.runner import run_recipe
from clip_moe.evaluation.feature_store import FeatureStore
from clip_moe.training import loop

# What the first two stages of `recipe` make, once a process for all recipes that begin alike
BEGINNINGS = {}
ROOT = Path(__file__).parents[1]
TOWER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TOWERS = {
    "text_config": {**TOWER, "max_position_embeddings": 16},
    "vision_config": {**TOWER, "image_size": 32, "patch_size": 16},
}
DENSE = {"name": "dense", "stage": "initialize", "processor": "symbols", "projection_dim": 16, **TOWERS}
SPARSE = {"name": "sparse", "stage": "upcycle", "model": "dense", "preset": "clip_up", "changes": {"num_experts": 4}}
STEP = {"global_batch_size": 4, "max_steps": 1, "learning_rate": 1e-3}
TUNED = {"name": "tuned", "stage": "train", "model": "dense", **STEP}
WORDS = {"name": "words", "stage": "tokenizer", "vocab_size": 600, "max_length": 16}
HARBOR_CAPTIONS = [
    "A Surfboard leans on the harbour wall.",
    "two surfboards, a harbour and the café's bicycle",
    "The bicycle stands in the harbour at night",
    "an old bicycle beside surfboards",
]


def recipe(**training):
    """Initialize, upcycle, train."""
    data = {"source": "symbols", "num_samples": 40, "in_memory": True}
    settings = {"data": data, "global_batch_size": 8, "max_steps": 6, "learning_rate": 1e-2, "warmup_steps": 2}
    groups = {f"{tower}_config": {"capacity_group_size": 4} for tower in ("text", "vision")}
    stages = [DENSE, SPARSE | groups, {"name": "tuned", "stage": "train", "model": "sparse"}]
    defaults = {"train": settings | {"logging_steps": 1, "save_steps": 2} | training}
    return {"output_dir": "out", "defaults": defaults, "stages": copy.deepcopy(stages)}


def set_towers(**fields):
    """A change of the recipe: these fields in both towers of the sparse model."""
    return lambda recipe: [recipe["stages"][1][f"{tower}_config"].update(fields) for tower in ("text", "vision")]


def as_stage(name):
    """A change of the recipe: another class of the stage that trains."""
    return lambda recipe: recipe["stages"][2].update(stage=name)


def run_stages(folder, stages, overrides=None, **keys):
    """Runs stages below `folder / "out"`, with settings of theirs overridden by `STAGE.KEY`. Returns that folder.

    `keys` are further ones of the recipe."""
    folder.mkdir(exist_ok=True)
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({"output_dir": str(folder / "out"), "stages": stages, **keys}))
    return run_recipe(load_recipe(path, overrides))


def train(folder, stop=None, change=None, overrides=None, only=None, **training):
    """Runs `recipe` in a folder, perhaps only until so many steps of the optimizer are done. Returns the folder of the
    stage that trains, or what it left.

    Args:
        change: makes another recipe of it, in place.
        overrides, only: see `load_recipe` and `run_recipe`.
        training: settings of the stage that trains.
    """
    folder.mkdir(exist_ok=True)
    settings = recipe(**training)
    if change is not None:
        change(settings)
    path, output = folder / "recipe.yaml", folder / "out"
    path.write_text(yaml.safe_dump(settings | {"output_dir": str(output)}))
    loaded = load_recipe(path, overrides)
    if only != ["tuned"] and not output.exists():
        beginning = str((loaded.stages[:2], loaded.seed, loaded.mixed_precision))
        if beginning not in BEGINNINGS:
            made = tempfile.TemporaryDirectory()
            first = load_recipe(path, (overrides or {}) | {"output_dir": made.name})
            run_recipe(first, [stage.name for stage in first.stages[:2]])
            BEGINNINGS[beginning] = made
        shutil.copytree(BEGINNINGS[beginning].name, output, ignore=shutil.ignore_patterns("recipe.yaml"))
    if stop is None:
        return run_recipe(loaded, only) / "tuned"
    count, original = iter(range(stop)), loop._clip_gradient

    def clip_gradient(*arguments):
        if next(count, None) is None:
            raise KeyboardInterrupt
        return original(*arguments)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop, "_clip_gradient", clip_gradient)
        run_recipe(loaded, only)
    return output / "tuned.partial"


def launch_two(recipe, *arguments, script="training/upcycle.py", options=("--multi_gpu",), launcher=(), **pipes):
    """Starts a recipe's file on two processes, by `accelerate launch` with some options or by another launcher."""
    name, *words = launcher or ("accelerate", "launch", "--quiet", *options, "--num_processes", "2")
    command = [Path(sys.executable).with_name(name), *words, script, "--config", recipe, *arguments]
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | pipes
    return subprocess.Popen([str(word) for word in command], cwd=ROOT, env=environment, **pipes)


@contextlib.contextmanager
def ended_by_a_checkpoint():
    """Ends a run when it has saved a checkpoint."""
    save = loop.save_checkpoint

    def save_and_end(*arguments):
        save(*arguments)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop, "save_checkpoint", save_and_end)
        yield


@contextlib.contextmanager
def full_disk(size):
    """Lets files of this process end at a number of bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def weights(folder):
    return load_file(folder / "model.safetensors")


def same_weights(first, second):
    first, second = weights(first), weights(second)
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def recorded(folder):
    """Lets the record of a stage's folder know the weights that are there now, as if the stage had made them."""
    record = Record.read(folder)
    record.weights = weights_fingerprint(str(folder))
    record.write(folder)


def read_log(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def losses(folder):
    return [record["total_loss"] for record in read_log(folder) if "total_loss" in record]


def stored(folder, name):
    """An array that a stage keeps in a `FeatureStore`."""
    return FeatureStore.open(folder, "a stage")[name][:]
