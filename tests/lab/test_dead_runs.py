"""Models that died in training are no seed, no point of the law and no side of a verdict."""

import json
import types

import pytest
from test_outcome import ALIVE, DEAD
from test_report import result
from test_seeds import folders, write  # noqa: F401

from clip_moe.conversion.publishing.card import _stage_row
from clip_moe.engine.provenance import Record
from clip_moe.evaluation.task import INFORMATION
from lab.cards.seeds import write_seeds
from lab.law.points import read_points
from lab.law.stage import EstimateStage


def test_a_dead_run_is_no_seed(folders, tmp_path):  # noqa: F811
    """Each run's evaluation lies in a folder beside its stages."""
    runs = []
    for number, folder in enumerate(folders):
        runs.append(folder.rename(tmp_path / f"run {number}").joinpath("scores"))
        runs[-1].mkdir()
        for file in runs[-1].parent.glob("*.json"):
            file.rename(runs[-1] / file.name)
        models = {"sparse": "tuned", "dense": "base"}
        Record(stage={"stage": "evaluate", "models": models}, seed=number).write(runs[-1])
        (runs[-1].parent / "tuned").mkdir()
        Record(stage={"stage": "train"}, training=DEAD if number == 1 else ALIVE).write(runs[-1].parent / "tuned")
    table = write_seeds(runs, tmp_path / "out", baseline="dense")
    assert "63.5 ± 4.9" in table  # 60 and 67
    page = (tmp_path / "out" / "seeds.md").read_text()
    assert "1 of 3 runs left out (run 1: sparse did not leave chance)." in page and "of 2 seeds" in page
    assert len(json.loads((tmp_path / "out" / "seeds.json").read_text())["dense"]["retrieval"]) == 2
    with pytest.raises(ValueError, match="two runs whose models all learned .run 1: sparse did not leave chance."):
        write_seeds(runs[:2], tmp_path / "other")


def test_a_dead_run_is_no_point_of_the_law(tmp_path):
    for stage in ("dense", "dense_score"):
        (tmp_path / stage).mkdir()
    write(tmp_path / "dense_score", result("dense"))
    Record(stage={"stage": "train"}, training=DEAD).write(tmp_path / "dense")
    assert read_points(tmp_path) == []
    Record(stage={"stage": "train"}, training=ALIVE).write(tmp_path / "dense")
    with pytest.raises(FileNotFoundError, match="seed_model"):  # it goes on, to a model that is not there
        read_points(tmp_path)


def test_a_dead_model_has_no_place_in_other_pages(tmp_path):
    """No verdict beside the law's estimate, and its card says so."""
    for name, training in (("dense", ALIVE), ("sparse", DEAD)):
        (tmp_path / name).mkdir()
        stage = {"stage": "train", "data": {"source": "symbols", "num_samples": 16}}
        Record(stage=stage, training=training).write(tmp_path / name)
    results = [result(row, "symbols", metrics=dict.fromkeys(INFORMATION, 0.5)) for row in ("dense", "sparse")]
    assert _stage_row(Record.read(tmp_path / "sparse"))[1].endswith("did not leave chance")
    models = {"dense": "dense", "sparse": "sparse"}
    stage = EstimateStage(name="both", stage="estimate", models=models, tasks=["names_256"])
    inputs = types.SimpleNamespace(models={row: str(tmp_path / row) for row in models}, estimate="")
    assert "*Measured*: no verdict, as sparse did not leave chance." in stage.head(results, inputs, tmp_path, "cpu")[0]
