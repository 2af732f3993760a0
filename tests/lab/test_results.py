"""Numbers of the front page, docs/results.md and lab/results are those of the committed results; the claims of the four
papers: the committed page, what the recipes have of it, and verdicts by hand."""

import json
import math
import re
from collections import defaultdict
from statistics import mean

import numpy as np
import pytest
import yaml
from PIL import Image

from lab import ROOT, recipe_file
from lab.cards import findings
from lab.cards.claims import write_claims
from lab.cards.intervals import paired_interval
from lab.cards.verdicts import HOLDS, INCONCLUSIVE, Claim, measure_claim, read_claims

PAGES = {name: (ROOT / name).read_text("utf-8") for name in ("README.md", "docs/results.md", "lab/results/README.md")}
# Column of a table here -> of a card's table of seeds
COLUMNS = {
    "15 topics": "zero-shot, 15 topics: mean accuracy",
    "6 topics seen": "zero-shot, 6 topics of half 1: mean accuracy",
    "9 topics unseen": "zero-shot, 9 topics of half 2: mean accuracy",
    "R@1 image→text": "retrieval: R@1 image→text",
    "R@1 text→image": "retrieval: R@1 text→image",
    "8 countries": "names, each country: mean accuracy",
    "attribute pairs": "attribute pairs: group score",
}
COLUMNS |= {task: f"{task}: accuracy" for task in ("zero-shot", "zero-shot, digits", "linear probe")}
WAYS = ("image→text", "text→image")
COLUMNS |= {f"{n} names: R@1 {way}": f"{n} names: R@1 {way}" for n in ("1,024", "2,048", "4,096") for way in WAYS}
COLUMNS |= {f"logos: {k} {way}": f"logos of brands: {k} {way}" for k in ("R@1", "R@5") for way in WAYS}


@pytest.mark.parametrize("path", [findings.FRONT_PAGE, findings.RESULTS, findings.LAB], ids=str)
def test_tables_are_those_of_the_results(path):
    """`python -m lab.cards.findings` writes them."""
    assert findings.written(path) == PAGES[path.relative_to(ROOT).as_posix()]


def test_the_front_page_has_every_gain_beside_its_rivals_and_its_price():
    """As written by `findings.front_page`; and the reason for nine seeds of the logos."""
    text = PAGES["README.md"]
    assert "\n".join(findings.front_page()) in text
    sparse = findings.recall_of_case("icons", 2048, 16, 640, experts=8)
    wider = findings.recall_of_case("icons", 2048, 20, 640, budget_width=16)
    gain = findings.gain({seed: sparse[seed] for seed in range(3)}, wider)
    assert gain.lstrip("+") in " ".join(text.split())


def test_differences_of_duplicates_are_those_of_the_table():
    negatives, positives, random_order, even = findings.recalls_of_arms().values()
    for page in ("docs/results.md", "lab/results/README.md"):
        text = " ".join(PAGES[page].split())
        for better, worse in ((even, random_order), (random_order, negatives), (positives, negatives)):
            low, high = paired_interval(better, worse)
            assert f"{mean(better) - mean(worse):+.1f} points ({low:.1f} to {high:.1f})" in text


# --- tables of scores by model, below a link to their card


def tables(text):
    """(header, row, card) of every row of a table of scores; the card is the one that was linked last."""
    card = header = None
    for line in text.splitlines():
        linked = re.findall(r"model_cards/(\w+)/", line)
        card = linked[-1] if linked else card
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            header = None
        elif header is None:
            header = cells if "model" in cells and set(cells) & set(COLUMNS) else []
        elif header and set(line) - set("|-"):
            yield header, dict(zip(header, cells, strict=True)), card


def card_scores(card):
    """Model -> column -> the cell of a card's table, or of one whose name it begins, without the difference to a
    baseline."""
    scores = {}
    for file in sorted(findings.CARDS.glob(f"{card}*/seeds.md")):
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
        names, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        for row in rows:
            cells = dict(zip(names, row, strict=True))
            row_scores = {column: without_difference(cells[name]) for column, name in COLUMNS.items() if name in cells}
            known = scores.setdefault(row[0], {})
            assert all(known.setdefault(column, score) == score for column, score in row_scores.items()), (file, row[0])
    return scores


def without_difference(cell):
    return re.sub(r" ± 0\.0$", "", cell.split(" (")[0])


@pytest.mark.parametrize("page", ["docs/results.md", "lab/results/README.md"])
def test_scores_are_those_of_the_cards(page):
    rows = list(tables(PAGES[page]))
    assert len(rows) > 9
    for header, row, card in rows:
        expected = card_scores(card)[row["model"]]
        for column in header:
            if column in COLUMNS:
                assert without_difference(row[column]) == expected[column], (card, row["model"], column)


# --- claims of the papers

CLAIMS = [claim for paper in read_claims(findings.CARDS / "claims.yaml").values() for claim in paper.claims]


def test_the_committed_page_is_up_to_date(tmp_path):
    """Made by `python -m lab.cards.claims model_cards/claims.yaml --output model_cards/claims.md`."""
    write_claims(findings.CARDS / "claims.yaml", tmp_path / "claims.md")
    links = re.compile(r"\]\((?!https:)[^)]*\)")  # as seen from another folder
    written, committed = ((folder / "claims.md").read_text(encoding="utf-8") for folder in (tmp_path, findings.CARDS))
    assert links.sub("", written) == links.sub("", committed)
    drawn, shown = (Image.open(folder / "claims.png") for folder in (tmp_path, findings.CARDS))
    if drawn.info["Software"] == shown.info["Software"]:  # other versions of matplotlib draw otherwise
        assert np.array_equal(np.asarray(drawn), np.asarray(shown))


def read_recipe(recipe):
    return yaml.safe_load(recipe_file(recipe).read_text(encoding="utf-8"))


def samples_of_models(recipe):
    """Of each stage, together with all stages that its model comes from."""
    content, samples, origins = read_recipe(recipe), {}, {}
    for stage in content["stages"]:
        name, settings = stage["name"], content.get("defaults", {}).get("train", {}) | stage
        trains = re.match("train|lab.methods", stage["stage"])
        samples[name] = settings["max_steps"] * settings["global_batch_size"] if trains else 0
        words = re.findall(r'"(\w+)"(?!:)', json.dumps(stage))
        origins[name] = {name}.union(*(origins.get(word, ()) for word in words))
    return {sum(samples[name] for name in names) for names in origins.values()}


BY_RECIPES = [
    claim for claim in CLAIMS if claim.cards and not claim.cards[0].startswith(("frontier", "router_teacher"))
]
BY_STEPS = [claim for claim in BY_RECIPES if claim.cards != ["clip_fmoe_symbols"]]


@pytest.mark.parametrize("claim", BY_STEPS, ids=lambda claim: claim.short)
def test_budgets_are_those_of_the_recipes(claim):
    """Where these train for numbers of steps."""
    samples = set().union(*map(samples_of_models, claim.cards))
    written = {text for number in samples for text in (f"{number:,}", f"{number / 1e6:.1f} M")}
    assert set(re.findall(r"\d+,\d{3}|\d\.\d M", claim.budget)) <= written


@pytest.mark.parametrize("claim", BY_RECIPES, ids=lambda claim: claim.short)
def test_recipes_measure_what_the_claims_name(claim):
    """The recipes of the cards' names have the rows and tasks."""
    rows = defaultdict(list)
    for stage in (stage for card in claim.cards for stage in read_recipe(card)["stages"]):
        if stage["stage"] in ("evaluate", "lab.cards.oracles:OracleStage"):
            for row in [*stage["models"], *stage.get("oracles", {})]:
                rows[row] += stage["tasks"]
    for row in [claim.better, *claim.than]:
        assert claim.scores.keys() <= set(rows[row]), row


COMPARED = {"claim": "c", "short": "c", "place": "p", "cards": ["."]}
COMPARED |= {"better": "sparse", "than": ["dense"], "scores": {"t": ["m"]}}


def write_scores(folder, sparse, dense):
    scores = {row: {"t": [{"m": score} for score in seeds]} for row, seeds in (("sparse", sparse), ("dense", dense))}
    (folder / "seeds.json").write_text(json.dumps(scores))


def test_too_few_seeds_are_refused(tmp_path):
    write_scores(tmp_path, [0.5, 0.6], [0.5, 0.6])
    (tmp_path / "claims.yaml").write_text(json.dumps({"Paper": {"claims": [COMPARED]}}))
    with pytest.raises(ValueError, match="seeds.json.*the same 3 or more seeds, got 2"):
        write_claims(tmp_path / "claims.yaml", tmp_path / "claims.md")
    assert not (tmp_path / "claims.md").exists()


def test_a_difference_of_exactly_the_points_is_none(tmp_path):
    write_scores(tmp_path, [0.55] * 3, [0.51] * 3)
    for by, verdict in ((3.0, HOLDS), (4.0, INCONCLUSIVE)):  # 100 * 0.55 - 100 * 0.51 > 4
        (score,) = measure_claim(Claim(by=by, **COMPARED), tmp_path)
        assert score.verdict == verdict


def test_an_interval_by_hand():
    """Student's t of two degrees of freedom is 4.303 at 97.5 %, and 6.205 at 98.75 %."""
    for comparisons, t in ((1, 4.30265), (2, 6.20535)):
        reach = t * math.sqrt(((1 - 2) ** 2 + 0 + (3 - 2) ** 2) / 2) / math.sqrt(3)
        interval = paired_interval([11, 22, 33], [10, 20, 30], comparisons)
        assert interval == pytest.approx((2 - reach, 2 + reach), abs=1e-4)
