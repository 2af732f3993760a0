"""Dense models of several widths beside sparse ones, all with equal multiply-adds in training.

    python -m model_cards.frontier model_cards/law/points.json model_cards/law/outcome_points.json --world names \
      --facts 2048 --width 16 --exposures 640 --output-dir model_cards/frontier_names_2048

The budget is that of a dense model WIDTH wide which sees each fact EXPOSURES times. Of each model the rate counts at
which its first seed scores best. A sparse model's gain is over the dense one with the highest mean, seed by seed.
"""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from evaluation.page import write_page
from model_cards.law import SAME_BUDGET, read_points
from model_cards.law_cases import RATE, Case, batch_size, costs
from model_cards.law_points import Point
from records.command_line import Folder, command
from records.intervals import with_interval
from records.markdown import markdown_table

Model = tuple[int, int]  # width, experts


def at_best_rate(points: Sequence[Point]) -> dict[Model, dict[int, Point]]:
    """Model -> seed -> its point, at the rate that is best in the first seed."""
    rates: dict[Model, dict[float, dict[int, Point]]] = defaultdict(lambda: defaultdict(dict))
    for point in points:
        rates[point.width, point.experts][point.rate][point.seed] = point
    best = {}
    for model, of_model in rates.items():
        first = min(seed for of_rate in of_model.values() for seed in of_rate)
        tried = [of_rate for of_rate in of_model.values() if first in of_rate]
        best[model] = max(tried, key=lambda of_rate: of_rate[first].recall)
    return best


def of_budget(points: Sequence[Point], world: str, facts: int, width: int, exposures: int) -> list[Point]:
    """The points with the training multiply-adds of a dense model."""
    case = Case(world, facts, width, exposures)
    budget = costs(world, width, 0, 2)[0] * exposures * facts // batch_size(case) * batch_size(case)
    same = [point for point in points if abs(point.training / budget - 1) < SAME_BUDGET]
    return [point for point in same if (point.world, point.facts) == (world, facts)]


@command
def write_frontier(
    points: Sequence[Path], world: str, facts: int, width: int, exposures: int, output_dir: Folder
) -> str:
    """Write `frontier.md` and `frontier.json`. Returns the table.

    Args:
        points: files that `model_cards.law_points` wrote.
        world, facts: what the models learned.
        width, exposures: of the dense model whose multiply-adds are the budget.
    """
    run = [point for file in points for point in read_points(file)]
    models = at_best_rate(of_budget(run, world, facts, width, exposures))
    dense = {model: of_model for model, of_model in models.items() if not model[1]}
    most = max(len(of_model) for of_model in dense.values())
    tried = [model for model in dense if len(dense[model]) == most]
    rival = max(tried, key=lambda model: _mean(dense[model], "recall"))
    order = sorted(models, key=lambda model: model[::-1])
    rows = [_row(model, models[model], models[rival], model == rival) for model in order]
    head = ["model", "rate", "seeds", "R@1", f"above the best dense, {rival[0]} wide"]
    table = markdown_table([*head, "multiply-adds of use", "seconds of training"], rows)
    text = (
        "R@1: mean of both directions, and sample standard deviation over seeds, in percent. Gains: the mean "
        "difference seed by seed, ± its 95 % interval, each alone. Rates: times 0.256 / width; where several were "
        "tried, the best in the first seed. In brackets: times the rival. Seconds: on one core of an x86-64, beside "
        "another run."
    )
    data = [asdict(models[model][seed]) for model in order for seed in sorted(models[model])]
    write_page(output_dir / "frontier", f"{table}\n\n{text}", data=data)
    return table


def _mean(of_model: Mapping[int, Point], name: str) -> float:
    return statistics.mean(getattr(point, name) for point in of_model.values())


def _row(model: Model, of_model: Mapping[int, Point], rival: Mapping[int, Point], is_rival: bool) -> list[str]:
    width, experts = model
    recalls = [100 * point.recall for point in of_model.values()]
    spread = f" ± {statistics.stdev(recalls):.1f}" if len(recalls) > 1 else ""
    both = sorted(of_model.keys() & rival.keys())
    gains = [100 * (of_model[seed].recall - rival[seed].recall) for seed in both]
    gain = "" if is_rival else with_interval(gains) if len(gains) > 1 else f"{gains[0]:+.1f}" if gains else ""
    row = [f"{width} wide, {experts} experts" if experts else f"dense, {width} wide"]
    row += [f"{next(iter(of_model.values())).rate * width / RATE:g}", str(len(of_model))]
    row += [f"{statistics.mean(recalls):.1f}{spread}", gain]
    for name in ("multiply_adds", "seconds"):
        row.append(f"{_mean(of_model, name):,.0f} ({_mean(of_model, name) / _mean(rival, name):.2f})")
    return row


if __name__ == "__main__":
    write_frontier.main()
