"""The claims of the four papers: the committed page, what the recipes have of it, and verdicts by hand."""

import json
import math
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from lab import recipe_file
from lab.cards.claims import write_claims
from lab.cards.intervals import paired_interval
from lab.cards.verdicts import HOLDS, INCONCLUSIVE, Claim, measure_claim, read_claims

CARDS = Path(__file__).parents[2] / "model_cards"
CLAIMS = [claim for paper in read_claims(CARDS / "claims.yaml").values() for claim in paper.claims]


def test_the_committed_page_is_up_to_date(tmp_path):
    """Made by `python -m lab.cards.claims model_cards/claims.yaml --output model_cards/claims.md`."""
    write_claims(CARDS / "claims.yaml", tmp_path / "claims.md")
    links = re.compile(r"\]\((?!https:)[^)]*\)")  # as seen from another folder
    written, committed = ((folder / "claims.md").read_text(encoding="utf-8") for folder in (tmp_path, CARDS))
    assert links.sub("", written) == links.sub("", committed)
    drawn, shown = (Image.open(folder / "claims.png") for folder in (tmp_path, CARDS))
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


@pytest.mark.parametrize(
    "claim", [claim for claim in BY_RECIPES if claim.cards != ["clip_fmoe_symbols"]], ids=lambda claim: claim.short
)
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
