"""Results side by side: tables as markdown and as one HTML page, and a chart."""

if __name__ == "__main__":
    from evaluation.commands import report

    report.main()

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evaluation.figures import plot_text, plt, save
from evaluation.intervals import LEVEL, sampling_error
from evaluation.page import write_page
from evaluation.task import INFORMATION
from records.markdown import escape, item, markdown_table, one_line
from records.result_schema import TextCounts, read_result, require_result

Results = Sequence[dict[str, Any] | str | Path]
# Results of one task must agree in these to stand in one column.
SAME_FOR_TASK = ("protocol", "num_samples", "title", "primary", "data", "num_captions")
# Results of one model must agree in these to stand in one row.
SAME_FOR_MODEL = ("weights", "dtype", "changes", "batch_size")
# Metrics that are no mean over samples
NO_MEANS = ("mean_per_class_recall", "mean_of_top1_and_top5", "roc_auc", *INFORMATION)
# Inches
MAX_WIDTH, MAX_HEIGHT = 60, 20


def write_report(results: Results, output_dir: str | Path, baseline: str | None = None) -> str:
    """Write `report.md`, `report.png` and `report.html`, which holds both.

    Args:
        results: of `evaluation.evaluate.evaluate_model`, or the files it wrote.
        baseline: the model that the others' scores are compared with, in brackets.

    Returns:
        The table: a row a model, a column a task and primary metric, in percent; blank where there is no result.

    Raises:
        ValueError: two results of one model and task, a score that is not finite, results of one task with different
            data, protocols, numbers of samples or metrics, or of one model with different weights.
    """
    table = arrange(results)
    if baseline is not None and baseline not in table:
        raise ValueError(f"the baseline {baseline!r} has no results; there are {', '.join(table)}")
    summary = _summary(table, baseline)
    sections = [
        "# Evaluation",
        summary,
        *([] if baseline is None else [_brackets(baseline)]),
        "![scores](report.png)",
        "## All metrics",
        _all_metrics(table),
    ]
    sections += ["## How it was measured", _protocols(table)]
    columns = primary_columns(of_tasks(table))
    scores = {model: [_score(row, *column) for column in columns] for model, row in table.items()}
    pictures = {"report.png": lambda path: draw_scores(list(columns.values()), scores, path)}
    write_page(Path(output_dir) / "report", "\n\n".join(sections), pictures)
    return summary


def _read(result: dict[str, Any] | str | Path) -> dict[str, Any]:
    if isinstance(result, str | Path):
        return read_result(result)
    return require_result(result, f"what is given of {result.get('model')!r}")


def arrange(results: Results) -> dict[str, dict[str, dict[str, Any]]]:
    """model -> task -> result, of the tasks that a model was measured on. Raises as `write_report`."""
    results = [_read(result) for result in results]
    table: dict[str, dict[str, dict[str, Any]]] = {}
    first: dict[str, dict[str, Any]] = {}
    for result in results:
        model, task = result["model"], result["task"]
        if task in table.setdefault(model, {}):
            raise ValueError(f"there are two results of {model!r} on {task}")
        table[model][task] = result
        other = first.setdefault(task, result)
        if not set(result["primary"]) <= set(result["metrics"]) == set(other["metrics"]):
            raise ValueError(f"{task}: {model!r} and {other['model']!r} need the same metrics, with the primary ones")
        bad = [metric for metric, value in result["metrics"].items() if not 0 <= value <= 1]
        if bad:
            raise ValueError(f"{task}: {', '.join(bad)} of {model!r} is not finite, or no share from 0 to 1")
        for key in SAME_FOR_TASK:
            if differ(result, other, key):
                raise ValueError(
                    f"{task}: {key} is {other[key]!r} for {other['model']!r} but {result[key]!r} for {model!r}; "
                    "such scores cannot be compared"
                )
    for model, row in table.items():
        one, *others = row.values()
        for key, other in ((key, other) for key in SAME_FOR_MODEL for other in others if differ(one, other, key)):
            raise ValueError(
                f"{model!r} has results of different models: {key} is {one.get(key)!r} on {one['task']} but "
                f"{other.get(key)!r} on {other['task']}; measure it again, or give them different names"
            )
    return {model: {task: row[task] for task in first if task in row} for model, row in table.items()}


def require_whole(table: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Raises a ValueError if a model of `arrange` lacks a task."""
    tasks = {task for row in table.values() for task in row}
    for model, row in table.items():
        missing = sorted(tasks - set(row))
        if missing:
            raise ValueError(
                f"{model!r} has no result on {', '.join(missing)}: measure it, or leave out these tasks or this model"
            )


def of_tasks(table: dict[str, dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """task -> the result of the first model that has one, for what all results of a task share."""
    first: dict[str, dict[str, Any]] = {}
    for row in table.values():
        first |= {task: result for task, result in row.items() if task not in first}
    return first


def differ(result: dict[str, Any], other: dict[str, Any], key: str) -> bool:
    """Whether results disagree in what both have. Where one has no changes, there were none; the batch size counts
    where scores depend on it."""
    if key == "changes":
        return (result.get(key) or {}) != (other.get(key) or {})
    if key == "batch_size" and not (result.get("depends_on_batch") or other.get("depends_on_batch")):
        return False
    return key in result and key in other and result[key] != other[key]


def best_of(results: Sequence[dict[str, Any]], title: str, models: Sequence[str]) -> list[dict[str, Any]]:
    """One result a task, named `title`, with the best score of these models in each metric. The mean of several tasks
    is that of the best scores."""
    best = {}
    for result in results:
        if result["model"] in models:
            # It is no model's, so nobody may find it by the hash of one.
            result = {key: value for key, value in result.items() if key not in ("weights", "fingerprint")}
            other = best.setdefault(
                result["task"], {**result, "model": title, "source": f"best of {', '.join(models)}"}
            )
            scores = {name: max(other["metrics"][name], value) for name, value in result["metrics"].items()}
            parts = [value for name, value in scores.items() if name.startswith("accuracy/")]
            if parts:
                scores["accuracy"] = sum(parts) / len(parts)
            best[result["task"]] = {**other, "metrics": scores}
    return list(best.values())


def primary_columns(row: dict[str, dict[str, Any]]) -> dict[tuple[str, str], str]:
    """(task, metric) -> title, of the primary metrics. Tasks of the same title are told apart by their names."""
    titles = Counter(result["title"] for result in row.values())
    return {
        (task, metric): f"{result['title']}{f' ({task})' if titles[result['title']] > 1 else ''}: {name}"
        for task, result in row.items()
        for metric, name in result["primary"].items()
    }


def _summary(table, baseline: str | None) -> str:
    columns = primary_columns(of_tasks(table))
    rows = []
    for model, row in table.items():
        cells = []
        for task, metric in columns:
            value = _score(row, task, metric)
            cell = "" if value is None else f"{value:.1%}"
            other = None if baseline in (None, model) else _score(table[baseline], task, metric)
            if None not in (value, other):
                number = number_of_means(row[task], metric)
                error = "" if number is None else f" ± {100 * sampling_error(value, other, number):.1f}"
                cell += f" ({100 * (value - other):+.1f}{error})"
            cells.append(cell)
        rows.append([model, *cells])
    return markdown_table(["model", *columns.values()], rows)


def _brackets(baseline: str) -> str:
    return (
        f"In brackets: the difference to {escape(baseline)} in percent points, ± its {LEVEL:.0%} interval over test "
        "samples, where a metric is a mean over them. It does not cover what another seed of training would change."
    )


def number_of_means(result: dict[str, Any], metric: str) -> int | None:
    """The number of samples that a metric is the mean of; None: it is the mean of other means, or no mean."""
    if metric in NO_MEANS or any(name.startswith(f"{metric}/") for name in result["metrics"]):
        return None
    return result.get("num_captions", result["num_samples"]) if metric.startswith("text_to") else result["num_samples"]


def _score(row: dict[str, dict[str, Any]], task: str, metric: str) -> float | None:
    return row[task]["metrics"][metric] if task in row else None


def _all_metrics(table) -> str:
    rows = []
    for task, metric in ((task, metric) for task, result in of_tasks(table).items() for metric in result["metrics"]):
        values = (_score(row, task, metric) for row in table.values())
        rows.append([f"{task}: {metric}", *("" if value is None else f"{value:.1%}" for value in values)])
    return markdown_table(["metric", *table], rows)


def _protocols(table) -> str:
    lines = [
        f"{task}: {result['protocol']} ({result['num_samples']} samples, {result['num_skipped']} skipped)"
        for task, result in of_tasks(table).items()
    ]
    for model, results in table.items():
        for task, result in results.items():
            texts = result.get("texts") and TextCounts(**result["texts"]).sentence
            lines += [f"{model} on {task}: {texts}"] if texts else []
            line = f"{model}: {result['source']}, {result['dtype']}, {computed_with(result)}"
            lines += [line] if line not in lines else []
    return "\n".join(map(item, lines))


def computed_with(result: dict[str, Any]) -> str:
    """The commit and the versions of a result."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return f"commit {result['commit']}, {versions}"


def draw_scores(
    columns: Sequence[str],
    scores: Mapping[str, Sequence[float | None]],
    path: Path,
    spreads: Mapping[str, Sequence[float]] | None = None,
) -> None:
    """A group of bars for each column, with a bar for each model.

    Args:
        scores: model -> a share from 0 to 1 for each column; None where there is none.
        spreads: model -> half the length of each bar's error bar.
    """
    positions, width = np.arange(len(columns)), 0.8 / len(scores)
    models = [plot_text(model) for model in scores]
    # Room for a name, and for a number above each bar
    name_width = 0.7 + 0.09 * max(map(len, models))
    figure_width = min(MAX_WIDTH, max(name_width, len(columns) * max(1.6, 0.34 * len(scores)) + 1))
    names_a_line = min(5, len(scores), int(figure_width / name_width))
    name_lines = math.ceil(len(scores) / names_a_line)
    figure, axis = plt.subplots(figsize=(figure_width, min(MAX_HEIGHT, 4.4 + 0.2 * name_lines)))
    for number, (model, row) in enumerate(scores.items()):
        values = [math.nan if score is None else 100 * score for score in row]
        errors = None if spreads is None else [100 * spread for spread in spreads[model]]
        place = positions + (number - (len(scores) - 1) / 2) * width
        # There are ten colors
        bars = axis.bar(
            place, values, width * 0.94, yerr=errors, capsize=2, label=models[number], hatch="//" * (number // 10)
        )
        axis.bar_label(bars, ["" if math.isnan(value) else f"{value:.0f}" for value in values], fontsize=8, padding=1)
    titles = [re.split(": |, ", one_line(title)) for title in columns]
    axis.set_xticks(positions, ["\n".join(plot_text(part, 24) for part in title[:6]) for title in titles], fontsize=9)
    axis.set_ylim(0, 108)
    axis.set_ylabel("%")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=names_a_line, frameon=False)
    figure.tight_layout()
    save(figure, path)
