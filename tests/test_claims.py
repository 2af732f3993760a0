"""Verdicts by hand; test_claims_of_papers.py makes the committed page."""

import json
import math

import pytest

from evaluation.intervals import paired_interval
from model_cards.claims import write_claims
from model_cards.verdicts import (
    CANNOT_BE_TOLD,
    DOES_NOT_HOLD,
    HOLDS,
    Claim,
    deciding,
    measure_claim,
    verdict_of_all,
)


def test_scores_that_do_not_go_together_are_refused(tmp_path):
    def write_scores(name, **scores):
        (tmp_path / name).mkdir(exist_ok=True)
        content = {row: {"retrieval": [{"recall": score} for score in of]} for row, of in scores.items()}
        (tmp_path / name / "seeds.json").write_text(json.dumps(content))

    write_scores("results", sparse=[0.60, 0.62, 0.67], dense=[0.5, 0.51, 0.52])
    for better, scores, message in (
        ("sparse", {"dense": [0.5, 0.51, 0.53]}, "retrieval of 'dense' differs between .*results and .*more: give one"),
        ("sparse", {"dense": [0.5, 0.51], "wide": [0.6] * 3}, "seeds.json.*the same 3 or more seeds, got 2, 3"),
        ("spars", {"wide": [0.6] * 3}, "more has no 'spars', as recall of 'spars' on retrieval needs it"),
    ):
        write_scores("more", **scores)
        claim = {"claim": "it wins", "place": "Table 1", "better": better, "than": "dense"}
        claims = [claim | {"scores": {"retrieval": ["recall"]}}]
        paper = {"results": ["results", "more"], "command": "make it", "claims": claims}
        (tmp_path / "claims.yaml").write_text(json.dumps({"Paper": paper}))
        with pytest.raises(ValueError, match=f"claims.yaml: Paper: .*{message}"):
            write_claims(tmp_path / "claims.yaml", tmp_path / "claims.md")
    assert not (tmp_path / "claims.md").exists()


def test_an_interval_by_hand():
    """Student's t of two degrees of freedom is 4.303 at 97.5 %, and 6.205 at 98.75 %."""
    for comparisons, t in ((1, 4.30265), (2, 6.20535)):
        reach = t * math.sqrt(((1 - 2) ** 2 + 0 + (3 - 2) ** 2) / 2) / math.sqrt(3)
        found = paired_interval([11, 22, 33], [10, 20, 30], comparisons)
        assert found == pytest.approx((2 - reach, 2 + reach), abs=1e-4)


def measured(than, scores, metrics=("m",), by=0.0):
    one = Claim(claim="c", place="p", better="sparse", than=than, scores={"t": list(metrics)}, by=by)
    return measure_claim(one, {row: {"t": of} for row, of in scores.items()}, "here")


def test_each_rival_has_to_be_beaten():
    """Not the best mean alone: the other one varies more. A difference of exactly the points is none."""
    scores = {"sparse": [0.7, 0.71, 0.72], "best": [0.69, 0.7, 0.71], "varied": [0.6, 0.709, 0.755]}
    scores = {row: [{"m": score} for score in of_row] for row, of_row in scores.items()}
    for than, rival, verdict in (("best", "best", HOLDS), (["best", "varied"], "varied", CANNOT_BE_TOLD)):
        (found,) = measured(than, scores)
        assert (found.rival, found.verdict) == (rival, verdict)
    equal = {"sparse": [{"m": 0.55}] * 3, "b": [{"m": 0.51}] * 3}  # 100 * 0.55 - 100 * 0.51 > 4
    assert [measured("b", equal, by=by)[0].verdict for by in (3.0, 4.0)] == [HOLDS, CANNOT_BE_TOLD]


def test_the_score_that_decides():
    """The least difference of those with the worst verdict, not the least of all."""
    seeds = [{"a": 0.01, "b": 0.5, "c": 0.4}, {"a": 0.01, "b": 0.1, "c": 0.0}, {"a": 0.01, "b": 0.9, "c": 0.9}]
    decides = deciding(measured("dense", {"sparse": seeds, "dense": [{"a": 0.0, "b": 0.0, "c": 0.0}] * 3}, "abc"))
    assert (decides.metric, decides.verdict) == ("c", CANNOT_BE_TOLD)
    assert decides.difference == pytest.approx(100 * (0.4 + 0.9) / 3)
    assert verdict_of_all([CANNOT_BE_TOLD, DOES_NOT_HOLD, HOLDS]) == DOES_NOT_HOLD
