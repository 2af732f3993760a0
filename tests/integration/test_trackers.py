"""The trackers of docs/trackers.md that are installed: each holds what a run logs, without a network."""

import sqlite3

import pytest
import yaml
from documents import ROOT
from programs import run_program
from tiny_runs import TUNED

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
        **TUNED,
        **{"name": "trained", "model": str(BASE), "data": {"source": "symbols", "num_samples": 32}, "logging_steps": 1},
        "evaluation": {"every_steps": 1, "tasks": ["symbols_retrieval"]},
    }
    recipe = {"output_dir": str(tmp_path / "out"), "trackers": [tracker], "stages": [stage]}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    places = {"WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio")}
    run_program(tmp_path, "-m", "training.upcycle", "--config", "recipe.yaml", **places)
    held = read(tmp_path)
    for name in ("loss", "learning_rate", "symbols_retrieval/image_to_text_recall_1"):
        assert f"trained/{name}" in held
