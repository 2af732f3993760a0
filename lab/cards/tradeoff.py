"""Learned against kept, beside the lines of weight averages.

    python -m lab.cards.tradeoff model_cards/names_kept --learned names_learned --kept names_kept --base base

FOLDER has `seeds.json`, as `lab.cards.seeds` writes it, and gets `tradeoff.md` and `tradeoff.png`. Models named
"dense, 10 %" to "dense, 100 %" are the line "dense" of means of the base's weights and of those of the last, so much of
which is the last's (WiSE-FT, arXiv:2109.01903). Each other model, and each line's end, is compared with every line in
every seed: how much more it learned than the line has where the line kept as much or more.
"""

import itertools
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from clip_moe.engine.command_line import command
from clip_moe.engine.files import read_json
from clip_moe.engine.intervals import LEVEL
from clip_moe.engine.markdown import markdown_table
from clip_moe.evaluation.figures import plot_text, plt, save
from clip_moe.evaluation.page import write_page
from clip_moe.evaluation.task import PRIMARY_METRICS
from lab.cards.intervals import with_interval

ON_LINE = re.compile(r"(.+), (\d+(?:\.\d+)?) %")
Point = tuple[float, float]  # kept and learned, in percent


def above_line(point: Point, line: Sequence[Point]) -> float:
    """How much more a model learned than a line has where it kept as much or more.

    Args:
        line: from the base on, joined by straight pieces. Where nothing on it kept as much, what kept most counts.
    """
    kept, learned = point
    kept = min(kept, max(k for k, _ in line))
    reached = [line_learned for line_kept, line_learned in line if line_kept >= kept]
    for (k1, l1), (k2, l2) in zip(line, line[1:], strict=False):
        if min(k1, k2) < kept < max(k1, k2):
            reached.append(l1 + (l2 - l1) * (kept - k1) / (k2 - k1))
    return learned - max(reached)


@command
def write_tradeoff(folder: Path, /, learned: str, kept: str, base: str) -> str:
    """Write `tradeoff.md` and `tradeoff.png`.

    Args:
        folder: with `seeds.json`.
        learned, kept: the tasks whose main scores are averaged as what was learned and what was kept.
        base: the model that all lines begin with.

    Returns:
        The table: a row a model that is no inner point of a line.
    """
    seeds = read_json(folder / "seeds.json")
    points = {model: _points(tasks, kept, learned) for model, tasks in seeds.items()}
    lines: dict[str, list[str]] = {}
    for model in points:
        if match := ON_LINE.fullmatch(model):
            lines.setdefault(match[1], [base]).append(model)
    for line in lines.values():
        line[1:] = sorted(line[1:], key=lambda model: float(ON_LINE.fullmatch(model)[2]))
    inner = {model for line in lines.values() for model in line[1:-1]}
    shown = [model for model in points if model not in inner]
    rows = []
    for model in shown:
        cells = [_mean(points[model], 1), _mean(points[model], 0)]
        for line in lines.values():
            cells.append("" if model in (base, line[-1]) else _above(points[model], [points[name] for name in line]))
        rows.append([model, *cells])
    number = len(points[base])
    table = markdown_table(["model", "learned", "kept", *(f"above {name}" for name in lines)], rows)
    text = (
        f"Learned: {learned}; kept: {kept}; the mean of their main scores (of retrieval, recall at 1), in percent. "
        f"Mean ± sample standard deviation of {number} seeds. Above a line: how much more the model learned "
        f"than the line has where it kept as much or more, ± the paired {LEVEL:.0%} interval over the seeds, each "
        "alone."
    )
    lines = {name: [points[model] for model in line] for name, line in lines.items()}
    pictures = {"tradeoff.png": lambda path: _draw({model: points[model] for model in shown}, lines, path)}
    write_page(folder / "tradeoff", f"{table}\n\n{text}\n\n![learned against kept](tradeoff.png)", pictures)
    return table


def _points(tasks: Mapping[str, Sequence[Mapping[str, float]]], *names: str) -> list[tuple[float, ...]]:
    """For each seed, the scores of these tasks."""
    scores = []
    for results in (tasks[name] for name in names):
        main = next(metrics for metrics in PRIMARY_METRICS.values() if set(metrics) <= set(results[0]))
        scores.append([100 * statistics.mean(result[metric] for metric in main) for result in results])
    return list(zip(*scores, strict=True))


def _mean(points: Sequence[tuple[float, ...]], which: int) -> str:
    values = [point[which] for point in points]
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"


def _above(points: Sequence[Point], line: Sequence[Sequence[Point]]) -> str:
    return with_interval([above_line(point, seed_line) for point, *seed_line in zip(points, *line, strict=True)])


def _draw(points: Mapping[str, Sequence[Point]], lines: Mapping[str, Sequence[Sequence[Point]]], path: Path) -> None:
    figure, axis = plt.subplots(figsize=(8, 5.5))
    for style, (name, line) in zip(itertools.cycle(("-", "--", ":", "-.")), lines.items(), strict=False):
        means = np.mean(line, axis=1)
        axis.plot(
            means[:, 0], means[:, 1], style, color="0.5", marker=".", label=plot_text(f"{name}, averaged with the base")
        )
    for number, (model, seed_points) in enumerate(points.items()):
        mean, spread = np.mean(seed_points, axis=0), np.std(seed_points, axis=0, ddof=1)
        axis.errorbar(
            *mean, xerr=spread[0], yerr=spread[1], fmt="os^DvP*X"[number % 8], color=f"C{number % 10}", capsize=2,
            markersize=8, label=plot_text(model),
        )  # fmt: skip
    axis.set_xlabel(f"kept, % (± standard deviation of {len(next(iter(points.values())))} seeds)")
    axis.set_ylabel("learned, %")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    save(figure, path)


if __name__ == "__main__":
    write_tradeoff.main()
