"""The claims of the four papers: the committed page, and what the recipes have of it."""

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from data import symbols
from evaluation.pairs import pair_metrics
from evaluation.retrieval import retrieval_metrics
from evaluation.task import INFORMATION
from evaluation.tasks import TASKS
from model_cards.claims import write_claims
from model_cards.verdicts import measure_claim, read_claims

CARDS = Path(__file__).parents[1] / "model_cards"
RECIPES = CARDS.parent / "training" / "recipes"
PAPERS = read_claims(CARDS / "claims.yaml")


def test_the_committed_page_is_up_to_date(tmp_path):
    """Made by `python -m model_cards.claims model_cards/claims.yaml --output model_cards/claims.md`."""
    write_claims(CARDS / "claims.yaml", tmp_path / "claims.md")
    links = re.compile(r"\]\((?!https:)[^)]*\)")  # as seen from another folder
    made, committed = ((folder / "claims.md").read_text(encoding="utf-8") for folder in (tmp_path, CARDS))
    assert links.sub("", made) == links.sub("", committed)
    drawn, shown = (Image.open(folder / "claims.png") for folder in (tmp_path, CARDS))
    if drawn.info["Software"] == shown.info["Software"]:  # other versions of matplotlib draw otherwise
        assert np.array_equal(np.asarray(drawn), np.asarray(shown))


# Of a headline a number of samples, and the stages of a recipe that a model of it goes through
BUDGETS = """
CLIP-UP 6.6 above dense, as many steps | 51,200 | clip_up_symbols | clip_up
CLIP-UP above dense, as many multiply-adds | 51,200 | clip_up_symbols | clip_up
CLIP-UP above dense, as many multiply-adds | 66,560 | clip_up_symbols | dense_longer
CLIP-UP above dense, 4,096 names, as many multiply-adds | 3.1 M | clip_up_names_long | clip_up_8
CLIP-UP above dense, 4,096 names, as many multiply-adds | 4.1 M | clip_up_names_long | dense_same_multiply_adds
CLIP-UP above a larger dense model, 4,096 names | 3.1 M | clip_up_names_long | clip_up_8
CLIP-UP above a larger dense model, 4,096 names | 4.1 M | clip_up_names_long | dense_wide
CLIP-UP above sparse from scratch, 4,096 names | 4.1 M | clip_up_names_long | seed_model clip_up_8
CLIP-UP above sparse from scratch, 4,096 names | 3.8 M | clip_up_names_long | scratch_seed scratch
CLIP-MoE above fine-tuning for one stage | 40,960 | clip_moe_symbols | expert_1 expert_2 expert_3 clip_moe
CLIP-MoE above fine-tuning for one stage | 10,240 | clip_moe_symbols | direct
CLIP-MoE above fine-tuning for one stage | 10,240 | clip_moe_symbols | sparse_upcycling
CLIP-MoE above fine-tuning, as many samples | 40,960 | clip_moe_symbols | direct_4x
CLIP-MoE above fine-tuning, as many samples | 40,960 | clip_moe_symbols_baselines | all_weights
CLIP-MoE above fine-tuning, zero-shot | 40,960 | clip_moe_symbols | direct_4x
CLIP-MoE above fine-tuning, zero-shot | 10,240 | clip_moe_symbols | sparse_upcycling
CLIP-FMoE above fine-tuning, as many samples | 9,600 | clip_fmoe_symbols | direct
CLIP-FMoE above fine-tuning, as many samples | 19,200 | clip_fmoe_symbols | direct_2x
MoDE-4 above one model, names by country | 4.1 M | mode_names | expert_1 expert_2 expert_3 expert_4
MoDE-4 above one model, names by country | 4.1 M | mode_names | dense_same_multiply_adds
MoDE-4 above one model, samples of all experts | 102,400 | mode_symbols | expert_1 expert_2 expert_3 expert_4
MoDE-4 above one model, samples of all experts | 102,400 | mode_symbols | dense_4x
"""


def test_budgets_are_those_of_the_recipes():
    headlines = {one.headline.short: one.headline for paper in PAPERS.values() for one in paper.claims if one.headline}
    for line in BUDGETS.strip().splitlines():
        short, number, recipe, names = line.split(" | ")
        samples = samples_of(recipe, names.split())
        assert number in headlines[short].budget and number in (f"{samples:,}", f"{samples / 1e6:.1f} M"), line


def samples_of(recipe, names):
    """The samples that stages of a recipe train on together; a pass is through the 9,600 pairs of clip_fmoe_symbols."""
    content = yaml.safe_load((RECIPES / f"{recipe}.yaml").read_text(encoding="utf-8"))
    stages = {stage["name"]: stage for stage in content["stages"]}
    of_stages = [{**content.get("defaults", {}).get("train", {}), **stages[name]} for name in names]
    return sum(
        stage["max_steps"] * stage["global_batch_size"] if "max_steps" in stage else 9600 * stage["num_epochs"]
        for stage in of_stages
    )


def metrics_of(task):
    two = np.stack([np.eye(2)] * len(symbols.DIFFERENCES))
    names = {
        "retrieval": [*retrieval_metrics(np.eye(10), np.eye(10), np.arange(10)), *INFORMATION],
        "pairs": pair_metrics(two, two, symbols.DIFFERENCES),
        "zero_shot": ["accuracy", "accuracy_top5", "mean_per_class_recall"],
        "zero_shot_groups": ["accuracy", *(f"accuracy/{topic}" for topic in symbols.TOPICS)],
        "linear_probe": ["accuracy"],
    }[TASKS[task].kind]
    return [dict.fromkeys(names, 0.5)] * 3


@pytest.mark.parametrize(("title", "paper"), PAPERS.items(), ids=lambda value: str(value)[:9])
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
