"""Verdicts by hand; test_claims_of_papers.py makes the committed page."""

import json
import math

import pytest

from model_cards.claims import write_claims
from model_cards.verdicts import (
    CANNOT_BE_TOLD,
    HOLDS,
    Claim,
    measure_claim,
)
from records.intervals import paired_interval


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


def test_a_difference_of_exactly_the_points_is_none():
    scores = {row: {"t": [{"m": score}] * 3} for row, score in (("sparse", 0.55), ("b", 0.51))}
    for by, verdict in ((3.0, HOLDS), (4.0, CANNOT_BE_TOLD)):  # 100 * 0.55 - 100 * 0.51 > 4
        claim = Claim(claim="c", place="p", better="sparse", than="b", scores={"t": ["m"]}, by=by)
        assert [score.verdict for score in measure_claim(claim, scores, "here")] == [verdict]
