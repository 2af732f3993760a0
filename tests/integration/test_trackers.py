"""The trackers of docs/trackers.md that are installed: each holds what a run logs, without a network."""

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
BASE = ROOT / "training" / "symbol_clip"


def read_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "out" / "logs" / "clip_moe"))
    return str(events.Reload().Tags()["scalars"])


def read_wandb(folder):
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    return file.read_bytes().decode("latin-1")


def read_trackio(folder):
    return str(sqlite3.connect(folder / "trackio" / "clip_moe.db").execute("SELECT metrics FROM metrics").fetchall())


def read_mlflow(folder):
    return str(sqlite3.connect(folder / "mlflow.db").execute("SELECT DISTINCT key FROM metrics").fetchall())


@pytest.mark.parametrize(
    ("tracker", "read"),
    [("tensorboard", read_tensorboard), ("wandb", read_wandb), ("trackio", read_trackio), ("mlflow", read_mlflow)],
)
def test_a_tracker_holds_losses_and_scores(tmp_path, tracker, read):
    pytest.importorskip(tracker)
    stage = {
        **{"name": "trained", "stage": "train", "model": str(BASE), "data": {"source": "symbols", "num_samples": 32}},
        **{"global_batch_size": 16, "max_steps": 2, "learning_rate": 1e-4, "logging_steps": 1},
        "evaluation": {"every_steps": 2, "tasks": ["symbols_retrieval"]},
    }
    recipe = {"output_dir": str(tmp_path / "out"), "trackers": [tracker], "stages": [stage]}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    places = {"PYTHONPATH": str(ROOT), "WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio")}
    command = [sys.executable, "-m", "training.upcycle", "--config", "recipe.yaml"]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **places}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    held = read(tmp_path)
    for name in ("loss", "learning_rate", "symbols_retrieval/image_to_text_recall_1"):
        assert f"trained/{name}" in held
