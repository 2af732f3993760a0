"""What fine-tuning a dense and a sparse model from one base came to, in a few sentences: the head of its report."""

from collections.abc import Collection, Mapping, Sequence
from statistics import mean
from typing import Any

from evaluation.report import arrange
from records.intervals import LEVEL, Reach, mean_reach, score_difference_reach

Rows = Mapping[str, Mapping[str, Any]]


def answer(
    results: Sequence[dict[str, Any]],
    learned: Collection[str],
    folders: Mapping[str, str],
    base: str = "base",
    dense: str = "dense",
    sparse: str = "sparse",
) -> str:
    """What was learned, what was kept, whether experts helped, and which folder to use, as markdown.

    Experts helped if the sparse model's scores on what was to be learned, their mean, are above the dense model's by
    more than the interval over test samples, and those on what was to be kept are not below by more than theirs.

    Args:
        results: of `evaluation.evaluate.evaluate_model`, for these three models.
        learned: tasks on what was to be learned. All others are on what was to be kept.
        folders: model -> where it lies.
        base, dense, sparse: what the results call the models.
    """
    table = arrange(results)
    kept = [task for task in table[base] if task not in learned]
    of_goals = {goal: tasks for goal, tasks in (("learned", learned), ("kept", kept)) if tasks}
    helped, why = _verdict(**{goal: _gain(table[sparse], table[dense], tasks) for goal, tasks in of_goals.items()})
    best = sparse if helped else dense
    gains = {goal: _gain(table[best], table[base], tasks) for goal, tasks in of_goals.items()}
    use = f"Use `{folders[best]}`, the {'sparse' if helped else 'dense'} model."
    gain, (_, above) = gains["learned"]
    if gain + above < 0:
        use = f"Neither learned: use `{folders[base]}` as it was, or change the settings."
    lines = [f"**{why}** {use}"]
    for goal, tasks in of_goals.items():
        scores = _scores(table, tasks, base, dense, sparse)
        lines.append(f"*{goal.capitalize()}*, {best} against {base}: {_points(*gains[goal])}. {scores}")
    if not kept:
        lines.append("*Kept* was not measured: name benchmarks by `--keep_tasks`.")
    lines.append(f"± is the {LEVEL:.0%} interval over the test's samples. Another seed of training may change more.")
    return "\n\n".join(lines)


def _points(gain: float, reach: Reach) -> str:
    return f"{100 * gain:+.1f} ± {100 * max(reach):.1f} points"


def _verdict(learned: tuple[float, Reach], kept: tuple[float, Reach] = (0.0, (0.0, 0.0))) -> tuple[bool, str]:
    (gain, (below, above)), (kept_gain, (_, kept_above)) = learned, kept
    size = f"{_points(*learned)} against the dense model"
    if gain - below > 0 and kept_gain + kept_above >= 0:
        return True, f"Experts helped: {size}."
    if gain - below > 0:
        return False, f"Experts learned more, {size}, and forgot more, {100 * kept_gain:+.1f} points."
    if gain + above < 0:
        return False, f"Experts did not help: {size}."
    return False, f"Whether experts helped is inconclusive: {size}."


def _gain(rows: Rows, others: Rows, tasks: Collection[str]) -> tuple[float, Reach]:
    """By how much a model's scores are above another's, the mean over the primary metrics of tasks, and how far its
    interval reaches."""
    pairs = [(rows[task], others[task], metric) for task in tasks for metric in rows[task]["primary"]]
    reaches = [score_difference_reach(*pair) or (0.0, 0.0) for pair in pairs]
    # Two metrics of a task have their samples in common
    return mean(one["metrics"][metric] - other["metrics"][metric] for one, other, metric in pairs), mean_reach(
        reaches, independent=False
    )


def _scores(table: Mapping[str, Rows], tasks: Collection[str], base: str, dense: str, sparse: str) -> str:
    parts = []
    for task in tasks:
        for metric, name in table[base][task]["primary"].items():
            shares = [table[model][task]["metrics"][metric] for model in (base, dense, sparse)]
            scores = ", ".join(
                f"{model} {share:.1%}" for model, share in zip((base, dense, sparse), shares, strict=True)
            )
            parts.append(f"{table[base][task]['title']}, {name}: {scores}.")
    return " ".join(parts)
