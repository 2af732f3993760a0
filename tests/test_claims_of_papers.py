"""The claims of the four papers: the committed page, and what the recipes have of it."""

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml

from data import symbols
from evaluation.claims import measure_claim, read_claims, write_claims
from evaluation.pairs import pair_metrics
from evaluation.retrieval import retrieval_metrics
from evaluation.tasks import TASKS

CARDS = Path(__file__).parents[1] / "model_cards"
RECIPES = CARDS.parent / "training" / "recipes"


def test_the_committed_page_is_up_to_date(tmp_path):
    """Made by `python -m evaluation.claims model_cards/claims.yaml --output model_cards/claims.md`."""
    write_claims(CARDS / "claims.yaml", tmp_path / "claims.md")
    links = re.compile(r"\]\((?!https:)[^)]*\)")  # as seen from another folder
    made, committed = ((folder / "claims.md").read_text(encoding="utf-8") for folder in (tmp_path, CARDS))
    assert links.sub("", made) == links.sub("", committed)


def metrics_of(task):
    two = np.stack([np.eye(2)] * len(symbols.DIFFERENCES))
    names = {
        "retrieval": retrieval_metrics(np.eye(10), np.eye(10), np.arange(10)),
        "pairs": pair_metrics(two, two, symbols.DIFFERENCES),
        "zero_shot": ["accuracy", "accuracy_top5", "mean_per_class_recall"],
        "zero_shot_groups": ["accuracy", *(f"accuracy/{topic}" for topic in symbols.TOPICS)],
        "linear_probe": ["accuracy"],
    }[TASKS[task].kind]
    return [dict.fromkeys(names, 0.5)] * 3


@pytest.mark.parametrize(
    ("title", "paper"), read_claims(CARDS / "claims.yaml").items(), ids=lambda value: str(value)[:9]
)
def test_recipes_have_what_the_claims_name(title, paper):
    """Rows, tasks and metrics, also before there are results; and the command makes these results of that recipe."""
    assert re.findall(r"training/recipes/(\w+)\.yaml", paper.command) == paper.results
    assert re.findall(r"--output-dir model_cards/(\w+)", paper.command) == paper.results
    subprocess.run(["bash", "-n"], input=paper.command, text=True, check=True)
    scores = {}
    for recipe in paper.results:
        for row, tasks in rows_of(recipe).items():
            scores.setdefault(row, {}).update({task: metrics_of(task) for task in tasks})
    compared = [one for one in paper.claims if one.better]
    assert len(compared) >= 5
    for one in compared:
        assert measure_claim(one, scores, title)


def rows_of(recipe):
    """Row -> the tasks that a recipe measures it on."""
    stages = yaml.safe_load((RECIPES / f"{recipe}.yaml").read_text(encoding="utf-8"))["stages"]
    (evaluation,) = (stage for stage in stages if stage["stage"] == "evaluate")
    tasks = dict.fromkeys([*evaluation["models"], *evaluation.get("oracles", {})], evaluation["tasks"])
    for analysis in (stage for stage in stages if stage["stage"] == "analyze"):
        numbers = [f"K = {number}" for number in analysis.get("num_experts_per_tok", [])]
        tasks |= dict.fromkeys(["routed", *(f"expert {number}" for number in range(4)), *numbers], analysis["tasks"])
    return tasks
