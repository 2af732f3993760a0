"""The stage that sets what the law says of two models beside what came out."""

import pytest
from tiny_runs import run_stages

from evaluation.law import fitted_law, interval
from model_cards.law import trained_in_case
from model_cards.law_cases import Case

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
]
FORECAST = {
    "name": "both",
    "stage": "forecast",
    "data": DATA,
    "models": {"dense": "dense", "sparse": "sparse"},
    "tasks": ["names_256"],
}


def test_the_report_begins_with_prediction_and_outcome(tmp_path, capsys):
    out = run_stages(tmp_path, [*STAGES, FORECAST])
    report = (out / "both" / "report.md").read_text(encoding="utf-8")
    assert "names has 512 captions. 256 are different: 256 to tell apart, each 2 times." in report
    assert "*Predicted*, with experts: no verdict. times that training shows each: 3, and " in report
    assert "*Came out*: " in report and report.index("*Came out*") < report.index("| model")
    for change, message in (({"models": {"dense": "dense"}}, "has no sparse"),):
        with pytest.raises(ValueError, match=message):
            run_stages(tmp_path, [*STAGES, {**FORECAST, **change}])


def test_a_forecast_is_that_of_the_law_for_the_counts_of_the_models(tmp_path):
    """Models of a recipe are those of a case of the law."""
    from transformers import CLIPConfig

    from conversion.presets import PRESETS
    from conversion.upcycle import sparse_config
    from evaluation.forecast import forecast, trained

    case = Case("names", 1024, 16, 640, experts=8)
    size = {"max_position_embeddings": 32, "vocab_size": 512}
    dense = CLIPConfig(text_config={**TOWER, **size}, vision_config={**TOWER, "image_size": 16, "patch_size": 8})
    sparse = sparse_config(dense, PRESETS["clip_up"])
    by_case = trained_in_case(case)
    assert trained(sparse, by_case.exposures) == by_case
    law, _ = fitted_law()
    said = forecast(law.facts(1024, "names"), trained(dense, 640), trained(sparse, by_case.exposures))
    low, high = interval(said.gains)
    assert f"a gain of {100 * low:+.0f} to {100 * high:+.0f} points" in said.sentence
