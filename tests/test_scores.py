"""Scores of a model while it trains."""

import pytest
from benchmark_folders import make_copy
from several_processes import run_processes, train_recipe
from tiny_runs import read_log, same_weights, set_towers, train

from clip_moe.data import symbols
from clip_moe.data.symbols import SYMBOLS
from clip_moe.evaluation import tasks
from clip_moe.evaluation.evaluate import evaluate_model
from clip_moe.evaluation.tasks import Task

KINDS = symbols.KIND_SETS["digit"]
SCORE = "kinds/accuracy_top5"
EVALUATION = {"every_steps": 2, "tasks": ["kinds", "captions"]}
DROPOUT = {"change": set_towers(attention_dropout=0.2)}  # which draws random numbers


def rows(caption):
    """24 symbols, and which of their columns is their caption."""
    loaded = symbols.ONE.load("test", "detailed", 24, KINDS).select_columns(["image", caption])
    return loaded.rename_columns({caption: "caption"}), 0


TASKS = {
    "kinds": Task("zero_shot", "", "", lambda: rows("kind"), classes=KINDS, templates=["a {}"]),
    "captions": Task("retrieval", "", "", lambda: rows("caption")),
}


@pytest.fixture(autouse=True, scope="module")
def tasks_here():
    with pytest.MonkeyPatch.context() as patch:
        for name, task in TASKS.items():
            patch.setitem(tasks.TASKS, name, task)
        yield


def scores(folder):
    return {record["step"]: record for record in read_log(folder) if SCORE in record}


@pytest.fixture(scope="module")
def measured(whole):
    return whole(evaluation=EVALUATION, **DROPOUT)


def test_scores_stand_in_the_log_and_change_no_weight(whole, measured, tmp_path):
    assert same_weights(whole(**DROPOUT), measured)
    assert list(scores(measured)) == [2, 4, 6] and not (measured / "checkpoints").exists()
    found = evaluate_model(measured, TASKS, tmp_path)
    expected = {f"{r['task']}/{name}": value for r in found for name, value in r["metrics"].items()}
    assert scores(measured)[6] == {"step": 6, **expected}


def test_a_finished_stage_does_not_mind_what_was_measured(measured, capfd):
    """Nor what it logs."""
    settings = {"evaluation": EVALUATION | {"every_steps": 3}, "logging_steps": 5}
    assert train(measured.parents[1], **settings, **DROPOUT) == measured
    assert "tuned: done before, skipped" in capfd.readouterr().out


def test_the_best_weights_are_those_of_their_step(whole, tmp_path):
    """At a rate that destroys the model, the first are the best; also where training was killed after them."""
    measured = {"every_steps": 2, "tasks": ["kinds"], "load_best_model_at_end": True}
    settings = {"evaluation": measured, "learning_rate": 0.3, "warmup_steps": 0}
    best = train(tmp_path / "best", **settings)
    accuracy = {step: record["kinds/accuracy"] for step, record in scores(best).items()}
    first = max(accuracy, key=accuracy.get)  # of equal ones, the first
    assert first != 6 and not (best / "checkpoints").exists()
    (found,) = evaluate_model(best, {"kinds": TASKS["kinds"]}, tmp_path / "scores")
    assert found["metrics"]["accuracy"] == accuracy[first]
    stopped = train(tmp_path / "stopped", stop=first, **settings | {"save_steps": first})
    assert (stopped / "checkpoints" / f"best-{first:08}").is_dir()
    assert same_weights(train(tmp_path / "stopped", only=["tuned"], **settings | {"save_steps": first}), best)


def train_with_small_tasks(recipe):
    tasks.TASKS |= TASKS
    train_recipe("--config", recipe)


@pytest.mark.slow
def test_two_processes_score_as_one(measured, tmp_path):
    train(tmp_path, stop=0, evaluation=EVALUATION, **DROPOUT)  # writes the recipe, and leaves nothing of the stage
    run_processes(2, train_with_small_tasks, tmp_path / "recipe.yaml")
    # Dropout is another in two processes, so that the models are, too
    assert list(scores(tmp_path / "out" / "tuned")) == list(scores(measured)) == [2, 4, 6]


def test_scores_of_own_data_and_benchmarks(tmp_path):
    make_copy("urban1k", tmp_path / "copies" / "urban1k")
    (tmp_path / "own").mkdir()
    SYMBOLS.load("test", "web", 12).to_parquet(tmp_path / "own" / "test.parquet")
    own = {"task": "zero_shot", "dataset": str(tmp_path / "own"), "label_column": "kind"}
    retrieval = {"task": "retrieval", "dataset": str(tmp_path / "own")}
    evaluation = {"every_steps": 1, "tasks": ["urban1k", own, retrieval], "data_root": str(tmp_path / "copies")}
    record = read_log(train(tmp_path, evaluation=evaluation, max_steps=1))[-1]
    assert "urban1k/image_to_text_recall@1" in record
    assert sum(name.startswith(("zero_shot-own-", "retrieval-own-test-caption-")) for name in record) > 2
