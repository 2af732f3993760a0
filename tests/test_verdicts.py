"""Verdicts on claims by hand, and what is wrong in a file of claims."""

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from evaluation.intervals import paired_interval
from evaluation.verdicts import (
    CANNOT_BE_TOLD,
    DOES_NOT_HOLD,
    HOLDS,
    Claim,
    deciding,
    measure_claim,
    read_claims,
    verdict_of,
    verdict_of_all,
)

CARDS = Path(__file__).parents[1] / "model_cards"


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ([1.0, 1.2, 1.4], HOLDS),  # 1.2 ± 0.5
        ([1, 2, 3], CANNOT_BE_TOLD),  # 2 ± 2.5
        ([0, 0, 0], CANNOT_BE_TOLD),
        ([0.1, 0.1, 0.1], HOLDS),  # models that no seed changes
        ([-1.0, -1.2, -1.4], DOES_NOT_HOLD),
        ([-0.1, -2, -5.9], CANNOT_BE_TOLD),
    ],
)
def test_verdict(differences, expected):
    assert verdict_of(paired_interval(differences, [0, 0, 0])) == expected


def test_an_interval_by_hand():
    """Student's t of two degrees of freedom is 4.303 at 97.5 %, and 6.205 at 98.75 %."""
    deviation = math.sqrt(((1 - 2) ** 2 + 0 + (3 - 2) ** 2) / 2)
    reach = 4.30265 * deviation / math.sqrt(3)
    assert paired_interval([11, 22, 33], [10, 20, 30]) == pytest.approx((2 - reach, 2 + reach), abs=1e-4)
    assert paired_interval([11, 22, 33], [10, 20, 30], comparisons=2)[1] == pytest.approx(
        2 + 6.20535 / math.sqrt(3), abs=1e-4
    )
    with pytest.raises(ValueError, match="two seeds or more of both, got 1 and 1"):
        paired_interval([1], [1])


def test_equal_models_on_the_whole_page():
    """All claims that are measured, of models that differ by chance alone: at most one verdict in twenty is wrong, of
    the headlines and of the others."""
    rng, wrong, number = np.random.default_rng(0), Counter(), Counter()
    claims = [claim for paper in read_claims(CARDS / "claims.yaml").values() for claim in paper.claims if claim.better]
    for _ in range(40):
        for one in claims:
            one = one.model_copy(update={"by": 0.0})
            scores = {
                row: {task: [dict(zip(metrics, rng.normal(size=len(metrics)), strict=True)) for _ in range(3)]
                      for task, metrics in one.scores.items()}
                for row in (one.better, *one.than)
            }  # fmt: skip
            verdicts = [measured.verdict for measured in measure_claim(one, scores, "here")]
            kind = "headlines" if one.headline else "others"
            wrong[kind] += verdict_of_all(verdicts) != CANNOT_BE_TOLD
            number[kind] += 1
    assert number["headlines"] >= 400 and number["others"] > 2500
    for kind in number:
        assert 0.005 < wrong[kind] / number[kind] < 0.05, kind


def test_each_rival_has_to_be_beaten():
    """Not the best mean alone: the other one varies more."""
    scores = {"sparse": [0.7, 0.71, 0.72], "best": [0.69, 0.7, 0.71], "varied": [0.6, 0.709, 0.755]}
    scores = {row: {"t": [{"m": score} for score in of_row]} for row, of_row in scores.items()}
    names = {"claim": "c", "place": "p", "better": "sparse", "scores": {"t": ["m"]}}
    (alone,) = measure_claim(Claim(**names, than="best"), scores, "here")
    (both,) = measure_claim(Claim(**names, than=["best", "varied"]), scores, "here")
    assert (alone.rival, alone.verdict) == ("best", HOLDS)
    assert (both.rival, both.verdict) == ("varied", CANNOT_BE_TOLD)


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ([HOLDS, HOLDS], HOLDS),
        ([HOLDS, CANNOT_BE_TOLD], CANNOT_BE_TOLD),
        ([CANNOT_BE_TOLD, DOES_NOT_HOLD, HOLDS], DOES_NOT_HOLD),
    ],
)
def test_verdict_of_several_scores(verdicts, expected):
    assert verdict_of_all(verdicts) == expected


def test_a_difference_of_exactly_the_points_is_none():
    scores = {"a": {"t": [{"m": 0.55}] * 3}, "b": {"t": [{"m": 0.51}] * 3}}  # 100 * 0.55 - 100 * 0.51 > 4
    one = Claim(claim="c", place="p", better="a", than="b", scores={"t": ["m"]}, by=4.0)
    assert measure_claim(one, scores, "here")[0].verdict == CANNOT_BE_TOLD


def test_the_score_that_decides():
    """The least difference of those with the worst verdict, not the least of all."""
    rival = {"a": 0.0, "b": 0.0, "c": 0.0}
    seeds = [{"a": 0.01, "b": 0.5, "c": 0.4}, {"a": 0.01, "b": 0.1, "c": 0.0}, {"a": 0.01, "b": 0.9, "c": 0.9}]
    scores = {"sparse": {"t": seeds}, "dense": {"t": [rival] * 3}}
    one = Claim(claim="c", place="p", better="sparse", than="dense", scores={"t": ["a", "b", "c"]})
    decides = deciding(measure_claim(one, scores, "here"))
    assert (decides.metric, decides.verdict) == ("c", CANNOT_BE_TOLD)
    assert decides.difference == pytest.approx(100 * (0.4 + 0.9) / 3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1]", "the file: .* dictionary"),
        ("", "the file: .* dictionary"),
        ("{}", "at least 1 item"),
        ("Paper: {results: r, comand: c, claims: []}", "no key 'comand': did you mean 'command'.*"),
        ("Paper: {results: r, command: c, claims: []}", "Paper.claims: .* at least 1"),
        ("Paper: {results: r, command: c, link: javascript:x, claims: []}", "Paper.link"),
        ("a: [", "is not valid YAML"),
        (b"\xff", "no text in UTF-8"),
    ],
)
def test_what_is_wrong_with_the_file(tmp_path, content, message):
    path = tmp_path / "claims.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=f"claims.yaml.*{message}"):
        read_claims(path)
