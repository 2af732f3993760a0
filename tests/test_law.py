"""The law of what dense and sparse models learn: its numbers by hand, its predictions from the committed points, and
its judge."""

import json
import math

import pytest
from documents import ROOT

from data.arguments import DataArguments
from evaluation.efficiency import count_captions
from evaluation.law import Capacity, Facts, Law, fitted_law, forecast
from model_cards.frontier import at_best_rate, of_budget
from model_cards.law import fit, fitted, known, of_rule, predict, read_points, seed_error
from model_cards.law_cases import Case, arguments, batch_size, costs, steps
from model_cards.law_outcomes import outcome
from records.yaml_files import read_yaml

CARD = ROOT / "model_cards" / "law"
LAW = Law(2.0, 0.5, 200.0, 1.0, 0.5, 2.0, {"icons": 2.0, "characters": 8.0}, 0.05)


def test_a_share_by_hand():
    """1,000 facts of 10 bits but for 2 that are told; 3,000 parameters and 2,000 of experts, which hold half."""
    facts = Facts(1024, told=2.0, difficulty=3.0)
    assert facts.bits == 1024 * 8
    half = 200 * 3 * (8 / 16) ** -1 * (1024 / 1000) ** 0.5
    by_hand = (1 - math.exp(-2 * (3000 + 0.5 * 2000) / 8192)) / (1 + (half / 640) ** 2)
    assert LAW.share(facts, Capacity(8, 3000, 2000), 640) == pytest.approx(by_hand)
    assert LAW.facts(500, "icons").difficulty == 2 and LAW.facts(500).difficulty == pytest.approx(4)
    assert LAW.probability(0) == 0.5 and LAW.probability(0.05) == pytest.approx(0.8413, abs=1e-4)
    assert LAW.reach(0.95) == pytest.approx(1.96 * 0.05, rel=1e-3)


def test_all_models_of_a_case_train_for_as_many_multiply_adds():
    sparse = Case("names", 1024, 12, 640, experts=8)
    budget = 1024 * 640 * costs("names", 12, 0, 2)[0]
    for case in (sparse, Case("names", 1024, 12, 640), Case("names", 1024, 24, 640, budget_width=12)):
        seed, own = (count * batch_size(case) for count in steps(case))
        dense, used = (costs("names", case.width, experts, 2)[0] for experts in (0, case.experts))
        assert seed * dense + own * used == pytest.approx(budget, rel=0.01)
    flags = dict(zip(arguments(sparse)[::2], arguments(sparse)[1::2], strict=True))
    assert flags["--rate"] == str(0.256 / 12) and flags["--stages"].endswith("upcycled,clip_up,sparse_score")


@pytest.mark.slow
def test_the_predictions_follow_from_the_points_that_were_committed_before():
    made = json.loads((CARD / "predictions.json").read_text(encoding="utf-8"))
    points = of_rule(read_points(CARD / "points.json"))
    law = fitted(points)
    assert law.gain_error == pytest.approx(made["law"]["gain_error"], rel=0.02)
    assert seed_error(points)[1] == made["freedom"]
    cases = read_yaml((CARD / "cases.yaml").read_text(encoding="utf-8"), "cases")
    for case, before in zip(cases, made["cases"], strict=True):
        assert predict(law, case).gain == pytest.approx(before["gain"], abs=0.005)


def test_a_law_is_found_again_in_points_that_follow_it():
    points = []
    for point in of_rule(read_points(CARD / "points.json")):
        facts = LAW.facts(point.facts, point.world)
        dense = costs(point.world, point.width, 0, 2)[1]
        share = LAW.share(facts, Capacity(point.width, dense, point.parameters - dense), point.exposures)
        bits = math.log2(point.facts)
        information = (facts.told + share * (bits - facts.told)) / bits
        points.append(type(point)(**{**vars(point), "information": information}))
        assert known(points[-1]) == pytest.approx(share)
    found = fit(points)
    assert found.bits_per_parameter == pytest.approx(2, rel=0.01) and found.slope == pytest.approx(2, rel=0.01)
    assert found.difficulty == pytest.approx(LAW.difficulty, rel=0.01)


@pytest.mark.parametrize(
    ("gains", "winner", "is_right", "is_inside"),
    [((0.2, 0.3), "sparse", True, False), ((-0.2,), "dense", False, False), ((0.05,), None, None, True)],
    ids=["right", "wrong", "inconclusive"],
)
def test_an_outcome_is_judged_by_its_seeds(gains, winner, is_right, is_inside):
    case = predict(LAW, {"world": "names", "facts": 512, "width": 8, "exposures": 640, "experts": 8, "why": "x"})
    made = {"sparse": vars(case.sparse), "rival": vars(case.rival), "winner": "sparse", "gain": 0.05, "reach": 0.08}
    (template, *_) = read_points(CARD / "points.json")
    points = []
    for seed, gain in enumerate(gains):
        for one, share in ((case.sparse, 0.5 + gain), (case.rival, 0.5)):
            size = costs(one.world, one.width, one.experts, 2)[1]
            values = {"world": "names", "facts": 512, "width": 8, "experts": one.experts, "parameters": size}
            values |= {"experts_per_token": 2 * bool(one.experts), "seed": seed, "rate": 0.032}
            values |= {"pairs": sum(steps(one)) * batch_size(one), "information": (3 + share * 6) / 9}
            points.append(type(template)(**{**vars(template), **values}))
    out = outcome(made, points, seed_error=0.03, freedom=14)
    assert (out.seeds, out.winner, out.is_right, out.is_inside) == (len(gains), winner, is_right, is_inside)
    assert out.gain == pytest.approx(sum(gains) / len(gains), abs=1e-3)
    assert outcome(made, points[:1], 0.03, 14) is None


def test_a_forecast_is_for_what_was_measured():
    law, cases = fitted_law()
    facts, dense, sparse = law.facts(1024, "names"), Capacity(8, 3488), Capacity(8, 3488, 7856)
    said = forecast(facts, dense, sparse, 1280, 1095)
    assert not said.outside and said.probability > 0.5
    near = said.nearest
    assert (near["facts"], near["width"], near["exposures"]) == (1024, 8, 1280)
    outside = forecast(Facts(10**6), Capacity(512, 10**8), Capacity(512, 10**8, 10**8), 1, 0.8).outside
    assert [sentence.partition(":")[0].split(" ")[0] for sentence in outside] == ["parameters", "different", "times"]
    assert len({tuple(sorted(case.items())) for case in cases}) == len(cases)


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
    points = [p for name in ("points", "outcome_points") for p in read_points(CARD / f"{name}.json")]
    frontier = of_budget(points, "names", 2048, 16, 640)
    assert {point.training // 10**10 for point in frontier} <= {39, 40, 41} and len({p.width for p in frontier}) >= 5
    best = at_best_rate(frontier)
    for (width, experts), of_seed in best.items():
        rivals = [p.recall for p in frontier if (p.width, p.experts, p.seed) == (width, experts, min(of_seed))]
        assert of_seed[min(of_seed)].recall == max(rivals)
