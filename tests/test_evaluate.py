"""Measuring tiny models: what is written, what stands beside it, what is refused. A result is that of a task, a data
set, a split, a protocol and a model."""

import json
import re
import shutil
from pathlib import Path

import pytest
import small_evaluation
import torch
from benchmark_folders import make_copy
from tiny_clip import change_json, change_weights
from tiny_runs import DENSE, SPARSE, run_stages

from clip_moe.conversion import assemble
from clip_moe.data import symbols
from clip_moe.data.symbols import SYMBOLS
from clip_moe.engine.recipe import load_recipe
from clip_moe.engine.runner import run_recipe
from clip_moe.evaluation import evaluate, feature_store
from clip_moe.evaluation.evaluate import evaluate_model
from clip_moe.evaluation.own_data import make_task
from clip_moe.evaluation.own_task import OwnTask
from clip_moe.evaluation.progress import progress
from clip_moe.evaluation.report import write_report
from clip_moe.evaluation.results import task_name, write_result
from clip_moe.evaluation.tasks import TASKS, find_tasks, loaded_once, symbol_tasks

small_tasks = small_evaluation.small_tasks


def pairs_of(model, output, **options):
    return evaluate_model(model, find_tasks(["symbols_pairs"]), output, **options)


def error_of(*arguments, **options):
    with pytest.raises((ValueError, OSError)) as error:
        pairs_of(*arguments, **options)
    return str(error.value)


@pytest.mark.slow
def test_every_built_in_task(sparse, tmp_path):
    results = evaluate_model(sparse, TASKS, tmp_path, name="a model/x")
    for result in results:
        (file,) = tmp_path.glob(f"{result['task']}--a_model_x-*.json")
        assert json.loads(file.read_text()) == result
        assert set(result["primary"]) <= set(result["metrics"])
        assert all(0 <= value <= 1 for value in result["metrics"].values())
        assert result["num_samples"] in (8, 12, 14, 16, 40) and result["num_skipped"] == 0
        assert result["protocol"] and result["versions"]["torch"] == torch.__version__


def test_names_that_look_alike_have_files_of_their_own(dense, tmp_path):
    names = ["a b", "a_b", "a/b", "ä", "x" * 300, "x" * 301, "dense"]
    (result,) = pairs_of(dense, tmp_path)
    for name in names:
        write_result(result | {"model": name}, tmp_path)
    files = sorted(tmp_path.glob("symbols_pairs--*.json"))
    assert sorted(json.loads(file.read_text())["model"] for file in files) == sorted(names)
    assert (tmp_path / "symbols_pairs--a_b.json").is_file() and (tmp_path / "symbols_pairs--dense.json").is_file()
    assert len(write_report(files, tmp_path / "report").splitlines()) == 2 + len(names)


@pytest.mark.parametrize(
    ("task", "change"),
    [
        ("retrieval", {"dataset": "two"}),
        ("retrieval", {"split": "train"}),
        ("retrieval", {"caption_column": "color"}),
        ("zero_shot", {"label_column": "texture"}),
        ("zero_shot", {"templates": ["a photo of a {}.", "a {}"]}),
        ("zero_shot", {"label_column": "number", "classes": "classes.txt"}),
        ("linear_probe", {"train_split": "train[:7]"}),
    ],
)
def test_results_of_other_data_are_kept_apart(tmp_path, monkeypatch, task, change):
    monkeypatch.chdir(tmp_path)
    Path("classes.txt").write_text("one\ntwo\n")
    for split in ("train", "test"):
        rows = SYMBOLS.load(split, "web", 8).add_column("number", [0, 1] * 4)
        for source in ("one", "two"):
            Path(source).mkdir(exist_ok=True)
            rows.to_parquet(f"{source}/{split}.parquet")
    settings = {"task": task, "dataset": "one", "label_column": "background"}
    one, same, other = (make_task(OwnTask(**settings | changes)) for changes in ({}, {}, change))
    names = [task_name(task, made.data) for made in (one, same, other)]
    assert names[0] == names[1] != names[2] and one.data == same.data != other.data and one.protocol != other.protocol
    if "classes" in change:
        Path("classes.txt").write_text("two\none\n")
        assert make_task(OwnTask(**settings | change)).data != other.data


@pytest.mark.parametrize("mixed", [False, True], ids=["sparse", "mixture"])
def test_scores_that_depend_on_the_batch_say_so(dense, sparse, tmp_path, mixed):
    """A report does not put those of several batch sizes into one row."""
    model = shutil.copytree(sparse, tmp_path / "whole")
    change_json(model / "config.json", vision_config={"eval_capacity_factor": 0.3})
    if mixed:
        model = tmp_path / "mixture"
        assemble.convert([sparse, tmp_path / "whole"], model)
    (result,), (dense_result,) = (
        pairs_of(model, tmp_path / "scores", batch_size=7),
        pairs_of(dense, tmp_path / "scores"),
    )
    assert result["depends_on_batch"] and "depends_on_batch" not in dense_result
    results = [result, result | {"task": "other", "batch_size": 8}]
    with pytest.raises(ValueError, match="has results of different models: batch_size is 7 on symbols_pairs but 8 on"):
        write_report(results, tmp_path / "report")


def test_a_model_whose_weights_are_zero_has_no_score(dense, tmp_path):
    folder = shutil.copytree(dense, tmp_path / "model")
    change_weights(folder / "model.safetensors", lambda weights: weights["visual_projection.weight"].fill_(0))
    assert "are zero or not finite" in error_of(folder, tmp_path / "scores")
    assert not list(tmp_path.glob("scores/**/*.json"))


def test_no_embeddings_are_kept_in_the_folder_of_a_model(dense, tmp_path):
    """They would count as its weights. Here a link leads there."""
    (tmp_path / "link").symlink_to(dense)
    assert f"is in the folder of the model {dense}" in error_of(dense, tmp_path / "link" / "scores")
    assert not (dense / "scores").exists()


def no_space(*_):
    raise OSError("no space")


def test_an_output_folder_is_made_before_the_work_and_goes_if_it_fails(dense, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    with monkeypatch.context() as patch:
        patch.setattr(feature_store, "save_file", no_space)
        assert error_of(dense, tmp_path / "scores").endswith(": no space") and not (tmp_path / "scores").exists()
    monkeypatch.setattr(evaluate, "measure", None)  # calling it would fail
    for output in ("file", "file/below"):
        assert "file" in error_of(dense, tmp_path / output)


def test_a_look_says_how_many_rows_it_is_of(sparse, tmp_path):
    """In its title and protocol; looks of other numbers of rows are not compared."""
    tasks = find_tasks(["symbols_pairs", "names_16"])
    looks = {number: loaded_once(tasks, number) for number in (8, 16)}
    assert looks[8]["symbols_pairs"].title == "attribute pairs, first 8 rows"
    assert looks[8]["names_16"].protocol.startswith("at most the first 8 rows of 16 new pictures")
    results = [
        pair | {"model": str(number)}
        for number in looks
        for pair in evaluate_model(sparse, {"symbols_pairs": looks[number]["symbols_pairs"]}, tmp_path / str(number))
    ]
    with pytest.raises(ValueError, match="such scores cannot be compared"):
        write_report(results, tmp_path)


def test_a_log_has_a_line_now_and_then(capsys, monkeypatch):
    assert list(progress("embedding", 5, range(5))) == list(range(5))
    assert capsys.readouterr().err == ""  # it took no time
    with progress("tuned", total=3, initial=1, leave=True) as counted:
        for loss in ("2.000", "1.000"):
            counted.set_postfix_str(f"loss {loss}", refresh=False)
            counted.update()
    assert capsys.readouterr().err == "tuned: 1 of 3, ? left\ntuned: 3 of 3, loss 1.000, 00:00 left\n"
    monkeypatch.setattr("clip_moe.evaluation.progress.SECONDS", 0)
    list(progress("embedding", 3, range(3)))
    assert capsys.readouterr().err.splitlines()[1] == "embedding: 1 of 3, 00:00 left"
    list(progress("embedding", 3, range(3), shown=False))
    assert capsys.readouterr().err == ""


# --- the stages that measure, on benchmarks and on own data; their tasks are checked before anything runs


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
        make_copy(name, tmp_path / "copies" / name)
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
