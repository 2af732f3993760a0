"""Sparse models beside dense ones of another budget: as much to use, as many seconds, parameters or data.

    python -m lab.law.differences model_cards/law/points.json model_cards/law/outcome_points.json \
      --output_dir model_cards/law
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from clip_moe.engine.command_line import Folder, command
from clip_moe.engine.intervals import with_interval
from clip_moe.engine.markdown import markdown_table
from clip_moe.evaluation.page import write_page
from lab.law.cases import Case
from lab.law.fit import read_points
from lab.law.outcomes import points_of
from lab.law.points import Point

NAMES_2048 = Case("names", 2048, 16, 640, experts=8)
NAMES_4096 = Case("names", 4096, 20, 640, experts=32, budget_width=16)
NAMES_1024 = Case("names", 1024, 12, 640, experts=8)
ICONS_2048 = Case("icons", 2048, 16, 640, experts=8)
# What is alike -> a model and its rival
COMPARED = {
    "use": (NAMES_4096, Case("names", 4096, 24, 640, budget_width=16)),
    "seconds": (NAMES_4096, Case("names", 4096, 32, 400)),
    "seconds, both 32 wide": (Case("names", 4096, 32, 320, experts=8), Case("names", 4096, 32, 400)),
    "seconds, 2,048": (NAMES_2048, Case("names", 2048, 20, 928, budget_width=16)),
    "parameters and multiply-adds": (NAMES_2048, Case("names", 2048, 30, 640, budget_width=16)),
    "parameters and data": (NAMES_2048, Case("names", 2048, 30, 533)),
    "training, dense": (NAMES_1024, replace(NAMES_1024, experts=0)),
    "training, 1 expert a token": (replace(NAMES_1024, experts_per_token=1), NAMES_1024),
    "training, 4 experts a token": (replace(NAMES_1024, experts_per_token=4), NAMES_1024),
    "training, icons": (ICONS_2048, Case("icons", 2048, 20, 640, budget_width=16)),
}


@command
def write_differences(points: Sequence[Path], /, output_dir: Folder) -> str:
    """Write `differences.md`. Returns its table.

    Args:
        points: files that `lab.law.points` wrote.
    """
    run, rows = read_points(*points), []
    for alike, cases in COMPARED.items():
        sparse, dense = (points_of(case, run) for case in cases)
        seeds = sorted(sparse.keys() & dense.keys())
        gains = [100 * (sparse[seed].recall - dense[seed].recall) for seed in seeds]
        names = map(_title, cases)
        rows.append([f"{cases[0].facts:,} {cases[0].world}", alike, *names, str(len(seeds)), with_interval(gains)])
        rows[-1] += [_shown([of[seed] for seed in seeds]) for of in (sparse, dense)]
        ratios = (_mean(sparse, seeds, name) / _mean(dense, seeds, name) for name in ("training", "multiply_adds"))
        rows[-1] += [f"{ratio:.2f}" for ratio in ratios]
        rows[-1].append(", ".join(f"{_mean(of, seeds, 'seconds'):.0f}" for of in (sparse, dense)))
    head = [
        "facts",
        "alike",
        "model",
        "rival",
        "seeds",
        "gain",
        "R@1",
        "rival's R@1",
        "training",
        "use",
        "seconds",
    ]
    table = markdown_table(head, rows)
    text = (
        "Gains in R@1, the mean of both directions, seed by seed, with their 95 % interval, in points. ± of R@1: "
        "sample standard deviation. Training and use: multiply-adds of the model over those of its rival. "
        "Seconds: of training, of both, on one core of an x86-64, beside another run."
    )
    write_page(output_dir / "differences", f"{table}\n\n{text}")
    return table


def _title(case: Case) -> str:
    if not case.experts:
        return f"dense, {case.width} wide"
    return f"{case.width} wide, {case.experts} experts" + f", {case.experts_per_token} a token" * (
        case.experts_per_token != 2
    )


def _shown(points: Sequence[Point]) -> str:
    recalls = [100 * point.recall for point in points]
    return f"{statistics.mean(recalls):.1f} ± {statistics.stdev(recalls):.1f}"


def _mean(points: Mapping[int, Point], seeds: Sequence[int], name: str) -> float:
    return statistics.mean(getattr(points[seed], name) for seed in seeds)


if __name__ == "__main__":
    write_differences.main()
