"""The outcome of fine-tuning dense and sparse models from one base, in a few sentences and a table: the head of its
report."""

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import mean
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from clip_moe.engine.intervals import LEVEL, Reach, mean_reach, score_difference_reach
from clip_moe.engine.markdown import code, escape, markdown_table
from clip_moe.engine.outcome import Training
from clip_moe.evaluation.figures import plot_text, plt, save
from clip_moe.evaluation.report import arrange

BASE = "base"
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
    chosen: str | None = None,
) -> Answer:
    """Sentences on what was learned, what was kept, whether experts helped, and which folder to use.

    The model to use is the one that learned most of the pictures to choose on, of those that lost no more than the user
    allows; where no interval
    shows that it learned anything, it is the base. Experts helped if the sparse model that learned most of these is
    above the dense one by more than the interval over test samples. A model whose training did not leave chance or
    collapsed is left out, and then there is no verdict.

    Args:
        results: of `clip_moe.evaluation.evaluate.evaluate_model`, for `BASE` and other models.
        learned: tasks on what was to be learned, with intervals.
        chosen: the task on what was to be learned that the model is chosen by; None: `learned`. Tasks that are neither
            are on what was to be kept.
        folders: model -> its folder.
        sparse: models with experts.
        trainings: model -> name of a stage -> the training that the model is from.
        keep_at_least: points of what the base knows that a model may lose.
    """
    table = arrange(results)
    goals = {"learned": [*learned], "kept": [task for task in table[BASE] if task not in (*learned, chosen)]}
    goals = {goal: tasks for goal, tasks in goals.items() if tasks}
    ended = {model: {name: t for name, t in trainings.get(model, {}).items() if t.outcome} for model in table}
    models = Models(table, goals, sparse, ended, keep_at_least, [chosen] if chosen else goals["learned"])
    advice, use = _advice(models, folders)
    outcomes = dict.fromkeys(f"{code(name)} {end.outcome}." for ends in ended.values() for name, end in ends.items())
    lines = [_table(models, use)]
    if "kept" not in goals:
        lines.append("*Kept* was not measured: name benchmarks by `--keep_tasks`.")
    number = sum(table[BASE][task]["num_samples"] for task in learned)
    how = "The model to use was chosen on these pictures, which flatters it."
    if use == BASE:
        how = ""
    elif chosen:
        number_chosen = table[BASE][chosen]["num_samples"]
        how = f"Of the models that keep enough, the one to use learned most of {number_chosen:,} other pictures."
    lines += [
        _measures(table[BASE], goals),
        f"± is a conservative {LEVEL:.0%} interval over the pictures of each test, {number:,} for what was learned. "
        f"Another seed of training may change more. {how}".rstrip(),
    ]
    return Answer(" ".join([*outcomes, _verdict(models)]), advice, "\n\n".join(lines), use, models.gains)


class Models:
    """Models and what they learned and kept.

    Args:
        table: model -> task -> result.
        goals: "learned" and perhaps "kept" -> tasks.
        chosen: tasks that the model to use is chosen by.
        ended: model -> name of a stage -> a training whose outcome is worth a word.
    """

    def __init__(
        self,
        table: Mapping[str, Rows],
        goals: Mapping[str, Sequence[str]],
        sparse: Collection[str],
        ended: Mapping[str, Mapping[str, Training]],
        keep_at_least: float,
        chosen: Sequence[str],
    ):
        self.table, self.goals, self.sparse, self.chosen = table, goals, sparse, chosen
        self.ended, self.keep_at_least = ended, keep_at_least
        self.gains = {model: {goal: self.gain(model, BASE, goal) for goal in goals} for model in table if model != BASE}
        self.alive = [model for model in self.gains if not any(end.is_dead for end in ended[model].values())]
        self.within = [model for model in self.alive if round(100 * _kept(self.gains[model])[0], 6) >= -keep_at_least]
        kinds = {"dense": set(self.within) - set(sparse), "sparse": set(self.within) & set(sparse)}
        self.best = {kind: max(models, key=self.learned) for kind, models in kinds.items() if models}

    def gain(self, model: str, other: str, goal: str = "learned") -> Gain:
        return _gain(self.table[model], self.table[other], self.goals[goal])

    def learned(self, model: str) -> tuple[float, bool]:
        """How much more than the base, to choose by; of equals, the dense model is the better one."""
        return _gain(self.table[model], self.table[BASE], self.chosen)[0], model not in self.sparse

    def frontier(self) -> list[str]:
        """The models that no other one beats: none both learned and kept at least as much, and one of them more."""
        places = {model: (gains["learned"][0], _kept(gains)[0]) for model, gains in self.gains.items()}
        places[BASE] = 0.0, 0.0
        return [
            model
            for model, (learned, kept) in places.items()
            if not any(a >= learned and b >= kept and (a, b) != (learned, kept) for a, b in places.values())
        ]


def draw_frontier(gains: Mapping[str, Gains], sparse: Collection[str], keep_at_least: float, path: Path) -> None:
    """What models learned over what they kept, with intervals, and the loss that is allowed."""
    figure, axis = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for model, of_model in {BASE: dict.fromkeys(("learned", "kept"), (0.0, None)), **gains}.items():
        place = 100 * of_model["kept"][0], 100 * of_model["learned"][0]
        x_reach, y_reach = (100 * np.reshape(of_model[goal][1] or (0, 0), (2, 1)) for goal in ("kept", "learned"))
        color = "C1" if model in sparse else "C7" if model == BASE else "C0"
        axis.errorbar(*place, xerr=x_reach, yerr=y_reach, fmt="o", color=color, elinewidth=0.7)
        axis.annotate(plot_text(model), place, (4, 4), textcoords="offset points", fontsize=8)
    axis.axvline(-keep_at_least, color="C7", linewidth=0.8, linestyle="dotted")
    axis.set_xlabel("kept, points over the base")
    axis.set_ylabel("learned, points over the base")
    axis.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def _advice(models: Models, folders: Mapping[str, str]) -> tuple[str, str]:
    """Which folder to use and why, and which model that is."""
    again = "; ".join(dict.fromkeys(end.advice for ends in models.ended.values() for end in ends.values()))
    base, limit = code(folders[BASE]), models.keep_at_least
    if not models.alive:
        return f"Use {base}. To train again: {again}.", BASE
    if not models.within:
        closest = max(models.alive, key=lambda model: _kept(models.gains[model])[0])
        lost = -100 * _kept(models.gains[closest])[0]
        allowed = math.ceil(10 * lost - 1e-6) / 10
        return (
            f"Use {base}: no model keeps what you ask for. The {escape(closest)} model loses least, {lost:.1f} points: "
            f"`--keep_at_least {allowed}` allows it.",
            BASE,
        )
    use = max(models.best.values(), key=models.learned)
    gains, change = models.gains[use], "; ".join(dict.fromkeys(end.advice for end in models.ended[use].values()))
    if _high(gains["learned"]) < 0:
        change = change or "change the settings"
        return f"The {escape(use)} model is worse at it than the base: use {base}, or {change}.", BASE
    if _low(gains["learned"]) <= 0:
        change = change or "raise the epochs, the learning rate or the number of test pictures"
        return f"Whether the {escape(use)} model learned anything is inconclusive: use {base}, or {change}.", BASE
    advice = f"Use {code(folders[use])}, the {escape(use)} model."
    over = {escape(model): models.gain(use, model) for model in models.within if model != use}
    if better := [model for model, gain in over.items() if _high(gain) < 0]:
        advice += f" On the test, {' and '.join(better)} learned more."
    if close := [model for model, gain in over.items() if _low(gain) <= 0 <= _high(gain)]:
        advice += f" That it learned more than {' and '.join(close)} is inconclusive."
    if round(100 * _low(_kept(gains)), 6) < -limit:
        advice += f" That it keeps within {_limit(limit)} is inconclusive: {_points(gains['kept'])}."
    if len(models.alive) < len(models.gains):
        advice += f" To train again: {again}."
    return advice, use


def _verdict(models: Models) -> str:
    best, limit = models.best, _limit(models.keep_at_least)
    if len(models.alive) < len(models.gains):
        return "No verdict on experts."
    if len(best) < 2:
        only = f"only {next(iter(best))} models keep" if best else "no model keeps"
        return f"No verdict on experts: {only} within {limit} of the base."
    gain = models.gain(best["sparse"], best["dense"])
    size = f"{_points(gain)}, {escape(best['sparse'])} against {escape(best['dense'])}"
    size += f", both within {limit} of what the base keeps" if "kept" in models.goals else ""
    if _low(gain) > 0:
        return f"Experts helped: {size}."
    if _high(gain) < 0:
        return f"Experts did not help: {size}."
    return f"Whether experts helped is inconclusive: {size}."


def _table(models: Models, use: str) -> str:
    """A row a model: its mean scores, and their difference to the base's."""
    rows, frontier = [], models.frontier()
    for model, results in models.table.items():
        cells = [escape(model)]
        for goal, tasks in models.goals.items():
            score = mean(results[task]["metrics"][metric] for task in tasks for metric in results[task]["primary"])
            cells += [f"{score:.1%}", "" if model == BASE else _number(models.gains[model][goal])]
        notes = ["use this"] * (model == use) + ["on the frontier"] * (model in frontier)
        notes += ["keeps too little"] * (model in models.alive and model not in models.within)
        rows.append([*cells, ", ".join(notes)])
    head = [cell for goal in models.goals for cell in (goal, "points over base")]
    return markdown_table(["model", *head, ""], rows)


def _measures(base: Rows, goals: Mapping[str, Sequence[str]]) -> str:
    """What the scores of the table are the means of."""
    parts = []
    for goal, tasks in goals.items():
        metrics = []
        for result in (base[task] for task in tasks):
            for metric, name in result["primary"].items():
                among = ""
                if metric.startswith("image_to_text"):
                    among = f" among {result['num_captions']:,} captions"
                elif metric.startswith("text_to_image"):
                    among = f" among {result['num_samples']:,} pictures"
                metrics.append(f"{escape(result['title'])}, {escape(name)}{among}")
        parts.append(f"*{goal.capitalize()}*: {'; '.join(metrics)}.")
    return " ".join(parts)


def _kept(gains: Gains) -> Gain:
    """What was not measured was not forgotten."""
    return gains.get("kept", (0.0, None))


def _gain(rows: Rows, others: Rows, tasks: Collection[str]) -> Gain:
    """By how much a model's scores are above another's: the mean over the primary metrics of tasks."""
    pairs = [(rows[task], others[task], metric) for task in tasks for metric in rows[task]["primary"]]
    reaches = [score_difference_reach(*pair) for pair in pairs]
    # Two metrics of a task have their samples in common
    reach = None if None in reaches else mean_reach(reaches, independent=False)
    return mean(row["metrics"][metric] - other["metrics"][metric] for row, other, metric in pairs), reach


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
