"""The page of claims and its picture. Verdicts by hand are in test_verdicts.py, and the claims of the four papers in
test_claims_of_papers.py."""

import json
import re
from pathlib import Path

import pytest
from matplotlib.text import Text

from evaluation.claims import MARKS, main, write_claims
from evaluation.figures import plt
from evaluation.verdicts import CANNOT_BE_TOLD, DOES_NOT_HOLD, HOLDS

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


def test_headlines_come_first(folder):
    headline = {"short": "few | words", "budget": "10 | 20 samples"}
    lacking = {"claim": "c", "place": "p", "missing": "a row", "headline": {"short": "no row"}}
    claims = (claim(claim="b", than="longer"), claim(headline=headline), lacking)
    text = page(folder, *claims)
    headlines, appendix = text.split("## Appendix: all claims")
    assert rows(headlines) == [
        ["2", "it wins", r"10 \| 20 samples", "retrieval recall: +12.0 (+5.4 to +18.6)", HOLDS]
        + ["[results](results/seeds.md)"],
        ["3", "c", "", "missing: a row", "not measured"],
    ]
    assert [row[0] for row in rows(appendix)] == ["1", "2", "3"]
    assert re.search(r"!\[The differences .* holds: 1, not measured: 1\.\]\(claims\.png\)", headlines)
    assert (folder / "claims.png").read_bytes().startswith(b"\x89PNG")


def test_without_headlines_there_is_no_picture(folder):
    assert "claims.png" not in page(folder, claim()) and not (folder / "claims.png").exists()


def test_a_headline_has_the_score_that_decides(folder):
    """One holds, by less, and the other cannot be told."""
    of_row = {"sparse": ([0.6, 0.62, 0.67], [0.5, 0.6, 0.4]), "dense": ([0.5, 0.51, 0.52], [0.4, 0.2, 0.35])}
    scores = {
        row: {"retrieval": [{"sure": one, "unsure": other} for one, other in zip(*of, strict=True)]}
        for row, of in of_row.items()
    }
    (folder / "results" / "seeds.json").write_text(json.dumps(scores))
    both = claim(scores={"retrieval": ["sure", "unsure"]}, headline={"short": "s", "budget": "b"})
    headline, _ = rows(page(folder, both))
    assert headline[3].startswith("retrieval unsure: +18.3 (") and headline[4] == CANNOT_BE_TOLD


def test_the_picture(folder, monkeypatch):
    """Verdicts are told apart by color and by marker, and texts can be read."""
    figures = []
    monkeypatch.setattr(plt, "close", figures.append)
    claims = [
        claim(),
        claim(claim="b", better="dense", than="sparse"),
        claim(claim="c", than="longer", by=-3.0),
        {"claim": "d", "place": "p", "missing": "a row"},
    ]
    shorts = ["first", "$second$", "third", "fourth"]
    page(folder, *(one | {"headline": {"short": s, "budget": "b"}} for one, s in zip(claims, shorts, strict=True)))
    (figure,) = figures
    (axis,) = figure.axes
    labels = [label.get_text() for label in axis.get_yticklabels()]
    assert labels == ["first  1", r"\$second\$  2", "third  3", "fourth  4"]
    points = {line.get_ydata()[0]: line for line in axis.lines if line.get_marker() in "oXD"}
    assert {row: (point.get_color(), point.get_marker()) for row, point in points.items()} == {
        0: MARKS[HOLDS],
        1: MARKS[DOES_NOT_HOLD],
        2: MARKS[CANNOT_BE_TOLD],
    }
    assert [point.get_xdata()[0] for point in points.values()] == pytest.approx([12, -12, 5])
    intervals = {tuple(line.get_ydata()): line.get_xdata() for line in axis.lines if len(line.get_xdata()) == 2}
    assert intervals[0, 0] == pytest.approx([5.4, 18.6], abs=0.05) and {(1, 1), (2, 2)} < set(intervals)
    assert [tuple(line.get_xdata()) for line in axis.lines if line.get_linestyle() == ":"] == [(-3.0, -3.0)]
    assert [len(set(of)) for of in zip(*MARKS.values(), strict=True)] == [3, 3]
    texts = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    assert min(text.get_fontsize() for text in texts) >= 8 and "not measured" in {t.get_text().strip() for t in texts}


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
        ({"headline": {"short": "s"}}, "a headline that compares models says in budget what they were trained with"),
        ({"headline": {"budget": "10 samples"}}, "headline.short"),
    ],
)
def test_what_is_wrong_with_a_claim(folder, changes, message):
    with pytest.raises(ValueError, match=f"claims.yaml: .*{message}"):
        page(folder, claim(**changes))
    assert not (folder / "claims.md").exists()


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
