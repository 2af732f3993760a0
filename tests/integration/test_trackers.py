"""The trackers of docs/trackers.md that are installed: each holds what a run logs, without a network."""

import sqlite3
from importlib.util import find_spec

import pytest
import yaml
from documents import BASE
from programs import run_program
from tiny_runs import TUNED


def read_sqlite(path, query):
    return str(sqlite3.connect(path).execute(query).fetchall())


def read_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "out" / "logs" / "clip_moe"))
    return str(events.Reload().Tags()["scalars"])


READERS = {
    "tensorboard": read_tensorboard,
    "wandb": lambda folder: next(folder.glob("wandb/offline-run-*/run-*.wandb")).read_bytes().decode("latin-1"),
    "trackio": lambda folder: read_sqlite(folder / "trackio" / "clip_moe.db", "SELECT metrics FROM metrics"),
    "mlflow": lambda folder: read_sqlite(folder / "mlflow.db", "SELECT DISTINCT key FROM metrics"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run that logs to all of them at once."""
    folder = tmp_path_factory.mktemp("trackers")
    stage = {
        **TUNED,
        **{"name": "trained", "model": str(BASE), "data": {"source": "symbols", "num_samples": 32}, "logging_steps": 1},
        "evaluation": {"every_steps": 1, "tasks": ["symbols_retrieval"]},
    }
    trackers = [tracker for tracker in READERS if find_spec(tracker)]
    recipe = {"output_dir": str(folder / "out"), "trackers": trackers, "stages": [stage]}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    places = {"WANDB_MODE": "offline", "TRACKIO_DIR": str(folder / "trackio")}
    run_program(folder, "-m", "clip_moe.training.upcycle", "--config", "recipe.yaml", **places)
    return folder


@pytest.mark.parametrize("tracker", READERS)
def test_a_tracker_holds_losses_and_scores(folder, tracker):
    pytest.importorskip(tracker)
    held = READERS[tracker](folder)
    for name in ("loss", "learning_rate", "symbols_retrieval/image_to_text_recall_1"):
        assert f"trained/{name}" in held
