"""The outcome of fine-tuning a dense and a sparse model from one base, in a few sentences: the head of its report."""

import itertools
from collections.abc import Collection, Mapping, Sequence
from statistics import mean
from types import MappingProxyType
from typing import Any, NamedTuple

from clip_moe.engine.intervals import LEVEL, Reach, mean_reach, score_difference_reach
from clip_moe.engine.markdown import code, escape
from clip_moe.engine.outcome import Training
from clip_moe.evaluation.report import arrange

# Rows of the models to compare. `dense` and `sparse` are half way between a model and its fine-tuned weights, which may
# have rows, too
BASE, DENSE, SPARSE = COMPARED = ("base", "dense", "sparse")
TUNED = ", fine-tuned weights"
# An interval that reaches no further needs no larger test
FINE = 0.05
Rows = Mapping[str, Mapping[str, Any]]
# A difference, and how far its interval reaches; None: it has none
Gain = tuple[float, Reach | None]


class Answer(NamedTuple):
    """The outcome of fine-tuning, as markdown: whether experts helped, which folder to use, and the evidence; and
    the model to use, as results call it."""

    verdict: str
    advice: str
    details: str
    use: str


def answer(
    results: Sequence[dict[str, Any]],
    learned: Collection[str],
    folders: Mapping[str, str],
    trainings: Mapping[str, Mapping[str, Training]] = MappingProxyType({}),
) -> Answer:
    """Sentences on what was learned, what was kept, whether experts helped, and which folder to use.

    Compares the means of weights before and after fine-tuning; or the fine-tuned weights, if the dense mean learned
    less than those and did not keep more.

    Experts helped if the sparse model learned more than the dense one by more than the interval over test samples, and
    did not keep less by more than its interval; without an interval, any loss counts. There is no verdict where either
    training did not leave chance or collapsed.

    Args:
        results: of `clip_moe.evaluation.evaluate.evaluate_model`, for the models `COMPARED`; perhaps for two `TUNED`.
        learned: tasks on what was to be learned, with intervals. All others are on what was to be kept.
        folders: model -> its folder.
        trainings: model -> name of a stage -> the training that the model is from.
    """
    table = arrange(results)
    kept = [task for task in table[BASE] if task not in learned]
    tasks_of_goal = {goal: tasks for goal, tasks in (("learned", learned), ("kept", kept)) if tasks}
    way, tuned = None, ""
    if DENSE + TUNED in table:
        half = {goal: _gain(table[DENSE], table[DENSE + TUNED], tasks) for goal, tasks in tasks_of_goal.items()}
        way = ", ".join(f"{goal} {_points(gain)}" for goal, gain in half.items())
        way = (
            "*Half way*: `dense` and `sparse` are means of the weights before and after fine-tuning. The dense mean "
            f"against the fine-tuned weights alone: {way}."
        )
        if _high(half["learned"]) < 0 and ("kept" not in half or _low(half["kept"]) <= 0):
            table = {**table, **{model: table[model + TUNED] for model in (DENSE, SPARSE)}}
            folders, tuned = {**folders, **{model: folders[model + TUNED] for model in (DENSE, SPARSE)}}, TUNED
            way += " So the fine-tuned weights are compared here."
    between = {goal: _gain(table[SPARSE], table[DENSE], tasks) for goal, tasks in tasks_of_goal.items()}
    helped, why = _verdict(**between)
    best = SPARSE if helped else DENSE
    ended = {
        row: {name: training for name, training in trainings.get(row, {}).items() if training.outcome}
        for row in (DENSE, SPARSE)
    }
    dead = {row: end for row, ends in ended.items() for end in ends.values() if end.is_dead}
    if dead:
        why, best = "No verdict on experts.", next((row for row in (DENSE, SPARSE) if row not in dead), DENSE)
    outcomes = dict.fromkeys(f"{code(name)} {end.outcome}." for ends in ended.values() for name, end in ends.items())
    why = " ".join([*outcomes, why])
    gains = {goal: _gain(table[best], table[BASE], tasks) for goal, tasks in tasks_of_goal.items()}
    folders = {model: code(folder) for model, folder in folders.items()}
    use, used = f"Use {folders[best]}, the {best} model.", best + tuned
    change = "; ".join(end.advice for end in ended[best].values())
    if best in dead or _low(gains["learned"]) <= 0:
        used = BASE
    if best in dead:
        use = f"Use {folders[BASE]}."
    elif _high(gains["learned"]) < 0:
        use = (
            f"The {best} model is worse at it than the base: use {folders[BASE]}, or {change or 'change the settings'}."
        )
    elif _low(gains["learned"]) <= 0:
        use = (
            f"Whether the {best} model learned anything is inconclusive: use {folders[BASE]}, or "
            f"{change or 'raise the epochs, the learning rate or the number of test pictures'}."
        )
    if dead:
        use += f" To train again: {'; '.join(dict.fromkeys(end.advice for end in dead.values()))}."
    lines = []
    for goal, tasks in tasks_of_goal.items():
        lines.append(f"*{goal.capitalize()}*, {best} against base: {_points(gains[goal])}. {_scores(table, tasks)}")
    if not kept:
        lines.append("*Kept* was not measured: name benchmarks by `--keep_tasks`.")
    lines += [way] if way else []
    number = sum(table[BASE][task]["num_samples"] for task in learned)
    size = f"{number:,} for what was learned"
    if max(between["learned"][1]) > FINE:
        needed = _pictures_needed(table[SPARSE], table[DENSE], learned)
        size += f"; ± {100 * FINE:.0f} points take about {needed:,}"
        by_class = any((table[BASE][task].get("texts") or {}).get("kind") == "prompts" for task in learned)
        size += "" if by_class else ", each with a caption of its own"
    lines.append(
        f"± is a conservative {LEVEL:.0%} interval over the pictures of each test, {size}. Another seed of training "
        "may change more."
    )
    return Answer(why, use, "\n\n".join(lines), used)


def _verdict(learned: Gain, kept: Gain = (0.0, None)) -> tuple[bool, str]:
    size = f"{_points(learned)} against the dense model"
    if _low(learned) > 0 and _high(kept) >= 0:
        return True, f"Experts helped: {size}."
    if _low(learned) > 0:
        return False, f"Experts learned more, {size}, and forgot more, {_points(kept)}."
    if _high(learned) < 0:
        return False, f"Experts did not help: {size}."
    return False, f"Whether experts helped is inconclusive: {size}."


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
    return f"{100 * gain[0]:+.1f}" + (f" ± {100 * max(gain[1]):.1f}" if gain[1] else "") + " points"


def _scores(table: Mapping[str, Rows], tasks: Collection[str]) -> str:
    parts = []
    for task in tasks:
        for metric, name in table[BASE][task]["primary"].items():
            scores = ", ".join(f"{model} {table[model][task]['metrics'][metric]:.1%}" for model in COMPARED)
            result, choices = table[BASE][task], ""
            if metric.startswith("image_to_text"):
                choices = f" ({result['num_captions']:,} captions to choose from)"
            elif metric.startswith("text_to_image"):
                choices = f" ({result['num_samples']:,} pictures to choose from)"
            parts.append(f"{escape(result['title'])}, {escape(name)}{choices}: {scores}.")
    return " ".join(parts)
