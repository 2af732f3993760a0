"""The outcome of fine-tuning dense and sparse models from one base, in a few sentences and a table: the head of its
report."""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import mean
from types import MappingProxyType
from typing import Any, NamedTuple

from clip_moe.engine.intervals import LEVEL, Reach, mean_reach, score_difference_reach
from clip_moe.engine.markdown import code, escape, markdown_table
from clip_moe.engine.outcome import Training
from clip_moe.evaluation.figures import plot_text, plt, save
from clip_moe.evaluation.report import arrange

BASE = "base"
# An interval that reaches no further needs no larger test
FINE = 0.05
Rows = Mapping[str, Mapping[str, Any]]
# A difference, and how far its interval reaches; None: it has none
Gain = tuple[float, Reach | None]
# What a model learned and, if that was measured, kept, over the base
Gains = Mapping[str, Gain]


class Answer(NamedTuple):
    """The outcome of fine-tuning, as markdown: whether experts helped, which folder to use, and the evidence; the
    model to use, as results call it; and what all models learned and kept."""

    verdict: str
    advice: str
    details: str
    use: str
    gains: Mapping[str, Gains]


def answer(
    results: Sequence[dict[str, Any]],
    learned: Collection[str],
    folders: Mapping[str, str],
    sparse: Collection[str] = (),
    trainings: Mapping[str, Mapping[str, Training]] = MappingProxyType({}),
    keep_at_least: float = 1.0,
) -> Answer:
    """Sentences on what was learned, what was kept, whether experts helped, and which folder to use.

    The model to use is the one that learned most, of those that lost no more than the user allows; where no interval
    shows that it learned anything, it is the base. Experts helped if the sparse model that learned most of these is
    above the dense one by more than the interval over test samples. A model whose training did not leave chance or
    collapsed is left out, and without a dense or a sparse model there is no verdict.

    Args:
        results: of `clip_moe.evaluation.evaluate.evaluate_model`, for `BASE` and other models.
        learned: tasks on what was to be learned, with intervals. All others are on what was to be kept.
        folders: model -> its folder.
        sparse: models with experts.
        trainings: model -> name of a stage -> the training that the model is from.
        keep_at_least: points of what the base knows that a model may lose.
    """
    table = arrange(results)
    tasks_of_goal = {"learned": [*learned], "kept": [task for task in table[BASE] if task not in learned]}
    tasks_of_goal = {goal: tasks for goal, tasks in tasks_of_goal.items() if tasks}
    gains = {
        model: {goal: _gain(table[model], table[BASE], tasks) for goal, tasks in tasks_of_goal.items()}
        for model in table
        if model != BASE
    }
    ended = {model: {name: t for name, t in trainings.get(model, {}).items() if t.outcome} for model in gains}
    outcomes = dict.fromkeys(f"{code(name)} {end.outcome}." for ends in ended.values() for name, end in ends.items())
    alive = [model for model in gains if not any(end.is_dead for end in ended[model].values())]
    within = [model for model in alive if round(100 * _kept(gains[model])[0], 6) >= -keep_at_least]
    best = {
        kind: max(models, key=lambda model: gains[model]["learned"][0])
        for kind, models in (
            ("dense", [model for model in within if model not in sparse]),
            ("sparse", [model for model in within if model in sparse]),
        )
        if models
    }
    use = max(best.values(), key=lambda model: gains[model]["learned"][0], default=BASE)
    advice, use = _advice(table, learned, folders, gains, ended, within, use, keep_at_least)
    verdict = _verdict(table, learned, best, len(alive) < len(gains), "kept" in tasks_of_goal, keep_at_least)
    lines = [_table(table, tasks_of_goal, gains, within, frontier(gains), use)]
    if "kept" not in tasks_of_goal:
        lines.append("*Kept* was not measured: name benchmarks by `--keep_tasks`.")
    lines.append(_measures(table, tasks_of_goal))
    lines.append(_test_size(table, learned, list(gains)))
    return Answer(" ".join([*outcomes, verdict]), advice, "\n\n".join(lines), use, gains)


def frontier(gains: Mapping[str, Gains]) -> list[str]:
    """The models that no other one beats: none both learned and kept at least as much, and one of them more."""
    places = {model: (of_model["learned"][0], _kept(of_model)[0]) for model, of_model in gains.items()}

    def is_beaten(place: tuple[float, float]) -> bool:
        return any(other[0] >= place[0] and other[1] >= place[1] and other != place for other in places.values())

    return [model for model, place in places.items() if not is_beaten(place)]


def draw_frontier(gains: Mapping[str, Gains], sparse: Collection[str], keep_at_least: float, path: Path) -> None:
    """What models learned over what they kept, with intervals, and the loss that is allowed."""
    figure, axis = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for model, of_model in {BASE: dict.fromkeys(("learned", "kept"), (0.0, None)), **gains}.items():
        (y, y_reach), (x, x_reach) = of_model["learned"], of_model["kept"]
        errors = {
            name: [[100 * reach[0]], [100 * reach[1]]]
            for name, reach in (("xerr", x_reach), ("yerr", y_reach))
            if reach is not None
        }
        color = "C1" if model in sparse else "C7" if model == BASE else "C0"
        axis.errorbar(100 * x, 100 * y, fmt="o", color=color, elinewidth=0.7, **errors)
        axis.annotate(plot_text(model), (100 * x, 100 * y), (4, 4), textcoords="offset points", fontsize=8)
    axis.axvline(-keep_at_least, color="C7", linewidth=0.8, linestyle="dotted")
    axis.set_xlabel("kept, points over the base")
    axis.set_ylabel("learned, points over the base")
    axis.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def _advice(
    table: Mapping[str, Rows],
    learned: Collection[str],
    folders: Mapping[str, str],
    gains: Mapping[str, Gains],
    ended: Mapping[str, Mapping[str, Training]],
    within: Sequence[str],
    best: str,
    keep_at_least: float,
) -> tuple[str, str]:
    """Which folder to use and why, and which model that is."""
    again = dict.fromkeys(end.advice for ends in ended.values() for end in ends.values())
    base = code(folders[BASE])
    if best == BASE:
        alive = [model for model in gains if not any(end.is_dead for end in ended[model].values())]
        if not alive:
            return f"Use {base}. To train again: {'; '.join(again)}.", BASE
        closest = max(alive, key=lambda model: _kept(gains[model])[0])
        lost = -100 * _kept(gains[closest])[0]
        return (
            f"Use {base}: no model keeps what you ask for. {escape(closest)} loses least, {lost:.1f} points: "
            f"`--keep_at_least {math.ceil(10 * lost - 1e-6) / 10}` allows it.",
            BASE,
        )
    change = "; ".join(dict.fromkeys(end.advice for end in ended[best].values()))
    gain = gains[best]["learned"]
    if _high(gain) < 0:
        change = change or "change the settings"
        return f"The {escape(best)} model is worse at it than the base: use {base}, or {change}.", BASE
    if _low(gain) <= 0:
        change = change or "raise the epochs, the learning rate or the number of test pictures"
        return f"Whether the {escape(best)} model learned anything is inconclusive: use {base}, or {change}.", BASE
    advice = f"Use {code(folders[best])}, the {escape(best)} model."
    leads = {model: _gain(table[best], table[model], learned) for model in within if model != best}
    if open_leads := [escape(model) for model, lead in leads.items() if _low(lead) <= 0]:
        advice += f" That it learned more than {' and '.join(open_leads)} is inconclusive."
    if "kept" in gains[best] and round(100 * _low(gains[best]["kept"]), 6) < -keep_at_least:
        kept = _points(gains[best]["kept"])
        advice += f" That it keeps within {_limit(keep_at_least)} is inconclusive: {kept}."
    if any(end.is_dead for ends in ended.values() for end in ends.values()):
        advice += f" To train again: {'; '.join(again)}."
    return advice, best


def _verdict(
    table: Mapping[str, Rows],
    learned: Collection[str],
    best: Mapping[str, str],
    some_are_dead: bool,
    kept_is_measured: bool,
    keep_at_least: float,
) -> str:
    if some_are_dead:
        return "No verdict on experts."
    if len(best) < 2:
        only = f"only {next(iter(best))} models keep" if best else "no model keeps"
        return f"No verdict on experts: {only} within {_limit(keep_at_least)} of the base."
    gain = _gain(table[best["sparse"]], table[best["dense"]], learned)
    size = f"{_points(gain)} against the dense model"
    size += f", both within {_limit(keep_at_least)} of what the base keeps" if kept_is_measured else ""
    if _low(gain) > 0:
        return f"Experts helped: {size}."
    if _high(gain) < 0:
        return f"Experts did not help: {size}."
    return f"Whether experts helped is inconclusive: {size}."


def _table(
    table: Mapping[str, Rows],
    tasks_of_goal: Mapping[str, Sequence[str]],
    gains: Mapping[str, Gains],
    within: Sequence[str],
    best: Sequence[str],
    use: str,
) -> str:
    """A row a model: its mean scores, and their difference to the base's."""
    rows = []
    for model in table:
        cells = [escape(model)]
        for goal, tasks in tasks_of_goal.items():
            score = mean(table[model][task]["metrics"][m] for task in tasks for m in table[model][task]["primary"])
            cells += [f"{score:.1%}", "" if model == BASE else _number(gains[model][goal])]
        notes = ["use this"] * (model == use) + ["on the frontier"] * (model in best)
        notes += ["keeps too little"] * (model != BASE and model not in within)
        rows.append([*cells, ", ".join(notes)])
    head = [cell for goal in tasks_of_goal for cell in (goal, "points over base")]
    return markdown_table(["model", *head, ""], rows)


def _test_size(table: Mapping[str, Rows], learned: Collection[str], models: Sequence[str]) -> str:
    number = sum(table[BASE][task]["num_samples"] for task in learned)
    size = f"{number:,} for what was learned"
    pairs = [(table[model], table[other]) for model, other in itertools.combinations(models, 2)]
    widest = max(pairs, key=lambda pair: max(_gain(*pair, learned)[1]), default=None)
    if widest and max(_gain(*widest, learned)[1]) > FINE:
        size += f"; ± {100 * FINE:.0f} points take about {_pictures_needed(*widest, learned):,}"
        by_class = any((table[BASE][task].get("texts") or {}).get("kind") == "prompts" for task in learned)
        size += "" if by_class else ", each with a caption of its own"
    return (
        f"± is a conservative {LEVEL:.0%} interval over the pictures of each test, {size}. Another seed of training "
        "may change more."
    )


def _kept(gains: Gains) -> Gain:
    return gains.get("kept", (0.0, None))


def _gain(rows: Rows, others: Rows, tasks: Collection[str]) -> Gain:
    """By how much a model's scores are above another's: the mean over the primary metrics of tasks."""
    pairs = [(rows[task], others[task], metric) for task in tasks for metric in rows[task]["primary"]]
    reaches = [score_difference_reach(*pair) for pair in pairs]
    # Two metrics of a task have their samples in common
    reach = None if None in reaches else mean_reach(reaches, independent=False)
    return mean(row["metrics"][metric] - other["metrics"][metric] for row, other, metric in pairs), reach


def _pictures_needed(rows: Rows, others: Rows, tasks: Collection[str]) -> int:
    """How many test pictures would give scores like these an interval that reaches `FINE`: 50, or twice as many, ..."""
    for number in (50 * 2**doublings for doublings in itertools.count()):
        size = {"num_samples": number, "num_captions": number}
        rows_of_size = [{task: {**results[task], **size} for task in tasks} for results in (rows, others)]
        if max(_gain(*rows_of_size, tasks)[1]) <= FINE:
            return number


def _low(gain: Gain) -> float:
    return gain[0] - (gain[1][0] if gain[1] else 0)


def _high(gain: Gain) -> float:
    return gain[0] + (gain[1][1] if gain[1] else 0)


def _points(gain: Gain) -> str:
    return f"{_number(gain)} points"


def _number(gain: Gain) -> str:
    return f"{100 * gain[0]:+.1f}" + (f" ± {100 * max(gain[1]):.1f}" if gain[1] else "")


def _limit(keep_at_least: float) -> str:
    return f"{keep_at_least:g} point{'s' * (keep_at_least != 1)}"


def _measures(table: Mapping[str, Rows], tasks_of_goal: Mapping[str, Sequence[str]]) -> str:
    """What the scores of the table are the means of."""
    parts = []
    for goal, tasks in tasks_of_goal.items():
        metrics = []
        for result in (table[BASE][task] for task in tasks):
            for metric, name in result["primary"].items():
                among = ""
                if metric.startswith("image_to_text"):
                    among = f" among {result['num_captions']:,} captions"
                elif metric.startswith("text_to_image"):
                    among = f" among {result['num_samples']:,} pictures"
                metrics.append(f"{escape(result['title'])}, {escape(name)}{among}")
        parts.append(f"*{goal.capitalize()}*: {'; '.join(metrics)}.")
    return " ".join(parts)
