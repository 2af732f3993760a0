"""The stage that reports the law's estimate for two models beside the measurement."""

import json

import pytest
from tiny_runs import run_stages
from transformers import CLIPConfig

from clip_moe.conversion.presets import PRESETS
from clip_moe.conversion.upcycle import shared_config, sparse_config
from clip_moe.data import names
from lab import ROOT
from lab.law.cases import Case
from lab.law.estimate import estimate, trained_model
from lab.law.fit import model_of_case
from lab.law.law import fitted_law, interval
from lab.law.stage import pairs_shown

TOWER = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1}
DATA = {"source": "names", "kinds": "256", "num_samples": 512, "in_memory": True}
INITIALIZED = {
    "name": "initialized",
    "stage": "initialize",
    "tokenizer": "training/symbol_clip",
    "projection_dim": 16,
    "text_config": {**TOWER, "max_position_embeddings": 64},
    "vision_config": {**TOWER, "image_size": 16, "patch_size": 8},
}
TRAIN = {"stage": "train", "data": DATA, "global_batch_size": 256, "learning_rate": 1e-3, "max_steps": 1}
UPCYCLED = {"name": "upcycled", "stage": "upcycle", "model": "base", "preset": "clip_up"}
UPCYCLED["changes"] = {"norm_topk_prob": True, "capacity_factor": None}
STAGES = [
    INITIALIZED,
    {"name": "base", **TRAIN, "model": "initialized"},
    UPCYCLED,
    {"name": "dense", **TRAIN, "model": "base", "max_steps": 2},
    {"name": "sparse", **TRAIN, "model": "upcycled"},
    {"name": "epochs", **TRAIN, "model": "base", "max_steps": None, "num_epochs": 1},
    {"name": "other", **TRAIN, "model": "base", "data": {**DATA, "num_samples": 1024}},
]
ESTIMATE = {"name": "both", "stage": "lab.law.stage:EstimateStage", "models": {"dense": "dense", "sparse": "sparse"}}
ESTIMATE["tasks"] = ["names_256"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return run_stages(tmp_path_factory.mktemp("runs"), [*STAGES, ESTIMATE])


def report_of(runs, folder, dense="dense", sparse="sparse", **settings):
    """The report of the stage on models of `runs`."""
    models = {"dense": str(runs / dense), "sparse": str(runs / sparse)}
    output = run_stages(folder, [{**ESTIMATE, "models": models, **settings}])
    return (output / "both" / "report.md").read_text(encoding="utf-8")


def test_the_report_begins_with_what_was_estimated_and_measured(runs, tmp_path, monkeypatch):
    """Also for models given as folders, and within the measured range, as if this case were in it."""
    report = (runs / "both" / "report.md").read_text(encoding="utf-8")
    assert "names has 512 captions. 256 are different: 256 to tell apart, each 2 times." in report
    assert (
        "*Estimated*, with experts: no verdict. times that training shows each caption to the dense model: 3" in report
    )
    assert pairs_shown(runs / "dense") == 3 * 256 and pairs_shown(runs / "sparse") == 2 * 256
    shares = []
    for row in ("dense", "sparse"):
        (file,) = (runs / "both").glob(f"*--{row}.json")
        metrics = json.loads(file.read_text(encoding="utf-8"))["metrics"]
        information = (metrics["image_to_text_information"] + metrics["text_to_image_information"]) / 2
        shares.append(max(0, (8 * information - 3) / 5))  # 256 names have 8 bits, of which 3 are told
    measured = f"*Measured*, on 256 pictures: {shares[1]:.0%} instead of {shares[0]:.0%}, "
    assert measured in report and report.index("*Measured*") < report.index("| model")
    law, cases = fitted_law()
    low = [{**cases[0], "exposures": 1, "sparse_exposures": 1}]
    monkeypatch.setattr("lab.law.estimate.fitted_law", lambda: (law, [*cases, *low]))
    assert "with experts: it should know " in report_of(runs, tmp_path)


def test_own_pictures_are_measured_in_bits(runs, tmp_path):
    """As built-in tasks are."""
    rows = names.NAMES.load("train", "web", 512, range(256))
    rows.remove_columns(["kind", "country", "facts"]).to_parquet(tmp_path / "own" / "train.parquet")
    own = {"source": str(tmp_path / "own"), "in_memory": True}
    stages = [{**stage, "data": own, "model": str(runs / stage["model"])} for stage in STAGES[3:5]]
    tasks = [{"task": "retrieval", "dataset": str(tmp_path / "own"), "split": "train"}]
    report = report_of(run_stages(tmp_path, stages), tmp_path / "estimate", tasks=tasks)
    assert "*Measured*, on 512 pictures: " in report and "R@1 text→image" in report


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"models": {"dense": "dense"}}, "has no sparse"),
        ({"tasks": ["symbols_zero_shot"]}, "both.tasks: the first is zero_shot; the law is of retrieval"),
        ({"dense": "epochs"}, "epochs was trained for epochs: the estimate needs max_steps"),
        ({"dense": "other"}, "dense and sparse were trained on different data"),
        ({"sparse": "dense"}, "both.models: sparse is not sparse"),
        ({"sparse": ROOT / "training" / "symbol_clip"}, "has no record of its training"),
    ],
    ids=["no sparse row", "classes", "epochs", "other data", "two dense", "no record"],
)
def test_what_the_law_says_nothing_of_is_refused_before_it_is_measured(runs, tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        report_of(runs, tmp_path, **settings)
    assert not [*tmp_path.glob("out/both*/*--*.json")]


def test_an_estimate_is_that_of_the_law_for_the_counts_of_the_models():
    """Models of a recipe are those of a case of the law."""
    case = Case("names", 1024, 16, 640, experts=8)
    size = {"max_position_embeddings": 32, "vocab_size": 512}
    dense = CLIPConfig(text_config={**TOWER, **size}, vision_config={**TOWER, "image_size": 16, "patch_size": 8})
    sparse = sparse_config(dense, PRESETS["clip_up"])
    shared = trained_model(shared_config(dense), 640)
    assert shared.experts == 0 and 2 * shared.dense == trained_model(dense, 640).dense
    by_case = model_of_case(case)
    assert trained_model(sparse, by_case.exposures) == by_case
    law, _ = fitted_law()
    estimated = estimate(law.facts(1024, "names"), trained_model(dense, 640), trained_model(sparse, by_case.exposures))
    low, high = interval(estimated.gains)
    assert f"a gain of {100 * low:+.0f} to {100 * high:+.0f} points" in estimated.sentence
