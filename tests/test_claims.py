"""Verdicts on claims by hand, and what is wrong in a file of claims. The claims of the four papers are in
test_claims_of_papers.py."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from evaluation.claims import (
    CANNOT_BE_TOLD,
    DOES_NOT_HOLD,
    HOLDS,
    Claim,
    main,
    measure_claim,
    read_claims,
    verdict_of,
    verdict_of_all,
    write_claims,
)
from evaluation.intervals import paired_interval

CARDS = Path(__file__).parents[1] / "model_cards"
COMMIT = "Commit abc, torch 2."


def claim(**changes):
    return {
        "claim": "it wins",
        "place": "Table 1",
        "better": "sparse",
        "than": "dense",
        "scores": {"retrieval": ["recall"]},
        **changes,
    }


@pytest.fixture
def folder(tmp_path):
    """Claims of a paper with results of three seeds: sparse 60, 62, 67, dense 50, 51, 52, longer always 58."""
    (tmp_path / "results").mkdir()
    write_scores(
        tmp_path / "results" / "seeds.json", sparse=[0.60, 0.62, 0.67], dense=[0.5, 0.51, 0.52], longer=[0.58] * 3
    )
    (tmp_path / "results" / "seeds.md").write_text(f"| table |\n\n{COMMIT}\n")
    return tmp_path


def write_scores(path, **scores):
    path.write_text(json.dumps({row: {"retrieval": [{"recall": s} for s in of]} for row, of in scores.items()}))


def page(folder, *claims, **paper):
    """The page of claims of one paper."""
    paper = {"results": "results", "command": "make it", "claims": claims or (claim(),), **paper}
    (folder / "claims.yaml").write_text(json.dumps({"Paper": paper}))
    write_claims(folder / "claims.yaml", folder / "claims.md")
    return (folder / "claims.md").read_text()


def rows(text):
    return [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in text.splitlines() if re.match(r"\| \d", line)]


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
    """All claims that are measured, of models that differ by chance alone: at most one verdict in twenty is wrong."""
    rng, wrong, number = np.random.default_rng(0), 0, 0
    claims = [claim for paper in read_claims(CARDS / "claims.yaml").values() for claim in paper.claims if claim.better]
    for _ in range(30):
        for one in claims:
            one = one.model_copy(update={"by": 0.0})
            scores = {
                row: {task: [dict(zip(metrics, rng.normal(size=len(metrics)), strict=True)) for _ in range(3)]
                      for task, metrics in one.scores.items()}
                for row in (one.better, *one.than)
            }  # fmt: skip
            verdicts = [measured.verdict for measured in measure_claim(one, scores, "here")]
            wrong, number = wrong + (verdict_of_all(verdicts) != CANNOT_BE_TOLD), number + 1
    assert number > 1500 and 0.005 < wrong / number < 0.05


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


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        (0, HOLDS),  # +10, +11, +15
        (5.4, HOLDS),  # the lower end
        (5.5, CANNOT_BE_TOLD),
        (18.5, CANNOT_BE_TOLD),
        (18.6, DOES_NOT_HOLD),  # the upper end, 18.57
    ],
)
def test_a_least_difference(folder, by, expected):
    ((*_, figures, verdict),) = rows(page(folder, claim(by=by)))
    assert verdict == expected and "63.0 against 51.0 of dense: +12.0 (+5.4 to +18.6)" in figures


def test_at_most_some_points_worse(folder):
    """dense is 8, 7 and 6 points below longer."""
    by = {"-4": -4, "-7.5": -7.5, "-10": -10}
    found = rows(page(folder, *(claim(claim=t, better="dense", than="longer", by=b) for t, b in by.items())))
    assert [row[-1] for row in found] == [DOES_NOT_HOLD, CANNOT_BE_TOLD, HOLDS]
    assert "dense against longer, at most 7.5 points worse; on retrieval (recall)" in found[1][3]


def test_a_difference_of_exactly_the_points_is_none():
    scores = {"a": {"t": [{"m": 0.55}] * 3}, "b": {"t": [{"m": 0.51}] * 3}}  # 100 * 0.55 - 100 * 0.51 > 4
    one = Claim(claim="c", place="p", better="a", than="b", scores={"t": ["m"]}, by=4.0)
    assert measure_claim(one, scores, "here")[0].verdict == CANNOT_BE_TOLD


def test_the_strongest_of_several_counts(folder):
    ((number, text, place, compared, figures, verdict),) = rows(page(folder, claim(than=["dense", "longer"])))
    assert (number, text, place, verdict) == ("1", "it wins", "Table 1", CANNOT_BE_TOLD)
    assert compared == "sparse against dense / longer; on retrieval (recall)"
    assert figures == "retrieval recall: 63.0 against 58.0 of longer: +5.0 (-7.9 to +17.9), cannot be told"


def test_the_page_says_what_was_run(folder):
    text = page(folder, link="https://arxiv.org/abs/1", command="one\ntwo")
    assert "## [Paper](https://arxiv.org/abs/1)" in text and "```bash\none\ntwo\n```" in text
    assert f"3 seeds: [results](results). {COMMIT}" in text
    assert re.search(r"\| Paper \| 1 +\| 0 +\| 0 +\| 0 +\| 0 ", text)


def test_notes(folder):
    worse = {"better": "dense", "than": "sparse"}
    text = page(folder, claim(note="of *interest*"), claim(claim="b", **worse), claim(claim="c", **worse, note="tried"))
    assert "- 1: of *interest*\n- 2: nothing was tried yet to find the cause\n- 3: tried\n" in text


def test_what_is_not_measured(folder):
    (folder / "shown.md").write_text("")
    elsewhere = {"claim": "b", "place": "p", "shown_in": "shown.md"}
    lacking = {"claim": "c", "place": "p", "missing": "a row"}
    verdicts = [row[-1] for row in rows(page(folder, claim(), elsewhere, lacking))]
    assert verdicts == [HOLDS, "see there", "not measured"]
    (folder / "shown.md").unlink()
    (folder / "results" / "seeds.json").unlink()
    text = page(folder, claim(), elsewhere, lacking)
    assert [row[-1] for row in rows(text)] == ["not measured"] * 3 and "There are no results yet." in text


def test_results_of_several_recipes(folder):
    (folder / "more").mkdir()
    (folder / "more" / "seeds.md").write_text("Commit def, torch 2.\n")
    both = {"results": ["results", "more"]}
    assert rows(page(folder, **both))[0][5] == "not measured"
    write_scores(folder / "more" / "seeds.json", dense=[0.5, 0.51, 0.52], dearer=[0.9] * 3)
    text = page(folder, claim(than=["dense", "dearer"]), **both)
    assert "against 90.0 of dearer" in rows(text)[0][4]
    assert f"[results](results). {COMMIT} [more](more). Commit def" in text
    write_scores(folder / "more" / "seeds.json", dense=[0.5, 0.51, 0.53])
    with pytest.raises(ValueError, match="Paper: retrieval of 'dense' differs between .*results and .*more: give one"):
        page(folder, **both)
    write_scores(folder / "more" / "seeds.json", dearer=[0.9] * 4)
    with pytest.raises(ValueError, match="results and .*more have different numbers of seeds"):
        page(folder, **both)


@pytest.fixture
def experts(folder):
    """Adds single experts to the results: of three seeds, routed 60, 62, 64 and expert 0 always 50."""
    for seed, score in enumerate((0.6, 0.62, 0.64)):
        metrics = {"pairs": {"routed": {"group": score}, "expert 0": {"group": 0.5}}}
        content = {
            "metrics": metrics,
            "weights": f"{seed}",
            "commit": "def" if seed else "abc",
            "versions": {"torch": "3"},
            "source": "run",
        }
        (folder / "results" / f"experts_{seed}.json").write_text(json.dumps(content))
    return {"better": "routed", "than": "expert 0", "scores": {"pairs": ["group"]}}


def test_rows_of_seeds_are_not_taken_for_single_experts(folder, experts):
    write_scores(folder / "results" / "seeds.json", routed=[0.9, 0.91, 0.92])
    with pytest.raises(ValueError, match="seeds.json and the experts_.*json beside it both have routed: rename"):
        page(folder, claim(**experts))


def test_single_experts_are_rows(folder, experts):
    text = page(folder, claim(**experts), claim(claim="b"))
    (*_, figures, _), (*_, of_models, _) = rows(text)
    assert figures == "pairs group: 62.0 against 50.0 of expert 0: +12.0 (+7.0 to +17.0), holds"
    assert of_models.startswith("retrieval recall: 63.0")
    assert f"{COMMIT} Single experts: commit abc, torch 3; commit def, torch 3." in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": "0"}, "experts_.*: two are of the same weights"),
        ({"metrics": {"other": {}}}, "pairs of 'routed' has no metric 'group'"),
        ({"metrics": {"pairs": {"routed": {"group": 60}}}}, "experts_2.json is damaged"),
        (None, "experts_2.json"),
    ],
)
def test_single_experts_that_cannot_be_used(folder, experts, change, message):
    path = folder / "results" / "experts_2.json"
    content = json.loads(path.read_text())
    path.unlink()
    if change:
        path.write_text(json.dumps(content | change))
    with pytest.raises((ValueError, OSError), match=message):
        page(folder, claim(**experts))


def test_any_text_is_only_text(folder):
    ((_, text, place, *_),) = rows(page(folder, claim(claim="a | b\n<i>", place="`x`")))
    assert text == r"a \| b \<i>" and place == r"\`x\`"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"betr": "x"}, "there is no key 'betr': did you mean 'better'?"),
        ({"better": "spars"}, "there is no row 'spars' in .*results; there are sparse, dense, longer"),
        ({"than": ["dense", "nope"]}, "there is no row 'nope'"),
        ({"scores": {"pairs": ["recall"]}}, "'sparse' has no task 'pairs' in .*; there are retrieval"),
        ({"scores": {"retrieval": ["group"]}}, "retrieval of 'sparse' has no metric 'group' in .*; there are recall"),
        ({"scores": {"retrieval": []}}, "scores.retrieval"),
        ({"scores": {"retrieval": ["recall", "recall"]}}, "name a metric twice"),
        ({"than": []}, "needs either better, than and scores, or shown_in, or missing"),
        ({"missing": "a row"}, "needs either better"),
        ({"better": None, "than": [], "scores": {}}, "needs either better"),
        ({"than": "sparse"}, "name a row twice"),
        ({"than": ["dense", "dense"]}, "name a row twice"),
        ({"by": True}, "claims.0.by: .* number"),
        ({"by": 101}, "claims.0.by"),
        ({"claim": " "}, "claims.0.claim"),
    ],
)
def test_what_is_wrong_with_a_claim(folder, changes, message):
    with pytest.raises(ValueError, match=f"claims.yaml: .*{message}"):
        page(folder, claim(**changes))
    assert not (folder / "claims.md").exists()


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


def test_a_claim_stands_there_once(folder):
    with pytest.raises(ValueError, match="Paper.claims: .*the claim 'it wins' stands there twice"):
        page(folder, claim(), claim(better="longer"))


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ({"sparse": [0.6, 0.7], "dense": [0.5, 0.5]}, "the same 3 or more seeds, got 2"),
        ({"sparse": [0.6, 0.7, 0.8], "dense": [0.5, 0.5]}, "the same 3 or more seeds, got 2, 3"),
        ({}, "the same 3 or more seeds, got none"),
        ({"sparse": [0.6, 0.7, float("nan")]}, "is damaged: sparse.retrieval.2.recall: .*got nan"),
        ({"sparse": [0.6, 0.7, 60]}, "is damaged: sparse.retrieval.2.recall: .*got 60"),
        ({"sparse": [0.6, 0.7, "0.6"]}, "is damaged: sparse.retrieval.2.recall"),
    ],
)
def test_results_that_cannot_be_used(folder, scores, message):
    write_scores(folder / "results" / "seeds.json", **scores)
    with pytest.raises(ValueError, match=f"seeds.json.*{message}"):
        page(folder)


def test_results_that_do_not_say_their_commit(folder):
    (folder / "results" / "seeds.md").write_text("| table |")
    with pytest.raises(ValueError, match="seeds.md does not say the commit: make it again"):
        page(folder)


def test_command(folder, capsys):
    page(folder)
    main([str(folder / "claims.yaml"), "--output", str(folder / "other.md")])
    assert "| Paper | 1 " in capsys.readouterr().out
    assert (folder / "other.md").read_text() == (folder / "claims.md").read_text()
    for arguments in (["claims.yaml", "--output", "claims.yaml"], ["none.yaml", "--output", "claims.md"]):
        with pytest.raises(SystemExit) as stop:
            main([str(folder / a) if a.endswith("l") or a.endswith("d") else a for a in arguments])
        assert stop.value.code.startswith("error: ") and "\n" not in stop.value.code


def test_committed_results(tmp_path):
    one = {
        "claim": "better at retrieval",
        "place": "Table 2",
        "better": "CLIP-MoE",
        "than": ["dense", "direct fine-tuning", "sparse upcycling"],
        "scores": {"symbols_retrieval": ["image_to_text_recall@1", "text_to_image_recall@1"]},
    }
    (tmp_path / "clip_moe_symbols").symlink_to(CARDS / "clip_moe_symbols")
    stages = one | {"claim": "than its stages", "than": ["MCL stage 1", "MCL stage 3"]}
    routed = claim(better="routed", than=["expert 0", "expert 3"], scores={"symbols_pairs": ["group"]})
    text = page(tmp_path, one, stages, routed, results="clip_moe_symbols")
    better, worse, mixture = rows(text)
    assert "74.3 against 68.8 of sparse upcycling: +5.5 (+1.3 to +9.6), holds" in better[4]
    assert "74.3 against 76.1 of MCL stage 3: -1.8 (" in worse[4]
    assert [better[5], worse[5], mixture[5]] == [HOLDS, DOES_NOT_HOLD, HOLDS]
    assert "Commit 8258ab98e30c8374359280d916504c926f77c451" in text
