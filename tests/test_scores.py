"""Scores of a model while it trains, and the best model."""

import json
import shutil

import pytest
from benchmark_folders import make_copy
from several_processes import run_processes, train_recipe
from tiny_runs import ended_by_a_checkpoint, read_log, same_weights, train

from clip_moe.data import symbols
from clip_moe.data.symbols import SYMBOLS
from clip_moe.engine.provenance import weights_fingerprint
from clip_moe.evaluation import tasks
from clip_moe.evaluation.benchmarks.specs import BENCHMARKS
from clip_moe.evaluation.evaluate import evaluate_model
from clip_moe.evaluation.tasks import Task

KINDS = symbols.KIND_SETS["digit"]
SCORE = "kinds/accuracy_top5"
EVALUATION = {"every_steps": 2, "tasks": ["kinds", "captions"]}
KEEPING = EVALUATION | {"every_steps": 1, "keep_best": SCORE}


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


def run(folder, evaluation, **training):
    """Trains a sparse model for 6 steps, with dropout, which draws random numbers. Returns the stage's folder."""
    return train(folder, evaluation=evaluation, patch_dropout=0.2, **training)


def scores(folder):
    return {record["step"]: record for record in read_log(folder) if SCORE in record}


@pytest.fixture(scope="module")
def plain(whole):
    return whole(patch_dropout=0.2)


@pytest.fixture(scope="module")
def measured(whole):
    return whole(evaluation=EVALUATION, patch_dropout=0.2)


@pytest.fixture(scope="module")
def best(whole):
    """With a learning rate at which the last model is not the best."""
    return whole(evaluation=KEEPING, patch_dropout=0.2, learning_rate=0.1)


def test_scores_stand_in_the_log_and_change_no_weight(plain, measured, tmp_path):
    assert same_weights(plain, measured)
    assert list(scores(measured)) == [2, 4, 6]
    assert not (measured / "checkpoints").exists() and not (measured / "best.json").exists()
    found = evaluate_model(measured, TASKS, tmp_path)
    expected = {f"{r['task']}/{name}": value for r in found for name, value in r["metrics"].items()}
    assert scores(measured)[6] == {"step": 6, **expected}


def test_a_finished_stage_does_not_mind_what_was_measured(measured, capfd):
    assert run(measured.parents[1], EVALUATION | {"every_steps": 3}) == measured
    assert "tuned: done before, skipped" in capfd.readouterr().out


def test_the_best_model_is_the_result(best, plain, tmp_path):
    found = scores(best)
    highest = max(record[SCORE] for record in found.values())
    step = next(step for step, record in found.items() if record[SCORE] == highest)
    record = {"step": step, "score": SCORE, "value": highest, "weights": weights_fingerprint(str(best))}
    assert json.loads((best / "best.json").read_text()) == record
    assert step < 6 and found[6][SCORE] < highest
    (result,) = evaluate_model(best, {"kinds": TASKS["kinds"]}, tmp_path)
    assert result["metrics"]["accuracy_top5"] == highest


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folder of a run that keeps the best, and ended after its first checkpoint, and again after its second."""
    folder = tmp_path_factory.mktemp("killed")
    for _ in range(2):
        with ended_by_a_checkpoint():
            run(folder, KEEPING, learning_rate=0.1)
    return folder


@pytest.mark.parametrize(
    "damage",
    [
        lambda best: (best / "best.json").write_text(""),
        lambda best: (best / "best.json").write_text('{"step": 1}'),
        lambda best: (best / "model.safetensors").unlink(),
    ],
    ids=["empty record", "other record", "no weights"],
)
def test_a_damaged_best_is_refused(killed, tmp_path, damage):
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    checkpoints = tmp_path / "out" / "tuned.partial" / "checkpoints"
    (best,) = checkpoints.glob("best-*")
    damage(best)
    with pytest.raises(ValueError, match=f"{best}, is not what its best.json tells: delete {checkpoints} to begin"):
        run(tmp_path, KEEPING, learning_rate=0.1)


def test_an_interrupted_run_keeps_the_same(best, killed, tmp_path):
    """Also one that was killed when a better one was there beside the best before."""
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    (kept,) = tmp_path.glob("out/tuned.partial/checkpoints/best-*")
    before = shutil.copytree(kept, kept.with_name("best-00000000"))
    (before / "model.safetensors").unlink()
    again = run(tmp_path, KEEPING, learning_rate=0.1)
    assert same_weights(best, again) and scores(best) == scores(again)
    assert (best / "best.json").read_text() == (again / "best.json").read_text()
    with pytest.raises(ValueError, match="was made with other settings .*keep_best"):
        run(tmp_path, KEEPING | {"keep_best": "kinds/accuracy"}, learning_rate=0.1)


def train_with_small_tasks(recipe):
    tasks.TASKS |= TASKS
    train_recipe("--config", recipe)


@pytest.mark.slow
def test_two_processes_score_as_one(measured, tmp_path):
    run(tmp_path, EVALUATION, stop=0)  # writes the recipe, and leaves nothing of the stage
    run_processes(2, train_with_small_tasks, tmp_path / "recipe.yaml")
    # Dropped patches are others in two processes, so that the models are, too
    assert list(scores(tmp_path / "out" / "tuned")) == list(scores(measured)) == [2, 4, 6]


def test_a_score_that_no_task_has_is_refused(tmp_path):
    """One that may be there is missed when it is measured."""
    with pytest.raises(ValueError, match="keep_best 'pairs/group'.* names none of the tasks kinds, captions"):
        run(tmp_path, EVALUATION | {"keep_best": "pairs/group"})
    assert not list(tmp_path.rglob("log.jsonl"))
    with pytest.raises(ValueError, match="keep_best 'kinds/roc_auc' was not measured, only kinds/accuracy, "):
        run(tmp_path, {"every_steps": 1, "tasks": ["kinds"], "keep_best": "kinds/roc_auc"})


def test_scores_of_own_data_and_benchmarks(tmp_path):
    """What is kept best may be named by the kind of task; other data under the same name make the stage anew."""
    make_copy(BENCHMARKS["urban1k"], BENCHMARKS["urban1k"].layouts[0], tmp_path / "copies" / "urban1k")
    (tmp_path / "own").mkdir()
    SYMBOLS.load("test", "web", 12).to_parquet(tmp_path / "own" / "test.parquet")
    own = {"task": "zero_shot", "dataset": str(tmp_path / "own"), "label_column": "kind"}
    retrieval = {"task": "retrieval", "dataset": str(tmp_path / "own")}
    tasks = ["urban1k", own, own | {"templates": ["a {}"]}, retrieval]
    evaluation = {"every_steps": 1, "tasks": tasks, "data_root": str(tmp_path / "copies")}
    with pytest.raises(ValueError, match="keep_best 'zero_shot/accuracy' names several of the tasks: zero_shot-own-"):
        run(tmp_path, evaluation | {"keep_best": "zero_shot/accuracy"}, max_steps=1)
    assert not list(tmp_path.rglob("log.jsonl"))
    evaluation |= {"keep_best": "retrieval/image_to_text_recall@1"}
    folder = run(tmp_path, evaluation, max_steps=1)
    record = read_log(folder)[-1]
    assert "urban1k/image_to_text_recall@1" in record
    best = json.loads((folder / "best.json").read_text())
    assert best["score"].startswith("retrieval-own-test-caption-") and record[best["score"]] == best["value"]
    SYMBOLS.load("test", "web", 13).to_parquet(tmp_path / "own" / "test.parquet")
    with pytest.raises(ValueError, match="tuned was made with other settings .inputs.evaluation.tasks.1"):
        run(tmp_path, evaluation, max_steps=1)
