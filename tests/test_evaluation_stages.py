"""The stages that measure, on benchmarks and on own data; their tasks are checked before anything runs."""

import json
import re
import shutil

import pytest
from benchmark_folders import make_copy
from tiny_runs import DENSE, SPARSE, run_stages

from clip_moe.data import symbols
from clip_moe.data.symbols import SYMBOLS
from clip_moe.engine.recipe import load_recipe
from clip_moe.engine.runner import run_recipe
from clip_moe.evaluation.benchmarks.specs import BENCHMARKS
from clip_moe.evaluation.tasks import TASKS, symbol_tasks


def stages(folder):
    """Two models, measured on built-in tasks, benchmarks and own data."""
    own, copies = {"dataset": str(folder / "own"), "label_column": "kind"}, {"data_root": str(folder / "copies")}
    tasks = [
        *("symbols_small", "clip_moe_table_1", "urban1k"),
        {"task": "retrieval", **own},
        {"task": "retrieval", **own, "split": "train"},
        {"task": "zero_shot", **own, "templates": ["a {c}."]},
        {"task": "pairs", "dataset": str(folder / "pairs"), "label_column": "attribute"},
    ]
    models = {"dense": "dense", "sparse": "sparse"}
    evaluate = {"name": "scores", "stage": "evaluate", "models": models, "tasks": tasks, **copies}
    analyze = {"name": "looked", "stage": "analyze", "model": "sparse", "tasks": tasks[2:4], **copies}
    return [DENSE, SPARSE, evaluate, analyze]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name in ("mmvp_vlm", "urban1k"):
        make_copy(BENCHMARKS[name], BENCHMARKS[name].layouts[0], tmp_path / "copies" / name)
    (tmp_path / "own").mkdir()
    for split in ("train", "test"):
        SYMBOLS.load(split, "web", 12).to_parquet(tmp_path / "own" / f"{split}.parquet")
    (tmp_path / "pairs").mkdir()
    symbols.load_minimal_pairs("test", 6).to_parquet(tmp_path / "pairs" / "test.parquet")
    monkeypatch.setitem(TASKS, "symbols_small", symbol_tasks(retrieval=8)["symbols_retrieval"])
    return tmp_path


@pytest.mark.slow
def test_run_whose_data_change_and_go(folder, capsys):
    """The stage is done once, and no longer taken for done where its data are others. Other stages do not need them."""
    out = run_stages(folder, stages(folder))
    run_stages(folder, stages(folder))
    first, second = re.findall("scores: (done .*); its report is (.*)", capsys.readouterr().out)
    assert first[1] == second[1] == str(out / "scores" / "report.md") and second[0] == "done before, skipped"
    results = [json.loads(file.read_text()) for file in (out / "scores").glob("*--*.json")]
    dense_tasks = sorted(result["task"].split("-")[0] for result in results if result["model"] == "dense")
    assert dense_tasks == ["mmvp_vlm", "pairs", "retrieval", "retrieval", "symbols_small", "urban1k", "zero_shot"]
    assert len(results) == 14
    looked = json.loads((out / "looked" / "experts.json").read_text())
    assert [name.split("-")[0] for name in looked["metrics"]] == ["urban1k", "retrieval"]

    caption = folder / "copies" / "urban1k" / "caption" / "000.txt"
    before = caption.read_text()
    caption.write_text(f"pink {before}")
    with pytest.raises(ValueError, match="scores was made with other settings .inputs.tasks.urban1k"):
        run_stages(folder, stages(folder))
    caption.write_text(before)
    SYMBOLS.load("test", "web", 13).to_parquet(folder / "own" / "test.parquet")
    with pytest.raises(ValueError, match="scores was made with other settings .inputs.tasks.3"):
        run_stages(folder, stages(folder))
    SYMBOLS.load("test", "web", 12).to_parquet(folder / "own" / "test.parquet")
    shutil.rmtree(folder / "copies")
    run_stages(folder, stages(folder))  # done is done
    shutil.rmtree(out / "scores")
    with pytest.raises((OSError, ValueError), match="no folder .*copies"):
        run_stages(folder, stages(folder))
    run_recipe(load_recipe(folder / "recipe.yaml"), only=["dense"])  # the stage that needs them does not run
