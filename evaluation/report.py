"""Results side by side: tables as markdown and as one HTML page, and a chart."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from textwrap import wrap
from types import MappingProxyType
from typing import Any

import numpy as np

from clip_moe.engine.intervals import LEVEL, Reach, mean_reach, score_difference_reach, score_reach
from clip_moe.engine.markdown import escape, item, markdown_table
from clip_moe.engine.messages import one_line
from clip_moe.engine.result_schema import TextCounts, read_result, require_result, results_mark
from clip_moe.evaluation.benchmarks.specs import means_of
from clip_moe.evaluation.figures import plot_text, plt, save
from clip_moe.evaluation.page import write_page
from clip_moe.evaluation.results import computed_with, same_data

Results = Sequence[dict[str, Any] | str | Path]
# Results of one task must agree in these to stand in one column.
SAME_FOR_TASK = ("protocol", "num_samples", "title", "primary", "data", "num_captions")
# Results of one model must agree in these to stand in one row.
SAME_FOR_MODEL = ("weights", "dtype", "changes", "code", "batch_size")
# Columns of scores that a screen has room for: of more, each has a line, and each model a column
MOST_COLUMNS = 6
# The chart's, in inches: a telephone shows it whole
WIDTH = 5.2
MARKERS = "osD^vPX*<>"
BRACKETS = (
    f"In brackets: the difference to {{}} in percent points, ± its {LEVEL:.0%} interval over test samples, where a "
    "metric is a mean over them. It does not cover what another seed of training would change."
)


@dataclass(frozen=True)
class Score:
    """A share and the reach of its interval over test samples; beside a baseline, those of its difference. A metric
    that is no mean over samples has no interval."""

    value: float
    reach: Reach | None
    difference: float | None = None
    difference_reach: Reach | None = None

    def __str__(self) -> str:
        text = f"{self.value:.1%}"
        if self.difference is not None:
            error = "" if self.difference_reach is None else f" ± {100 * max(self.difference_reach):.1f}"
            text += f" ({100 * self.difference:+.1f}{error})"
        return text


def write_report(
    results: Results,
    output_dir: str | Path,
    baseline: str | None = None,
    head: str = "",
    title: str = "Evaluation",
    pictures: Mapping[str, Callable[[Path], None]] = MappingProxyType({}),
) -> str:
    """Write `report.md`, `report.svg` and `report.html`, which holds both.

    Args:
        results: what `clip_moe.evaluation.evaluate.evaluate_model` returned, or the files it wrote.
        baseline: the model that the others' scores are compared with, in brackets.
        head: markdown above the table.
        pictures: those of the head, see `clip_moe.evaluation.page.write_page`.

    Returns:
        The head and the table: a row a model, a column a task and primary metric, in percent; blank where there is no
        result. Of more than six columns, each is a row. Benchmarks that are all of a paper's table have their mean.

    Raises:
        ValueError: results that cannot be compared, see `_fault`.
    """
    table = arrange(results)
    if baseline is not None and baseline not in table:
        raise ValueError(f"the baseline {baseline!r} has no results, only {', '.join(table)}")
    scores = _scores(table, baseline)
    summary = _summary(list(table), scores)
    sections = [
        f"# {title}",
        *filter(None, [head]),
        summary,
        *([] if baseline is None else [BRACKETS.format(escape(baseline))]),
        "![scores](report.svg)",
        "## All metrics",
        _all_metrics(table),
        "## How it was measured",
        _protocols(table),
    ]

    def draw(path: Path) -> None:
        draw_scores(scores, list(table), path)
        mark = results_mark(result for row in table.values() for result in row.values())
        path.write_text(f"{path.read_text(encoding='utf-8')}{mark}\n", encoding="utf-8")

    write_page(Path(output_dir) / "report", "\n\n".join(sections), {**pictures, "report.svg": draw})
    return "\n\n".join(filter(None, [head, summary]))


def arrange(results: Results) -> dict[str, dict[str, dict[str, Any]]]:
    """model -> task -> result, of the tasks that a model was measured on. Raises as `write_report`."""
    results = [
        require_result(result, "memory") if isinstance(result, dict) else read_result(result) for result in results
    ]
    table: dict[str, dict[str, dict[str, Any]]] = {}
    first: dict[str, dict[str, Any]] = {}
    for result in results:
        row = table.setdefault(result["model"], {})
        is_repeated = row.setdefault(result["task"], result) is not result
        fault = _fault(result, first.setdefault(result["task"], result), next(iter(row.values())), is_repeated)
        if fault:
            raise ValueError(fault)
    return {model: {task: row[task] for task in first if task in row} for model, row in table.items()}


def _fault(
    result: dict[str, Any], same_task: dict[str, Any], same_model: dict[str, Any], is_repeated: bool
) -> str | None:
    """Why a result does not fit into a table with the first results of its task and its model; None: it does."""
    task, model, other = result["task"], result["model"], same_task["model"]
    if is_repeated:
        return f"there are two results of {model!r} on {task}"
    if not set(result["primary"]) <= set(result["metrics"]) == set(same_task["metrics"]):
        return f"{task}: {model!r} and {other!r} need the same metrics, with the primary ones"
    if bad := [metric for metric, value in result["metrics"].items() if not 0 <= value <= 1]:
        return f"{task}: {', '.join(bad)} of {model!r} is not a finite number from 0 to 1"
    if key := next((key for key in SAME_FOR_TASK if differ(result, same_task, key)), None):
        return (
            f"{task}: {key} is {same_task[key]!r} for {other!r} but {result[key]!r} for {model!r}; such scores cannot "
            "be compared"
        )
    if key := next((key for key in SAME_FOR_MODEL if differ(same_model, result, key)), None):
        return (
            f"{model!r} has results of different models: {key} is {same_model.get(key)!r} on {same_model['task']} but "
            f"{result.get(key)!r} on {task}; measure it again, or give them different names"
        )
    return None


def chance_sentences(results: Results) -> list[str]:
    """A sentence for each task in which models are not shown to score above chance."""
    models_of: dict[tuple[str, str], list[str]] = {}
    for result in results:
        chances = {metric: share for metric, share in result.get("chance", {}).items() if metric in result["primary"]}
        reaches = {metric: score_reach(result, metric) for metric in chances}
        if chances and all(
            reach is not None and result["metrics"][metric] - reach[0] <= chances[metric]
            for metric, reach in reaches.items()
        ):
            chance = ", ".join(f"{result['primary'][metric]} {share:.1%}" for metric, share in chances.items())
            models_of.setdefault((result["title"], chance), []).append(f"*{escape(result['model'])}*")
    return [
        f"Not shown to be above chance in {escape(title)} ({chance}): {', '.join(models)}."
        for (title, chance), models in models_of.items()
    ]


def first_results(table: dict[str, dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """task -> the result of the first model that has one, for what all results of a task share."""
    first: dict[str, dict[str, Any]] = {}
    for row in table.values():
        first |= {task: result for task, result in row.items() if task not in first}
    return first


def differ(result: dict[str, Any], other: dict[str, Any], key: str) -> bool:
    """Whether results disagree in what both have. Missing changes or code mean none; the batch size counts where scores
    depend on it."""
    if key in ("changes", "code"):
        return (result.get(key) or {}) != (other.get(key) or {})
    if key == "batch_size" and not (result.get("depends_on_batch") or other.get("depends_on_batch")):
        return False
    if key not in result or key not in other:
        return False
    return same_data(result[key]) != same_data(other[key]) if key == "data" else result[key] != other[key]


def primary_columns(row: dict[str, dict[str, Any]]) -> dict[tuple[str, str], str]:
    """(task, metric) -> title, of the primary metrics. Tasks of the same title are told apart by their names."""
    titles = Counter(one_line(result["title"]) for result in row.values())
    return {
        (task, metric): f"{title}{f' ({task})' if titles[title] > 1 else ''}: {name}"
        for task, result in row.items()
        for title in [one_line(result["title"])]
        for metric, name in result["primary"].items()
    }


def _scores(table, baseline: str | None) -> dict[str, dict[str, Score]]:
    """Title of a task's primary metric, or of a mean -> model -> score."""
    scores: dict[str, dict[str, Score]] = {}
    task_scores: dict[str, dict[str, dict[str, Score]]] = {}
    for (task, metric), title in primary_columns(first_results(table)).items():
        scores[title] = {}
        task_scores.setdefault(task, {})[metric] = scores[title]
        for model, row in table.items():
            if task in row:
                value, reach = row[task]["metrics"][metric], score_reach(row[task], metric)
                scores[title][model] = Score(value, reach)
                if baseline not in (None, model) and task in table[baseline]:
                    other = table[baseline][task]
                    difference_reach = score_difference_reach(row[task], other, metric)
                    scores[title][model] = Score(value, reach, value - other["metrics"][metric], difference_reach)
    for title, metrics in means_of(task_scores).items():
        parts = [task_scores[task][metric] for task, metric in metrics.items()]
        models = [model for model in table if all(model in part for part in parts)]
        scores[title] = {model: _mean_score([part[model] for part in parts]) for model in models}
    return scores


def _mean_score(scores: Sequence[Score]) -> Score:
    """The mean of scores on data sets that share no samples, see `mean_reach`."""

    def mean_of(values: list[Any], average: Callable[[list[Any]], Any]) -> Any:
        return None if None in values else average(values)

    return Score(
        mean(score.value for score in scores),
        mean_of([score.reach for score in scores], mean_reach),
        mean_of([score.difference for score in scores], mean),
        mean_of([score.difference_reach for score in scores], mean_reach),
    )


def _summary(models: Sequence[str], scores: Mapping[str, Mapping[str, Score]]) -> str:
    if len(scores) > max(len(models), MOST_COLUMNS):
        rows = [[title, *(str(column.get(model, "")) for model in models)] for title, column in scores.items()]
        return markdown_table(["task", *models], rows)
    rows = [[model, *(str(column.get(model, "")) for column in scores.values())] for model in models]
    return markdown_table(["model", *scores], rows)


def _all_metrics(table) -> str:
    rows = []
    for task, result in first_results(table).items():
        for metric in result["metrics"]:
            values = (f"{row[task]['metrics'][metric]:.1%}" if task in row else "" for row in table.values())
            rows.append([f"{task}: {metric}", *values])
    return markdown_table(["metric", *table], rows)


def _protocols(table) -> str:
    lines = [
        f"{task}: {result['protocol']} ({result['num_samples']} samples, {result['num_skipped']} skipped)"
        for task, result in first_results(table).items()
    ]
    sources_of: dict[str, list[str]] = {}
    for model, results in table.items():
        for task, result in results.items():
            texts = result.get("texts") and TextCounts(**result["texts"]).sentence
            lines += [f"{model} on {task}: {texts}"] if texts else []
            sources = sources_of.setdefault(f"{result['dtype']}, {computed_with(result)}", [])
            sources += [source] if (source := f"{model} ({result['source']})") not in sources else []
    lines += [f"{', '.join(sources)}: {how}" for how, sources in sources_of.items()]
    return "\n".join(map(item, lines))


def draw_scores(scores: Mapping[str, Mapping[str, Score]], models: Sequence[str], path: Path) -> None:
    """A dot for each score. Models or columns, whatever there are more of, have a line each, the others a color.

    Args:
        scores: title of a column -> model -> score, whose error bar shows its reach.
    """
    rows = [[column.get(model, Score(math.nan, None)) for column in scores.values()] for model in models]
    values = 100 * np.array([[score.value for score in row] for row in rows])
    reach = 100 * np.array([[score.reach or (0, 0) for score in row] for row in rows])
    lines, series = list(models), list(scores)
    if len(scores) > len(models):
        lines, series, values, reach = series, lines, values.T, reach.swapaxes(0, 1)
    names = [plot_text(name, 60) for name in series]
    names_a_line = max(1, int(WIDTH / (0.5 + 0.075 * max(map(len, names)))))
    height = 0.8 + 0.2 * math.ceil(len(names) / names_a_line) + max(0.32, 0.09 * len(series)) * len(lines)
    figure, axis = plt.subplots(figsize=(WIDTH, height), layout="constrained")
    for line in range(0, len(lines), 2):
        axis.axhspan(line - 0.5, line + 0.5, color="#888888", alpha=0.12, linewidth=0)
    for number, name in enumerate(names):
        place = np.arange(len(lines)) + 0.7 * ((number + 0.5) / len(series) - 0.5)
        axis.errorbar(
            values[:, number],
            place,
            xerr=reach[:, number].T,
            fmt=MARKERS[number // 10 % len(MARKERS)],
            color=f"C{number % 10}",
            markersize=4,
            linewidth=1,
            label=name,
        )
    axis.set_yticks(range(len(lines)), ["\n".join(wrap(plot_text(line, 60), 26)) for line in lines], fontsize=8)
    # Where the scores and their intervals are: positions are compared, not lengths from zero
    low, high = np.nanmin(values - reach[..., 0]), np.nanmax(values + reach[..., 1])
    margin = max(1, 0.05 * (high - low))
    axis.set(xlim=(max(0, low - margin), min(100, high + margin)), ylim=(len(lines) - 0.5, -0.5))
    axis.tick_params(axis="x", labelsize=8)
    axis.tick_params(axis="y", length=0)
    axis.xaxis.set_major_formatter("{x:g} %")
    axis.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=names_a_line, frameon=False, fontsize=8)
    save(figure, path)
