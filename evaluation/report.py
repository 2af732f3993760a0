"""Results side by side: a markdown table and a picture.

python -m evaluation.report scores/*.json --output-dir scores
"""

import argparse
import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from conversion.files import new_file, one_line_errors, output_folder, write_text
from conversion.markdown import escape, one_line
from conversion.result_schema import read_result, require_result
from evaluation.results import named_folder

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402  after the choice of a backend that needs no screen

Results = Sequence[dict[str, Any] | str | Path]
# Results of one task must agree in these to stand in one column. Results of earlier versions lack the last two.
SAME_FOR_TASK = ("protocol", "num_samples", "title", "primary", "data", "num_captions")
# Results of one model must agree in these to stand in one row.
SAME_FOR_MODEL = ("weights", "dtype", "changes")
# The only markup in a cell: a score in bold
BOLD = re.compile(r"\*\*[\d.]+%\*\*")
# Inches
MAX_WIDTH, MAX_HEIGHT = 60, 20


def write_report(results: Results, output_dir: str | Path, baseline: str | None = None) -> str:
    """Write `report.md` and `report.png`.

    Args:
        results: of `evaluation.evaluate.evaluate_model`, or the files it wrote.
        baseline: the model that the others' scores are compared with, in brackets.

    Returns:
        The table: a row a model, a column a task and primary metric, in percent.

    Raises:
        OSError: the folder cannot be made.
        ValueError: there are no results, two of one model and task, tasks that a model lacks, a score that is not
            finite, results of one task with different data, protocols, numbers of samples or metrics, or of one model
            with different weights.
    """
    table = arrange(results)
    if baseline is not None and baseline not in table:
        raise ValueError(f"the baseline {baseline!r} has no results; there are {', '.join(table)}")
    summary = _summary(table, baseline)
    sections = ["# Evaluation", summary, "![scores](report.png)", "## All metrics", _all_metrics(table)]
    sections += ["## How it was measured", _protocols(table)]
    output_dir = Path(output_dir)
    with output_folder(output_dir), new_file(output_dir / "report.png") as picture:
        _draw(table, picture)
        write_text(output_dir / "report.md", "\n\n".join(sections))
    return summary


def _read(result: dict[str, Any] | str | Path) -> dict[str, Any]:
    if isinstance(result, str | Path):
        return read_result(result)
    if not isinstance(result, dict):
        raise ValueError(f"a result is a dictionary or a file, not {result!r}")
    return require_result(result, f"what is given of {result.get('model')!r}")


def arrange(results: Results) -> dict[str, dict[str, dict[str, Any]]]:
    """model -> task -> result, whole and comparable. Raises as `write_report`."""
    results = [_read(result) for result in results]
    if not results:
        raise ValueError("there are no results to report")
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
        missing = sorted(set(first) - set(row))
        if missing:
            raise ValueError(
                f"{model!r} has no result on {', '.join(missing)}: measure it, or report fewer tasks or models"
            )
    return {model: {task: row[task] for task in first} for model, row in table.items()}


def differ(result: dict[str, Any], other: dict[str, Any], key: str) -> bool:
    """Whether results disagree in what both have; where one has no changes, there were none."""
    if key == "changes":
        return (result.get(key) or {}) != (other.get(key) or {})
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
    columns = primary_columns(next(iter(table.values())))
    rows = []
    for model, row in table.items():
        cells = []
        for task, metric in columns:
            value = row[task]["metrics"][metric]
            cell = f"{value:.1%}"
            if baseline not in (None, model):
                cell += f" ({100 * (value - table[baseline][task]['metrics'][metric]):+.1f})"
            cells.append(cell)
        rows.append([model, *cells])
    return markdown_table(["model", *columns.values()], rows)


def _all_metrics(table) -> str:
    row = next(iter(table.values()))
    keys = [(task, metric) for task, result in row.items() for metric in result["metrics"]]
    rows = [
        [f"{task}: {metric}", *(f"{table[m][task]['metrics'][metric]:.1%}" for m in table)] for task, metric in keys
    ]
    return markdown_table(["metric", *table], rows)


def _protocols(table) -> str:
    row = next(iter(table.values()))
    lines = [
        f"{task}: {result['protocol']} ({result['num_samples']} samples, {result['num_skipped']} skipped)"
        for task, result in row.items()
    ]
    for model, results in table.items():
        for result in results.values():
            line = f"{model}: {result['source']}, {result['dtype']}, {computed_with(result)}"
            lines += [line] if line not in lines else []
    return "\n".join(f"- {escape(line)}" for line in lines)


def computed_with(result: dict[str, Any]) -> str:
    """The commit and the versions of a result."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return f"commit {result['commit']}, {versions}"


def plot_text(text: str, length: int = 40) -> str:
    """A text of somebody else as one line that matplotlib shows as it is, cut to a length."""
    text = one_line(text)
    text = text if len(text) <= length else f"{text[: length - 1]}…"
    # Between dollars would be mathematics; labels that begin with an underscore are left out of legends.
    return (f" {text}" if text.startswith("_") else text).replace("$", r"\$")


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """A table whose columns also line up as plain text. Cells are shown as they are, but for scores in bold."""
    lines = [[cell if BOLD.fullmatch(cell) else escape(cell) for cell in line] for line in [header, *rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    formatted = [f"| {' | '.join(cell.ljust(w) for cell, w in zip(line, widths, strict=True))} |" for line in lines]
    formatted.insert(1, f"|{'|'.join('-' * (width + 2) for width in widths)}|")
    return "\n".join(formatted)


def _draw(table, path: Path) -> None:
    columns = primary_columns(next(iter(table.values())))
    positions, width = np.arange(len(columns)), 0.8 / len(table)
    models = [plot_text(model) for model in table]
    # Room for a name, and for a number above each bar
    name_width = 0.7 + 0.09 * max(map(len, models))
    figure_width = min(MAX_WIDTH, max(name_width, len(columns) * max(1.6, 0.34 * len(table)) + 1))
    names_a_line = min(5, len(table), int(figure_width / name_width))
    name_lines = math.ceil(len(table) / names_a_line)
    figure, axis = plt.subplots(figsize=(figure_width, min(MAX_HEIGHT, 4.4 + 0.2 * name_lines)))
    for number, (model, row) in enumerate(zip(models, table.values(), strict=True)):
        values = [100 * row[task]["metrics"][metric] for task, metric in columns]
        bars = axis.bar(positions + (number - (len(table) - 1) / 2) * width, values, width * 0.94, label=model)
        axis.bar_label(bars, fmt="%.0f", fontsize=8, padding=1)
    titles = [re.split(": |, ", one_line(title)) for title in columns.values()]
    axis.set_xticks(positions, ["\n".join(plot_text(part, 24) for part in title[:6]) for title in titles], fontsize=9)
    axis.set_ylim(0, 108)
    axis.set_ylabel("%")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=names_a_line, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=130, format="png")
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m evaluation.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", type=Path, help="JSON files that evaluation.evaluate wrote")
    parser.add_argument("--output-dir", required=True, type=named_folder)
    parser.add_argument("--baseline", help="model to compare the others with")
    args = parser.parse_args(argv)
    with one_line_errors():
        print(write_report(args.results, args.output_dir, args.baseline))


if __name__ == "__main__":
    main()
