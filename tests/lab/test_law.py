"""The law of what dense and sparse models learn: its numbers by hand, its predictions from the committed points, its
judge, and the stage that reports its estimate beside the measurement."""

import dataclasses
import json
import math

import pytest
from tiny_runs import DENSE, run_stages
from transformers import CLIPConfig

from clip_moe.conversion.presets import PRESETS
from clip_moe.conversion.upcycle import shared_config, sparse_config
from clip_moe.data.arguments import DataArguments
from clip_moe.engine.yaml_files import read_yaml
from lab import ROOT
from lab.cards.frontier import at_best_rate, points_of_budget
from lab.law.cases import Case, arguments, batch_size, costs, steps
from lab.law.estimate import count_captions, estimate, trained_model, unmeasured_experts
from lab.law.fit import at_rule_rate, fitted, model_of_case, predict, read_points
from lab.law.law import FITTED, Errors, Facts, Law, TrainedModel, fitted_law, interval, law_of, probability
from lab.law.outcomes import write_outcomes
from lab.law.stage import pairs_shown

CARD = ROOT / "model_cards" / "law"
LAW = Law(2.0, 0.5, 200.0, 1.0, 0.5, 0.5, 3.0, 1.0, 1.1, {"icons": 2.0, "characters": 8.0}, Errors(0.2, 0.1, 0.2, 0.3))


def test_a_share_by_hand():
    """1,000 facts of 10 bits but for 2 that are told; 3,000 parameters and 2,000 of experts, which hold half."""
    facts = Facts(1024, told=2.0, difficulty=3.0, slope=2.0, pace=1.1)
    assert facts.bits == 1024 * 8
    half = 200 * 3 * (1024 / 1000) ** 0.5 * (8 / 16) ** (0.5 * math.log(8 / 16) - 1)
    held = 1 - math.exp(-2 * (3000 + 0.5 * 2000) / 8192)
    assert LAW.share(facts, TrainedModel(8, 3000, 640, 2000)) == pytest.approx(held / (1 + (half / 1.1 / 640) ** 2))
    held = 1 - math.exp(-2 * 3000 / 8192)
    assert LAW.share(facts, TrainedModel(8, 3000, 640)) == pytest.approx(held / (1 + (half / 640) ** 2))
    names, icons, other = (LAW.facts(500, world) for world in ("names", "icons", None))
    assert (names.told, names.difficulty, names.slope, names.pace, names.doubt) == (3, 1, 3, 1.1, 0)
    assert (icons.told, icons.difficulty, icons.slope, icons.pace, icons.doubt) == (0, 2, 1, 1, 0)
    assert other.difficulty == pytest.approx(4) and other.doubt == pytest.approx(math.log(4) * math.sqrt(1.5 / 2))


def test_drawn_gains_have_the_errors_of_the_law():
    """Two models alike differ by their own errors alone, and by more where one is wider."""
    facts, one = LAW.facts(1000, "names"), TrainedModel(16, 10**6, 200)
    drawn = LAW.gains(facts, one, one)  # full, half learned: a share of 1/2, whose derivative by log half is -slope / 4
    assert drawn.std() == pytest.approx(3 / 4 * 0.1 * math.sqrt(2), rel=0.15)
    assert probability(drawn) == pytest.approx(0.5, abs=0.02)
    low, high = interval(drawn)
    assert ((drawn > low) & (drawn < high)).mean() == pytest.approx(0.9, abs=0.001)
    assert LAW.gains(facts, one, TrainedModel(16.01, 10**6, 200)).std() > 1.5 * drawn.std()


def test_all_models_of_a_case_train_for_as_many_multiply_adds():
    sparse = Case("names", 1024, 12, 640, experts=8)
    budget = 1024 * 640 * costs("names", 12, 0, 2)[0]
    for case in (sparse, Case("names", 1024, 12, 640), Case("names", 1024, 24, 640, budget_width=12)):
        seed, own = (count * batch_size(case) for count in steps(case))
        dense, used = (costs("names", case.width, experts, 2)[0] for experts in (0, case.experts))
        assert seed * dense + own * used == pytest.approx(budget, rel=0.01)
    flags = dict(zip(arguments(sparse)[::2], arguments(sparse)[1::2], strict=True))
    assert flags["--rate"] == str(0.256 / 12) and flags["--stages"].endswith("upcycled,clip_up,sparse_score")


def test_experts_that_are_parts_of_an_ffn_count_as_such(tmp_path):
    """32 quarters have the parameters of 8 experts and more routers; their rival is a dense model as any other."""
    case = {"world": "names", "facts": 1024, "width": 16, "exposures": 640, "experts": 32, "experts_per_token": 4}
    quarters, whole = Case(**case, parts=4), Case("names", 1024, 16, 640, experts=8)
    added, added_whole = (model_of_case(one).experts for one in (quarters, whole))
    assert added_whole < added < 1.1 * added_whole
    predicted = predict(fitted_law()[0], case | {"parts": 4, "why": "narrow"})
    assert predicted.rival == Case("names", 1024, 16, 640, experts_per_token=4, budget_width=16)
    (point, *_) = json.loads((CARD / "points.json").read_text(encoding="utf-8"))
    (tmp_path / "points.json").write_text(json.dumps([point, point | {"parts": 4}]))
    assert [point.parts for point in read_points(tmp_path / "points.json")] == [1, 4]


@pytest.mark.slow
def test_the_predictions_follow_from_the_points_that_were_committed_before():
    made = json.loads((CARD / "predictions.json").read_text(encoding="utf-8"))
    points = at_rule_rate(read_points(CARD / "points.json"))
    law = fitted(points)
    for name, error in vars(law.errors).items():
        assert error == pytest.approx(made["law"]["errors"][name], rel=0.1)
    cases = read_yaml((CARD / "cases.yaml").read_text(encoding="utf-8"), "cases")
    for case, before in zip(cases, made["cases"], strict=True):
        assert predict(law, case).gain == pytest.approx(before["gain"], abs=0.005)


OUTSIDE = {
    "different captions: 10,000": (10_000, {"dense": 50_000}, {"experts": 110_000}),
    "parameters of the dense model's layers: 800": (256, {"dense": 800}, {"experts": 1800}),
    "bits to remember, for each of these: 0.0256": (256, {"dense": 50_000}, {"experts": 110_000}),
    "hidden size: 64": (1024, {"width": 64}, {}),
    "parameters that experts add, for each of the dense model: 4.82": (1024, {}, {"experts": 16_800}),
    "times that training shows each caption to the dense model: 40": (1024, {"exposures": 40}, {"exposures": 70}),
    "to the sparse model: 5,120": (1024, {}, {"exposures": 5120}),
}


@pytest.mark.parametrize("begins", OUTSIDE)
def test_a_verdict_is_for_what_was_measured(begins):
    """Each bound alone: the sentence says which was left, by how much, and what was measured."""
    (law, _), (number, dense, sparse) = fitted_law(), OUTSIDE[begins]
    dense = dataclasses.replace(TrainedModel(8, 3488, 1280), **dense)
    sparse = dataclasses.replace(dense, **{"exposures": 1095, "experts": 7856, **sparse})
    estimated = estimate(dataclasses.replace(law.facts(1024, "names"), number=number), dense, sparse)
    (sentence,) = estimated.outside
    assert sentence.startswith(f"{begins}, and ") and sentence.endswith(" were measured")
    assert not len(estimated.gains)


def test_the_law_in_use_is_the_one_that_was_tested():
    content = json.loads((CARD / "predictions.json").read_text(encoding="utf-8"))
    assert fitted_law()[0] == law_of(content["law"])


@pytest.mark.slow
def test_the_outcomes_are_those_of_the_points(tmp_path, monkeypatch):
    """Right, wrong and inconclusive; also the counts of winners, those of the rule of one number, and the dead runs
    that are left out."""
    monkeypatch.setattr("lab.law.outcomes.FITTED", tmp_path / "law.json")
    points = [CARD / "points.json", CARD / "outcome_points.json"]
    write_outcomes(CARD / "predictions.json", points, tmp_path)
    for name in ("outcomes.md", "outcomes.json"):
        assert (tmp_path / name).read_text() == (CARD / name).read_text()
    assert (tmp_path / "law.json").read_text() == FITTED.read_text()
    dead = read_points(*points, dead=True)
    assert [(p.world, p.facts, p.seed) for p in dead] == [("characters", 1024, 2), ("molecules", 512, 0)]
    assert not {id(point) for point in dead} & {id(point) for point in read_points(*points)}


def test_captions_of_data_are_counted_as_a_model_reads_them(tmp_path):
    (tmp_path / "pairs.csv").write_text("image,caption\na.png,a red fox\nb.png,A  red fox\nc.png,a hen\nd.png,a hen\n")
    data = DataArguments(source=str(tmp_path / "pairs.csv"), image_root=str(tmp_path))
    for models in (["ViT-B/32"], [str(ROOT / "training" / "symbol_clip")]):
        counted = count_captions(data, models)
        assert (counted.pairs, counted.texts, counted.different) == (4, 3, 2)
        assert "4 captions. 3 are different, 1 of which are read as another one is: 2 to tell apart" in counted.sentence
    (tmp_path / "pairs.csv").write_text("image,caption\na.png,a fox\nb.png,a fox\n")
    with pytest.raises(ValueError, match="all of its 2 captions are alike: there is nothing to tell apart"):
        count_captions(data, ["ViT-B/32"])


def test_the_frontier_is_of_one_budget_and_of_the_best_rates():
    """A model and seed counts once."""
    with pytest.raises(ValueError, match="two points of one model and seed"):
        read_points(CARD / "points.json", CARD / "points.json")
    points = read_points(CARD / "points.json")
    frontier = points_of_budget(points, "names", 2048, 16, 640)
    assert {point.training // 10**10 for point in frontier} <= {39, 40, 41} and len({p.width for p in frontier}) >= 5
    best = at_best_rate(frontier)
    for (width, experts), seed_points in best.items():
        rivals = [p.recall for p in frontier if (p.width, p.experts, p.seed) == (width, experts, min(seed_points))]
        assert seed_points[min(seed_points)].recall == max(rivals)


# --- the stage

DATA = {"source": "names", "kinds": "256", "num_samples": 512, "in_memory": True}
TRAIN = {"stage": "train", "data": DATA, "global_batch_size": 256, "learning_rate": 1e-3, "max_steps": 1}
UPCYCLED = {"name": "upcycled", "stage": "upcycle", "model": "base", "preset": "clip_up"}
UPCYCLED["changes"] = {"norm_topk_prob": True, "capacity_factor": None}
TOWERS = {f"{tower}_config": DENSE[f"{tower}_config"] | {"intermediate_size": 64} for tower in ("text", "vision")}
STAGES = [
    DENSE | TOWERS | {"name": "initialized", "processor": "names"},
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


def test_the_report_begins_with_what_was_estimated_and_measured(runs):
    report = (runs / "both" / "report.md").read_text(encoding="utf-8")
    assert "names has 512 captions. 256 are different: 256 to tell apart, each 2 times." in report
    assert "no verdict. times that training shows each caption to the dense model: 3" in report
    assert pairs_shown(runs / "dense") == 3 * 256 and pairs_shown(runs / "sparse") == 2 * 256
    shares = []
    for row in ("dense", "sparse"):
        (file,) = (runs / "both").glob(f"*--{row}.json")
        metrics = json.loads(file.read_text(encoding="utf-8"))["metrics"]
        information = (metrics["image_to_text_information"] + metrics["text_to_image_information"]) / 2
        shares.append(max(0, (8 * information - 3) / 5))  # 256 names have 8 bits, of which 3 are told
    measured = f"*Measured*, on 256 pictures: {shares[1]:.0%} instead of {shares[0]:.0%}, "
    assert measured in report and report.index("*Measured*") < report.index("| model")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tasks": ["symbols_zero_shot"]}, "both.tasks: the first is zero_shot; the law is of retrieval"),
        ({"dense": "epochs"}, "epochs was trained for epochs: the estimate needs max_steps"),
        ({"dense": "other"}, "dense and sparse were trained on different data"),
        ({"sparse": "dense"}, "both.models: sparse is not sparse"),
        ({"sparse": ROOT / "training" / "symbol_clip"}, "has no record of its training"),
    ],
    ids=["classes", "epochs", "other data", "two dense", "no record"],
)
def test_what_the_law_says_nothing_of_is_refused_before_it_is_measured(runs, tmp_path, settings, message):
    models = {row: str(runs / settings.pop(row, row)) for row in ("dense", "sparse")}
    with pytest.raises(ValueError, match=message):
        run_stages(tmp_path, [ESTIMATE | {"models": models} | settings])
    assert not [*tmp_path.glob("out/both*/*--*.json")]


def test_an_estimate_is_that_of_the_law_for_the_counts_of_the_models():
    """Models of a recipe are those of a case of the law."""
    case = Case("names", 1024, 16, 640, experts=8)
    tower = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1}
    text = {**tower, "max_position_embeddings": 32, "vocab_size": 512}
    dense = CLIPConfig(text_config=text, vision_config={**tower, "image_size": 16, "patch_size": 8})
    sparse = sparse_config(dense, PRESETS["clip_up"])
    shared = trained_model(shared_config(dense), 640)
    assert shared.experts == 0 and 2 * shared.dense == trained_model(dense, 640).dense
    told = "experts 0.25 of the FFN wide, 4 a token, and whole FFNs, 2 a token, were measured"
    assert unmeasured_experts(sparse_config(dense, PRESETS["dense_price"])) == [told]
    assert not unmeasured_experts(sparse)
    by_case = model_of_case(case)
    assert trained_model(sparse, by_case.exposures) == by_case
    law, _ = fitted_law()
    estimated = estimate(law.facts(1024, "names"), trained_model(dense, 640), trained_model(sparse, by_case.exposures))
    assert not estimated.outside and estimated.sparse > estimated.dense and probability(estimated.gains) > 0.5
    assert [estimated.nearest[name] for name in ("facts", "width", "exposures")] == [1024, 16, 640]
    low, high = interval(estimated.gains)
    assert f"a gain of {100 * low:+.0f} to {100 * high:+.0f} points" in estimated.sentence
