"""The gain of experts over the number of facts in four worlds, with the law's line.

    python -m lab.law.curves model_cards/law/predictions.json model_cards/law/points.json \
      model_cards/law/outcome_points.json --output_dir model_cards/law

`predictions.json` holds the law of the line, and `points.json` what that was fitted to. In each world, a dense model
and one with 8 experts have one width, and the multiply-adds in which the dense one sees each fact a fixed number of
times.
"""

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from clip_moe.engine.command_line import Folder, command
from clip_moe.engine.intervals import LEVEL
from clip_moe.engine.markdown import markdown_table
from clip_moe.evaluation.figures import grid, save
from clip_moe.evaluation.page import write_page
from lab.law.cases import Case
from lab.law.fit import known, model_of_case, of_rule, pairs, read_points, seed_reach
from lab.law.law import LEVEL as LAW_LEVEL
from lab.law.law import Law, interval, law_of
from lab.law.points import Point

# World -> width, and exposures of the dense model
WORLDS = {"names": (16, 640), "icons": (24, 320), "characters": (24, 320), "molecules": (32, 640)}
# World -> number of facts -> seed -> gain
Measured = dict[str, dict[int, dict[int, float]]]
LINE_FACTS = np.unique(np.geomspace(256, 4096, 33).astype(int))


def line(law: Law, world: str, facts: int) -> tuple[float, float, float]:
    """The law's gain, and its interval."""
    width, exposures = WORLDS[world]
    models = [model_of_case(Case(world, facts, width, exposures, experts)) for experts in (8, 0)]
    of_world = law.facts(facts, world)
    sparse, dense = (float(law.share(of_world, model)) for model in models)
    return sparse - dense, *interval(law.gains(of_world, *models))


def gains_of(points: Sequence[Point], world: str) -> dict[int, dict[int, float]]:
    """Number of facts -> seed -> gain, of a world's curve."""
    width, exposures = WORLDS[world]
    found: dict[int, dict[int, float]] = {}
    for sparse, dense in pairs(points):
        one, other = points[sparse], points[dense]
        same = (one.world, one.width, other.width, one.experts) == (world, width, width, 8)
        if same and one.experts_per_token == 2 and abs(other.exposures / exposures - 1) < 0.02:
            found.setdefault(one.facts, {})[one.seed] = known(one) - known(other)
    return dict(sorted(found.items()))


@command
def draw_curves(predictions: Path, points: Path, outcome_points: Path, /, output_dir: Folder) -> str:
    """Write `curves.md` and `curves.png`.

    Args:
        predictions: what `lab.law.fit` wrote before the runs.
        points: those that its law was fitted to.
        outcome_points: those that were run since.
    """
    law = law_of(json.loads(predictions.read_text(encoding="utf-8"))["law"])
    run = of_rule(read_points(points, outcome_points))
    fitted_to = of_rule(read_points(points))
    measured = {world: gains_of(run, world) for world in WORLDS}
    before = {world: gains_of(fitted_to, world) for world in WORLDS}
    kinds = {False: [point for point in run if point.world != "names"], True: [p for p in run if p.world == "names"]}
    reaches = {world: 100 * seed_reach(kinds[world == "names"]) for world in WORLDS}
    rows = []
    for world, of_world in measured.items():
        for facts, of_seeds in of_world.items():
            gains = [100 * gain for gain in of_seeds.values()]
            gain, low, high = (100 * number for number in line(law, world, facts))
            known_before = ", ".join(str(seed) for seed in sorted(before[world].get(facts, ())))
            mean = f"{statistics.mean(gains):+.1f} ± {reaches[world] / math.sqrt(len(gains)):.1f}"
            rows.append([world, f"{facts:,}", f"{gain:+.1f} ({low:+.1f} to {high:+.1f})", mean, str(len(gains))])
            rows[-1].append(known_before)
    head = ["world", "facts", "the law's gain", "gain", "seeds", "seeds among the points of the fit"]
    table = markdown_table(head, rows)
    text = (
        "Gains: of the share of bits, 8 experts over a dense model of the same width and multiply-adds in training, in "
        f"points. The law's: with its {LAW_LEVEL:.0%} interval. Measured: mean and {LEVEL:.0%} interval over seeds, by "
        "the deviation between seeds of all cases of names, or of real pictures. "
        + ", ".join(f"{world}: {width} wide, {number} exposures" for world, (width, number) in WORLDS.items())
        + "."
    )
    pictures = {"curves.png": lambda path: _draw(law, measured, reaches, path)}
    write_page(output_dir / "curves", f"{table}\n\n{text}\n\n![gain over facts](curves.png)", pictures)
    return table


def _draw(law: Law, measured: Measured, reaches: dict[str, float], path: Path) -> None:
    figure, axes = grid(len(WORLDS), 2, 4.2, 3.0)
    for axis, (world, of_world) in zip(axes.flat, measured.items(), strict=True):
        said = 100 * np.array([line(law, world, int(number)) for number in LINE_FACTS])
        axis.axhline(0, color="0.7", linewidth=0.8)
        axis.fill_between(LINE_FACTS, said[:, 1], said[:, 2], color="C0", alpha=0.15, linewidth=0)
        axis.plot(LINE_FACTS, said[:, 0], color="C0", label="the law, before the runs")
        for facts, of_seeds in of_world.items():
            gains = [100 * gain for gain in of_seeds.values()]
            axis.plot([facts] * len(gains), gains, ".", color="0.6", markersize=4)
            reach = reaches[world] / math.sqrt(len(gains))
            axis.errorbar(facts, statistics.mean(gains), yerr=reach, fmt="o", color="C1", capsize=3)
        width, exposures = WORLDS[world]
        axis.set_title(f"{world}: {width} wide, {exposures} exposures")
        axis.set_xscale("log", base=2)
        axis.set_xticks(2 ** np.arange(8, 13), [f"{2**power:,}" for power in range(8, 13)])
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[-1]:
        axis.set_xlabel("facts")
    for axis in axes[:, 0]:
        axis.set_ylabel("gain of 8 experts, points")
    save(figure, path)


if __name__ == "__main__":
    draw_curves.main()
