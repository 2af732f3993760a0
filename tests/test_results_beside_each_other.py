"""A result is that of a task, a data set, a split, a protocol and a model: others stand beside it."""

import json
import shutil

import pytest
import small_evaluation
from benchmark_folders import make_copy
from small_evaluation import swapped, with_captions

from data import symbols
from evaluation.benchmarks.loading import TEMPLATES
from evaluation.benchmarks.specs import BENCHMARKS
from evaluation.evaluate import evaluate_model
from evaluation.own_data import OwnTask
from evaluation.report import write_report
from evaluation.tasks import find_tasks

dense = small_evaluation.dense


def columns(table):
    return [cell.strip() for cell in table.splitlines()[0].strip("|").split("|")][1:]


@pytest.fixture
def own(tmp_path):
    """Two data sets of two splits each, in which the captions of one are at other images."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        for split in ("train", "test"):
            rows = symbols.load(split, "web", 8).rename_column("kind", "label")
            rows = rows if name == "one" else with_captions(rows, swapped(rows["caption"]))
            rows.to_parquet(tmp_path / name / f"{split}.parquet")

    def task(name, kind="retrieval", **changes):
        return OwnTask(task=kind, dataset=str(tmp_path / name), **changes)

    return task


def test_data_sets_and_splits_stand_in_one_folder_and_one_table(dense, own, tmp_path):
    wanted = [own("one"), own("one", split="train"), own("two"), own("one", "zero_shot"), "symbols_pairs"]
    tasks = find_tasks(wanted)
    assert len(tasks) == 5 and [name.split("-")[0] for name in tasks][:4] == ["retrieval"] * 3 + ["zero_shot"]
    results = evaluate_model(dense, tasks, tmp_path / "scores")
    assert [result["task"] for result in results] == list(tasks)
    assert len(list((tmp_path / "scores").glob("*.json"))) == 5
    found = columns(write_report(sorted((tmp_path / "scores").glob("*.json")), tmp_path / "scores"))
    assert len(set(found)) == 8 and sum("train" in title for title in found) == 2
    splits = {result["data"].get("split") for result in results if result["task"].startswith("retrieval")}
    assert splits == {"test", "train"}


def test_the_same_task_twice(own):
    with pytest.raises(ValueError, match="the task retrieval on .*one occurs twice"):
        find_tasks([own("one"), own("one")])


@pytest.mark.slow
def test_models_whose_names_become_the_same(dense, tmp_path):
    """As parts of file names."""
    names = ["a b", "a_b", "a/b", "a?b", "_", "ä"]
    for name in names:
        evaluate_model(dense, find_tasks(["symbols_pairs"]), tmp_path / "scores", name=name)
    files = sorted((tmp_path / "scores").glob("*.json"))
    assert sorted(json.loads(file.read_text())["model"] for file in files) == sorted(names)
    assert len(write_report(files, tmp_path / "scores").splitlines()) == 2 + len(names)


def test_another_protocol_does_not_overwrite(dense, tmp_path):
    """Other templates, as many as before."""
    make_copy(BENCHMARKS["cars"], BENCHMARKS["cars"].layouts[0], tmp_path / "cars")
    evaluate_model(dense, find_tasks(["cars"], tmp_path), tmp_path / "scores")
    kept = (tmp_path / "scores" / "cars--dense.json").read_bytes()
    (tmp_path / "cars" / TEMPLATES).write_text("one {c}\ntwo {c}\n")
    with pytest.raises(ValueError, match="cars--dense.json holds a result of 'dense' with another data, .*templates"):
        evaluate_model(dense, find_tasks(["cars"], tmp_path), tmp_path / "scores")
    assert (tmp_path / "scores" / "cars--dense.json").read_bytes() == kept


def test_a_table_of_two_models_on_different_benchmarks(dense, tmp_path):
    for name in ("cars", "flickr8k", "mnist"):
        make_copy(BENCHMARKS[name], BENCHMARKS[name].layouts[0], tmp_path / "copies" / name)
    other = shutil.copytree(dense, tmp_path / "other")
    evaluate_model(dense, find_tasks(["cars", "mnist"], tmp_path / "copies"), tmp_path / "scores")
    evaluate_model(other, find_tasks(["cars", "flickr8k"], tmp_path / "copies"), tmp_path / "scores")
    table = write_report(sorted((tmp_path / "scores").glob("*.json")), tmp_path / "scores", baseline="dense")
    rows = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in table.splitlines()[2:]}
    blanks = {
        model: [title for title, cell in zip(columns(table), cells, strict=True) if not cell.strip()]
        for model, cells in rows.items()
    }
    recalls = [f"Flickr8k: R@{k} {direction}" for k in (1, 5) for direction in ("image→text", "text→image")]
    assert blanks == {"dense": recalls, "other": ["MNIST: accuracy"]}
