"""The page of claims, its picture, and verdicts by hand; test_claims_of_papers.py has the claims of the papers."""

import json
import math
import re

import pytest

from evaluation.figures import plt
from evaluation.intervals import paired_interval
from model_cards.claims import MARKS, write_claims
from model_cards.verdicts import (
    CANNOT_BE_TOLD,
    DOES_NOT_HOLD,
    HOLDS,
    Claim,
    deciding,
    measure_claim,
    verdict_of_all,
)

COMMIT = "Commit abc, torch 2."


def claim(**changes):
    scores = {"retrieval": ["recall"]}
    return {"claim": "it wins", "place": "Table 1", "better": "sparse", "than": "dense", "scores": scores, **changes}


LACKING = {"claim": "c", "place": "p", "missing": "a row"}


@pytest.fixture
def folder(tmp_path):
    """Claims of a paper with results of three seeds: sparse 60, 62, 67, dense 50, 51, 52, longer always 58."""
    (tmp_path / "results").mkdir()
    write_scores(tmp_path / "results", sparse=[0.60, 0.62, 0.67], dense=[0.5, 0.51, 0.52], longer=[0.58] * 3)
    (tmp_path / "results" / "seeds.md").write_text(f"| table |\n\n{COMMIT}\n")
    return tmp_path


def write_scores(folder, metric="recall", **scores):
    content = {row: {"retrieval": [{metric: score} for score in of]} for row, of in scores.items()}
    (folder / "seeds.json").write_text(json.dumps(content))


def page(folder, *claims, **paper):
    """The page of claims of one paper."""
    paper = {"results": "results", "command": "make it", "claims": claims or (claim(),), **paper}
    (folder / "claims.yaml").write_text(json.dumps({"Paper": paper}))
    write_claims(folder / "claims.yaml", folder / "claims.md")
    return (folder / "claims.md").read_text()


def rows(text):
    return [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in text.splitlines() if re.match(r"\| \d", line)]


def test_the_page(folder, capsys):
    """Differences of a number of points or more, the strongest of several rivals, notes, and what is not measured."""
    (folder / "shown.md").write_text("")
    verdicts = {
        "it wins": (claim(than=["dense", "longer"], note="of *interest*"), CANNOT_BE_TOLD),
        "lower end": (claim(by=5.4), HOLDS),  # the interval of +10, +11 and +15 is 5.43 to 18.57
        "above it": (claim(by=5.5), CANNOT_BE_TOLD),
        "below": (claim(by=18.5), CANNOT_BE_TOLD),
        "upper end": (claim(by=18.6), DOES_NOT_HOLD),
        "4 worse": (claim(better="dense", than="longer", by=-4), DOES_NOT_HOLD),  # it is 8, 7 and 6 points below
        "7.5 worse": (claim(better="dense", than="longer", by=-7.5), CANNOT_BE_TOLD),
        "10 worse": (claim(better="dense", than="longer", by=-10), HOLDS),
        "a | b\n<i>": (claim(place="`x`"), HOLDS),
        "elsewhere": ({"claim": "b", "place": "p", "shown_in": "shown.md"}, "see there"),
        "lacking": (LACKING, "not measured"),
    }
    claims = [one | {"claim": title} for title, (one, _) in verdicts.items()]
    text = page(folder, *claims, link="https://arxiv.org/abs/1", command="one\ntwo")
    found = rows(text)
    assert [row[-1] for row in found] == [verdict for _, verdict in verdicts.values()]
    figures = "retrieval recall: 63.0 against 58.0 of longer: +5.0 (-7.9 to +17.9), cannot be told"
    compared = "sparse against dense / longer; on retrieval (recall)"
    assert found[0] == ["1", "it wins", "Table 1", compared, figures, CANNOT_BE_TOLD]
    assert "63.0 against 51.0 of dense: +12.0 (+5.4 to +18.6)" in found[1][4]
    assert "dense against longer, at most 7.5 points worse; on retrieval (recall)" in found[6][3]
    assert found[8][1:3] == [r"a \| b \<i>", r"\`x\`"]
    assert "- 1: of *interest*\n- 5: nothing was tried yet to find the cause\n- 6: nothing" in text
    assert "## [Paper](https://arxiv.org/abs/1)" in text and "```bash\none\ntwo\n```" in text
    assert f"3 seeds: [results](results). {COMMIT}" in text
    assert re.search(r"\| Paper \| 3 +\| 2 +\| 4 +\| 1 +\| 1 ", text)
    assert "claims.png" not in text and not (folder / "claims.png").exists()  # there are no headlines
    write_claims.main([str(folder / "claims.yaml"), "--output", str(folder / "other.md")])
    assert "| Paper | 3 " in capsys.readouterr().out
    assert (folder / "other.md").read_text() == text
    (folder / "results" / "seeds.json").unlink()
    text = page(folder, claim(), LACKING)
    assert [row[-1] for row in rows(text)] == ["not measured"] * 2 and "There are no results yet." in text


def test_headlines_come_first(folder, monkeypatch):
    """In the picture, verdicts are told apart by color and by marker."""
    figures = []
    monkeypatch.setattr(plt, "close", figures.append)
    claims = [
        claim(claim="a", headline=None, than="longer"),
        claim(),
        claim(claim="b", better="dense", than="sparse"),
        claim(claim="c", than="longer", by=-3.0),
        LACKING | {"claim": "d"},
    ]
    for one, short in zip(claims[1:], ["first", "$second$", "third", "no row"], strict=True):
        one["headline"] = {"short": short} | ({"budget": "10 | 20 samples"} if one.get("better") else {})
    text = page(folder, *claims)
    headlines, appendix = text.split("## Appendix: all claims")
    assert [row[0] for row in rows(appendix)] == ["1", "2", "3", "4", "5"]
    first, *_, last = rows(headlines)
    difference = "retrieval recall: +12.0 (+5.4 to +18.6)"
    assert first == ["2", "it wins", r"10 \| 20 samples", difference, HOLDS, "[results](results/seeds.md)"]
    assert last == ["5", "d", "", "missing: a row", "not measured"]
    counts = r"holds: 1, does not hold: 1, cannot be told: 1, not measured: 1\."
    assert re.search(rf"!\[The differences .* {counts}\]\(claims\.png\)", headlines)
    assert (folder / "claims.png").read_bytes().startswith(b"\x89PNG")
    (figure,) = figures
    (axis,) = figure.axes
    points = {line.get_ydata()[0]: line for line in axis.lines if line.get_marker() in "oXD"}
    marks = {row: (point.get_color(), point.get_marker()) for row, point in points.items()}
    assert marks == {0: MARKS[HOLDS], 1: MARKS[DOES_NOT_HOLD], 2: MARKS[CANNOT_BE_TOLD]}
    assert [point.get_xdata()[0] for point in points.values()] == pytest.approx([12, -12, 5])
    intervals = {tuple(line.get_ydata()): line.get_xdata() for line in axis.lines if len(line.get_xdata()) == 2}
    assert intervals[0, 0] == pytest.approx([5.4, 18.6], abs=0.05) and {(1, 1), (2, 2)} < set(intervals)


def test_results_of_several_recipes(folder):
    more, both = folder / "more", {"results": ["results", "more"]}
    more.mkdir()
    (more / "seeds.md").write_text("Commit def, torch 2.\n")
    assert rows(page(folder, **both))[0][5] == "not measured"
    write_scores(more, dense=[0.5, 0.51, 0.52], dearer=[0.9] * 3)
    text = page(folder, claim(than=["dense", "dearer"]), **both)
    assert "against 90.0 of dearer" in rows(text)[0][4]
    assert f"[results](results). {COMMIT} [more](more). Commit def" in text
    write_scores(more, dense=[0.5, 0.51, 0.53])
    with pytest.raises(ValueError, match="Paper: retrieval of 'dense' differs between .*results and .*more: give one"):
        page(folder, **both)
    write_scores(more, dense=[0.5, 0.51], sparse=[0.6] * 3)
    with pytest.raises(ValueError, match="seeds.json.*the same 3 or more seeds, got 2, 3"):
        page(folder, **both)


def test_single_experts_are_rows(folder):
    """Of three seeds, routed 60, 62, 64 and expert 0 always 50."""
    paths = [folder / "results" / f"experts_{seed}.json" for seed in range(3)]
    contents = []
    for seed, score in enumerate((0.6, 0.62, 0.64)):
        metrics = {"pairs": {"routed": {"group": score}, "expert 0": {"group": 0.5}}}
        made = {"commit": "def" if seed else "abc", "versions": {"torch": "3"}, "source": "run"}
        contents.append({"metrics": metrics, "weights": f"{seed}", **made})
        paths[seed].write_text(json.dumps(contents[seed]))
    experts = claim(claim="c", better="routed", than="expert 0", scores={"pairs": ["group"]})
    text = page(folder, experts, claim(claim="b"))
    (*_, figures, _), (*_, of_models, _) = rows(text)
    assert figures == "pairs group: 62.0 against 50.0 of expert 0: +12.0 (+7.0 to +17.0), holds"
    assert of_models.startswith("retrieval recall: 63.0")
    assert f"{COMMIT} Single experts: commit abc, torch 3; commit def, torch 3." in text
    paths[2].write_text(json.dumps(contents[2] | {"weights": "0"}))
    with pytest.raises(ValueError, match="experts_.*: two are of the same weights"):
        page(folder, experts)
    paths[2].write_text(json.dumps(contents[2]))
    write_scores(folder / "results", routed=[0.9, 0.91, 0.92])
    with pytest.raises(ValueError, match="seeds.json and the experts_.*json beside it both have routed: rename"):
        page(folder, experts)


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
