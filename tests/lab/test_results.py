"""Numbers of the front page, docs/results.md and lab/results are those of the committed results; recipes load."""

import re
from statistics import mean

import pytest

from lab import ROOT
from lab.cards import findings
from lab.cards.intervals import paired_interval

PAGES = {name: (ROOT / name).read_text("utf-8") for name in ("README.md", "docs/results.md", "lab/results/README.md")}
# Column of a table here -> of a card's table of seeds
COLUMNS = {
    "zero-shot": "zero-shot: accuracy",
    "zero-shot, digits": "zero-shot, digits: accuracy",
    "15 topics": "zero-shot, 15 topics: mean accuracy",
    "6 topics seen": "zero-shot, 6 topics of half 1: mean accuracy",
    "9 topics unseen": "zero-shot, 9 topics of half 2: mean accuracy",
    "R@1 image→text": "retrieval: R@1 image→text",
    "R@1 text→image": "retrieval: R@1 text→image",
    "8 countries": "names, each country: mean accuracy",
    "attribute pairs": "attribute pairs: group score",
    "linear probe": "linear probe: accuracy",
}
WAYS = ("image→text", "text→image")
COLUMNS |= {f"{n} names: R@1 {way}": f"{n} names: R@1 {way}" for n in ("1,024", "2,048", "4,096") for way in WAYS}
COLUMNS |= {f"logos: {k} {way}": f"logos of brands: {k} {way}" for k in ("R@1", "R@5") for way in WAYS}


@pytest.mark.parametrize("path", [findings.FRONT_PAGE, findings.RESULTS], ids=lambda path: path.name)
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
