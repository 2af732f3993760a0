"""The outcome of training: runs that died, learned or memorized, in their log, record, report and seeds."""

import json
import math
import types

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.optimize import minimize_scalar
from test_report import result
from tiny_runs import DENSE, SPARSE, read_log, run_stages, train

import clip_moe
from clip_moe.engine.outcome import COLLAPSED, DID_NOT_LEAVE_CHANCE, MEMORIZED, VANISHED, Training
from clip_moe.engine.provenance import Record, trainings
from clip_moe.evaluation.answer import answer
from clip_moe.evaluation.retrieval import batch_loss
from clip_moe.training.contrastive_task import ContrastiveTask
from clip_moe.training.losses import Pairing, contrastive_loss

PAIRS = {"source": "symbols", "num_samples": 16, "captions": "detailed", "in_memory": True}
DIES = {"stage": "train", "model": "dense", "data": PAIRS, "global_batch_size": 8, "max_steps": 24}
DIES |= {"learning_rate": 0.5, "logging_steps": 3}
LEARNS = DIES | {"learning_rate": 3e-3, "max_steps": 150}
SIGLIP = DENSE | {"name": "siglip", "family": "siglip"}
SIGMOID_CHANCE = math.log(8) + 7 * math.log(8 / 7)
# Name -> what differs, chance, and the outcome
RUNS = {
    "dead": (DIES, math.log(8), DID_NOT_LEAVE_CHANCE),
    "slow": (DIES | {"learning_rate": 1e-6}, math.log(8), DID_NOT_LEAVE_CHANCE),
    "learned": (LEARNS, math.log(8), None),
    "collapsed": (DIES | {"model": "learned"}, math.log(8), COLLAPSED),
    "still": (DIES | {"model": "learned", "learning_rate": 1e-8}, math.log(8), None),
    "siglip_dead": (DIES | {"model": "siglip"}, SIGMOID_CHANCE, DID_NOT_LEAVE_CHANCE),
    "sparse_dead": (DIES | {"model": "sparse"}, math.log(8), DID_NOT_LEAVE_CHANCE),
    "routers": (DIES | {"stage": "train_router", "model": "upcycled", "learning_rate": 1e-3}, math.log(8), None),
    "accumulated": (DIES | {"gradient_accumulation_steps": 2}, math.log(4), DID_NOT_LEAVE_CHANCE),
    "in_parts": (DIES | {"mini_batch_size": 4}, math.log(8), DID_NOT_LEAVE_CHANCE),
}


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    stages = {name: {"name": name, **stage} for name, (stage, _, _) in RUNS.items()}
    upcycled = [SPARSE | {"name": name, "model": model} for name, model in (("upcycled", "learned"), ("lost", "dead"))]
    average = {"name": "average", "stage": "average", "models": ["dense", "collapsed"]}
    first = [stages.pop(name) for name in ("dead", "learned")]
    return run_stages(
        tmp_path_factory.mktemp("outcome"), [DENSE, SIGLIP, SPARSE, *first, *upcycled, *stages.values(), average]
    )


@pytest.mark.parametrize("name", RUNS)
def test_runs(out, name):
    """Dead at a rate of 0.5, too slow at 1e-6, learned, collapsed from what it had learned, and not touched at all."""
    stage, chance, outcome = RUNS[name]
    training, log = Record.read(out / name).training, read_log(out / name)
    assert training.chance == pytest.approx(chance, rel=1e-5)
    assert (training.steps, training.outcome) == (stage["max_steps"], outcome)
    assert log[-1].get("outcome") == outcome and ("loss" in log[-1]) == (outcome is None)
    assert log[0]["step"] == 1 and training.first == log[0]["loss"]
    content = json.loads((out / name / "manifest.json").read_text())["training"]
    assert content["outcome"] == outcome
    if outcome:
        assert (training.gradient > VANISHED) == (name == "slow")
        assert training.advice.startswith("raise" if name == "slow" else "lower")


def test_the_loss_of_dense_and_sparse_is_the_same_quantity(out):
    """The contrastive loss of the same first batch: an upcycled model starts as the dense one, with router losses."""
    dense, sparse = read_log(out / "dead")[0], read_log(out / "sparse_dead")[0]
    assert dense["total_loss"] == dense["loss"] and sparse["total_loss"] > sparse["loss"] + 1e-4
    assert sparse["loss"] == pytest.approx(Record.read(out / "sparse_dead").training.first)
    learned, routers = (Record.read(out / name).training for name in ("still", "routers"))
    assert routers.first < learned.chance / 2


def test_a_model_has_the_last_training_of_its_weights(out, tmp_path, monkeypatch):
    assert [*trainings(out / "lost")] == [out / "dead"]  # upcycled from it
    assert [*trainings(out / "average")] == [out / "collapsed"]
    assert [*trainings(out / "collapsed")] == [out / "collapsed"]  # not the one that it started from
    assert trainings(out / "dense") == trainings(out / "nowhere") == {}
    monkeypatch.chdir(out.parent)
    (tmp_path / "another_run").mkdir()
    name, other = f"{out.name}/dead", tmp_path / out.name / "dead"
    inputs = {name: Record.read(out / "dead").digest}
    Record(stage={"stage": "upcycle"}, models=[name], inputs=inputs).write(tmp_path / "another_run")
    other.mkdir(parents=True)
    Record.read(out / "collapsed").write(other)  # beside it, by this name
    assert [*trainings(tmp_path / "another_run")] == [out / "dead"]


def test_a_resumed_run_has_the_same_outcome(tmp_path):
    """Between two lines of its log, it goes on from a checkpoint."""
    settings = {"max_steps": 24, "save_steps": 5, "logging_steps": 4, "learning_rate": 0.5}
    train(tmp_path / "resumed", 12, **settings)
    resumed, whole = (train(tmp_path / name, **settings) for name in ("resumed", "whole"))
    assert Record.read(resumed).training == Record.read(whole).training
    assert Record.read(whole).training.outcome == DID_NOT_LEAVE_CHANCE
    assert [line["step"] for line in read_log(resumed)] == [line["step"] for line in read_log(whole)]


@pytest.mark.parametrize("bias", [False, True], ids=["softmax", "sigmoid"])
@pytest.mark.parametrize("texts", [[0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 1, 2], [0, 0, 0, 0, 0, 1]], ids=str)
def test_chance_with_duplicates_is_the_best_loss_of_equal_similarities(texts, bias):
    """By a search over all biases."""
    losses = types.SimpleNamespace(
        contrastive_loss=lambda *embeds, **options: contrastive_loss(*embeds[:3], pairing=embeds[3], **options),
        mini_batch_size=None,
        expert_bias_update="sign",
    )
    model = torch.nn.Linear(1, 1)
    model._no_split_modules, model.logit_scale = None, torch.nn.Parameter(torch.tensor([0.0]))
    if bias:
        model.logit_bias = torch.nn.Parameter(torch.tensor([-10.0]))
    task, keys = ContrastiveTask(model, losses), torch.tensor(texts)
    pairing = Pairing(image_keys=torch.arange(6), text_keys=keys)
    embeds = [*torch.nn.functional.normalize(torch.randn(2, 6, 4), dim=-1), torch.tensor([10.0])]

    def equal(value=None):
        bias = None if value is None else torch.tensor(value)
        ones = torch.ones(6, 4) / 2
        return contrastive_loss(ones, ones, torch.tensor(1.0), logit_bias=bias, pairing=pairing).item()

    best = minimize_scalar(equal, bounds=(-6, 6), method="bounded").fun if bias else equal()
    chance = task.chance([*embeds, model.logit_bias] if bias else embeds, pairing)["chance"].item()
    assert chance == pytest.approx(best, abs=1e-4)
    task.progress = 0.1
    assert task.chance(embeds, pairing) == {}


def log_of(losses, chance=4.0, gradient=1.0):
    lines = [{"step": step, "loss": loss, "grad_norm": gradient} for step, loss in enumerate(losses, 1)]
    return Training.from_log([{**lines[0], "chance": chance}, *lines[1:]], 64)


KNOWN = [4.2] + [1.5] * 40


@pytest.mark.parametrize(
    ("losses", "test", "outcome"),
    [
        ([4.2] * 19, None, None),  # too few steps to tell
        ([4.2] * 20, None, DID_NOT_LEAVE_CHANCE),
        ([4.2] * 30 + [3.8] * 3 + [4.0] * 7, None, DID_NOT_LEAVE_CHANCE),  # never far below it
        ([4.2] * 10 + [3.9, 4.1] * 10 + [3.8] * 10, None, None),  # just left it
        ([4.2] * 10 + [2.0] * 20 + [4.0] * 10, None, COLLAPSED),  # learned, then lost all
        ([1.0] + [9.0] * 39, None, COLLAPSED),  # diverged
        ([1.0] * 20 + [3.5] * 20, None, COLLAPSED),  # most of it
        ([1.0] * 20 + [1.8] * 20, None, None),  # a harder end
        ([4.2] + [4.0] * 10 + [2.0, 0.2] * 20, None, None),  # noise
        (KNOWN, 4.0, MEMORIZED),  # a low loss of training, with nothing of the test
        (KNOWN, 3.95, MEMORIZED),
        (KNOWN, 3.5, None),
        ([4.2] + [3.0] * 40, 4.0, None),
        ([4.2] + [4.0] * 40, 4.0, DID_NOT_LEAVE_CHANCE),
    ],
)
def test_thresholds(losses, test, outcome):
    training = log_of(losses)
    if test is not None:
        training = training.with_test(test, 4.0)
        assert f"of the test {test:.2f} at its best temperature" in str(training)
    assert training.outcome == outcome


def test_a_log_of_another_loss_has_no_outcome():
    """Such as that of a language model, which has no chance; nor has a first batch of equal pairs. With a gradient that
    overflowed in half precision, it has one."""
    assert Training.from_log([{"step": 1, "loss": 2.0, "grad_norm": 1.0}], 8) is Training.from_log([], 8) is None
    assert log_of([0.0] * 40, chance=0.0) is log_of([1.0] * 40, chance=math.nan) is None
    first = {"step": 1, "loss": 4.2, "grad_norm": math.inf, "chance": 4.0}
    later = [{"step": step, "loss": 4.2, "grad_norm": 1.0} for step in range(2, 41)]
    for overflowed in (log_of([4.2] * 40, gradient=math.inf), Training.from_log([first, *later], 64)):
        assert overflowed.gradient is None and overflowed.advice.startswith("lower")


def test_loss_of_a_batch_at_its_best_temperature():
    images = torch.nn.functional.normalize(torch.randn(64, 8), dim=1).numpy()
    noise = torch.nn.functional.normalize(torch.randn(64, 8), dim=1).numpy()
    for texts, knows in ((images, True), (noise, False)):
        measured = batch_loss(images, texts, range(64), 16)
        assert measured["chance"] == pytest.approx(math.log(16)) and (measured["loss"] < 0.1) == knows
        assert measured["loss"] > 0.98 * measured["chance"] or knows
    # Equal captions are right together; a test smaller than a batch is one
    assert batch_loss(images[:4], noise[:4], [0, 0, 1, 1], 16)["chance"] == pytest.approx(math.log(2))


DEAD, ALIVE = log_of([4.2] * 40, gradient=1.0), log_of([4.2] * 20 + [2.0] * 20)
KNOWN_BY_HEART = log_of([4.2] * 20 + [1.5] * 20).with_test(4.1, 4.0)
COLLAPSES = log_of([1.0] + [4.0] * 40)


@pytest.mark.parametrize(
    ("dense", "sparse", "scores", "begins", "ends"),
    [
        (COLLAPSES, COLLAPSES, (0.5, 0.0, 0.0), "No verdict on experts.** Use `in/base`. To", "lower the learning"),
        (ALIVE, COLLAPSES, (0.2, 0.5, 0.1), "No verdict on experts.** Use `in/dense`", "lower the learning rate"),
        (COLLAPSES, ALIVE, (0.2, 0.1, 0.5), "No verdict on experts.** Use `in/sparse`", "lower the learning rate"),
        (DEAD, DEAD, (0.2, 0.2, 0.2), "No verdict on experts.** Use `in/base`", "raise the learning rate"),
        (KNOWN_BY_HEART, ALIVE, (0.2, 0.2, 0.2), "Whether experts helped is", "add pairs or lower the epochs"),
        (KNOWN_BY_HEART, ALIVE, (0.5, 0.2, 0.2), "Whether experts helped is", "add pairs or lower the epochs"),
        (ALIVE, ALIVE, (0.2, 0.2, 0.2), "Whether experts helped is", "raise the epochs"),
    ],
)
def test_the_answer_follows_from_the_outcome(dense, sparse, scores, begins, ends):
    rows = dict(zip(("base", "dense", "sparse"), scores, strict=True))
    results = [
        result(row, "learned", primary={"accuracy": "accuracy"}, metrics={"accuracy": score})
        for row, score in rows.items()
    ]
    row_trainings = {"dense": {"d_tuned": dense}, "sparse": {"s_tuned": sparse}}
    answered = answer(results, ["learned"], {row: f"in/{row}" for row in rows}, ["sparse"], row_trainings)
    told = f"**{answered.verdict}** {answered.advice}"
    outcomes = [f"`{name}` {end.outcome}. " for name, end in (("d_tuned", dense), ("s_tuned", sparse)) if end.outcome]
    assert told.startswith(f"**{''.join(outcomes)}{begins}") and ends in told
    assert ("raise" in told) == (ends.startswith("raise"))


@pytest.mark.slow
def test_the_report_of_a_fine_tuning(tmp_path, out):
    """Pictures of noise: at a rate of 0.5 all is lost; what is known by heart tells nothing of other pictures."""
    data, rng, lines = tmp_path / "data", np.random.default_rng(0), []
    data.mkdir()
    for number in range(64):
        colors = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(colors).resize((32, 32), Image.NEAREST).save(data / f"{number}.png")
        words = " ".join(symbol for bit, symbol in zip(f"{number:06b}", "abcdef", strict=True) if bit == "1")
        lines.append(json.dumps({"file_name": f"{number}.png", "caption": f"{words} {number}"}))
    (data / "metadata.jsonl").write_text("\n".join(lines))
    flags = [
        "--global_batch_size",
        "8",
        "--pictures.held_out",
        "0.5",
        "--pictures.validation",
        "0",
        "--sparse_kept.num_epochs",
        "5",
        "--dense_kept.num_epochs",
        "5",
    ]
    reports = {}
    for rate, epochs in (("0.5", "10"), ("3e-3", "60")):
        more = [*flags, "--learning_rate", rate, "--dense.num_epochs", epochs, "--model", str(out / "dense")]
        clip_moe.main(["finetune", str(data), str(tmp_path / rate), *more])
        reports[rate] = (tmp_path / rate / "report" / "report.md").read_text()
    dead, memorized = reports.values()
    assert "**`dense` did not leave chance. `dense_kept` did not" in dead and "chance. No verdict on experts.**" in dead
    assert "- `dense`: 40 steps, contrastive loss 2.08 (" in dead and "raise the" not in dead
    assert "**`dense` memorized its pairs." in memorized
    line = next(line for line in memorized.splitlines() if line.startswith("- `dense`: 240 steps"))
    assert ", of the test 2.0" in line and line.endswith("at its best temperature (chance 2.08): memorized its pairs")
