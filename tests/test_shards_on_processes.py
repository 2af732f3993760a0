"""Indexed shards with labels, hidden states and parts of batches, on one, two and three processes that are killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from tiny_runs import DENSE, losses, same_weights, weights
from tiny_sources import images_and_texts, write_shard

ROOT = Path(__file__).parents[1]
PRESET = {"preset": "clip_moe", "changes": {"num_experts": 2}}
STEPS = {"global_batch_size": 12, "learning_rate": 1e-2, "warmup_steps": 2, "logging_steps": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three shards of 60 pairs in all."""
    folder = tmp_path_factory.mktemp("shards")
    captions = [f"{color} circle {number}" for number in range(20) for color in ("red", "green", "blue")]
    for shard in range(3):
        write_shard(folder / f"{shard}.tar", images_and_texts(range(20 * shard, 20 * shard + 20), captions))
    return folder


def start(folder, output, processes, indexed=True):
    """Launches a recipe of all that goes by numbers of samples. It has a process group of its own."""
    data = {"source": str(folder / "*.tar"), "image_column": "png", "caption_column": "txt", "indexed": indexed}
    data["max_unreadable"] = 0
    parts = {"mini_batch_size": 2} if indexed else {}
    stages = [
        DENSE,
        {"name": "sparse", "stage": "upcycle", "model": "dense", **PRESET},
        {"name": "features", "stage": "embed", "model": "dense", "data": data, "batch_size": 4},
        {"name": "clusters", "stage": "cluster", "features": "features", "num_image_clusters": 2},
        {"name": "expert", "stage": "train_experts", "model": "dense", "expert": 1, "clusters": "clusters"}
        | {"max_steps": 40, "save_steps": 2, **parts},
        {"name": "states", "stage": "hidden_states", "model": "sparse", "data": data, "batch_size": 4},
        {"name": "routers", "stage": "train_router", "model": "sparse", "hidden_states": "states"}
        | {"max_steps": 40, "save_steps": 2},
    ]
    defaults = {"train": STEPS | {"data": data}}
    path = folder / f"{output}.yaml"
    path.write_text(yaml.safe_dump({"output_dir": str(folder / output), "defaults": defaults, "stages": stages}))
    command = [str(Path(sys.executable).with_name("accelerate")), "launch", "--quiet", "--cpu"]
    command += ["--num_processes", str(processes), "training/upcycle.py", "--config", str(path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0
    )


def finish(*arguments, **settings):
    process = start(*arguments, **settings)
    printed, _ = process.communicate(timeout=600)
    assert process.returncode == 0, printed[-3000:]


@pytest.fixture(scope="module")
def loaded(folder):
    """What one process makes of the shards if it loads them, whole batches at a time."""
    finish(folder, "loaded", 1, indexed=False)
    return folder / "loaded"


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_killed_runs_end_as_others_and_as_one_process_of_loaded_data(folder, loaded, processes):
    whole, killed = f"whole_{processes}", f"killed_{processes}"
    finish(folder, whole, processes)
    for stage in ("expert", "routers"):
        checkpoint = folder / killed / f"{stage}.partial" / "checkpoints" / "step-00000006"
        process = start(folder, killed, processes)
        while process.poll() is None and not checkpoint.exists():
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL and not (folder / killed / stage).exists(), "it was too late"
    finish(folder, killed, processes)
    for stage in ("expert", "routers"):
        assert same_weights(folder / killed / stage, folder / whole / stage)
        assert losses(folder / killed / stage) == losses(folder / whole / stage)
        torch.testing.assert_close(losses(folder / whole / stage), losses(loaded / stage), atol=1e-4, rtol=0)
        torch.testing.assert_close(weights(folder / whole / stage), weights(loaded / stage), atol=2e-4, rtol=0)
