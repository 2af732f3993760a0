"""Dense models of several widths beside sparse ones, all of a budget with equal multiply-adds in training.

    python -m lab.cards.frontier model_cards/law/points.json model_cards/law/outcome_points.json --world names \
      --facts 2048 --width 16 --exposures 320 640 1280 --output_dir model_cards/frontier_names_2048

A budget is that of a dense model WIDTH wide which sees each fact EXPOSURES times. Of each model the rate counts at
which its first seed scores best. A sparse model's gain is over the dense one with the highest mean, seed by seed.
"""

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from clip_moe.engine.command_line import Folder, command
from clip_moe.engine.files import new_file
from clip_moe.engine.markdown import markdown_table
from clip_moe.evaluation.figures import plt, save
from clip_moe.evaluation.page import write_page
from lab.cards.intervals import with_interval
from lab.law.cases import RATE, Case, batch_size, costs
from lab.law.fit import SAME_BUDGET, read_points
from lab.law.points import Point

Model = tuple[int, int]  # width, experts


def at_best_rate(points: Sequence[Point]) -> dict[Model, dict[int, Point]]:
    """Model -> seed -> its point, at the rate that is best in the first seed."""
    rates: dict[Model, dict[float, dict[int, Point]]] = defaultdict(lambda: defaultdict(dict))
    for point in points:
        rates[point.width, point.experts][point.rate][point.seed] = point
    best = {}
    for model, model_rates in rates.items():
        first = min(seed for seed_points in model_rates.values() for seed in seed_points)
        tried = [seed_points for seed_points in model_rates.values() if first in seed_points]
        best[model] = max(tried, key=lambda seed_points: seed_points[first].recall)
    return best


def points_of_budget(points: Sequence[Point], world: str, facts: int, width: int, exposures: int) -> list[Point]:
    """The points with the training multiply-adds of a dense model."""
    case = Case(world, facts, width, exposures)
    budget = costs(world, width, 0, 2)[0] * exposures * facts // batch_size(case) * batch_size(case)
    same = [point for point in points if abs(point.training / budget - 1) < SAME_BUDGET]
    return [point for point in same if (point.world, point.facts) == (world, facts)]


@dataclass(frozen=True)
class Budget:
    """The models of a budget.

    Args:
        exposures: how often a dense model of the budget's width sees each fact.
        models: model -> seed -> its point, at its best rate.
        rival: the dense model with the highest mean, of those with most seeds.
    """

    exposures: int
    models: dict[Model, dict[int, Point]]

    @property
    def rival(self) -> Model:
        dense = {model: seed_points for model, seed_points in self.models.items() if not model[1]}
        return max(dense, key=lambda model: (len(dense[model]), _mean(dense[model], "recall")))

    @property
    def order(self) -> list[Model]:
        """Dense models first, each kind by its width."""
        return sorted(self.models, key=lambda model: model[::-1])


@command
def write_frontier(
    points: Sequence[Path], /, world: str, facts: int, width: int, exposures: Sequence[int], output_dir: Folder
) -> str:
    """Write `frontier.md`, `frontier.png`, `frontier.json`, and `seeds.json` for claims: scores of the models that have
    as many seeds as the best dense one, of the budget with most models. Returns the table.

    Args:
        points: files that `lab.law.points` wrote.
        world, facts: what the models learned.
        width, exposures: of the dense models whose multiply-adds are the budgets.
    """
    run = read_points(*points)
    budgets = [Budget(number, at_best_rate(points_of_budget(run, world, facts, width, number))) for number in exposures]
    rows = [_row(budget, model) for budget in budgets for model in budget.order]
    head = ["budget", "model", "rate", "seeds", "R@1", "above the best dense"]
    table = markdown_table([*head, "multiply-adds of use", "seconds of training"], rows)
    text = (
        f"Budgets: the multiply-adds of a dense model {width} wide that sees each of {facts:,} {world} so many times. "
        "R@1: mean of both directions, and sample standard deviation over seeds, in percent. Gains: the mean "
        "difference seed by seed, ± its 95 % interval, each alone. Rates: times 0.256 / width; where several were "
        "tried, the best in the first seed. In brackets: times the best dense model of the budget. Seconds: on one "
        "core of an x86-64, beside another run.\n\n"
        "The pictures have all models of the table, those with several seeds filled, and a line through the best dense "
        "and the best sparse ones of the budgets; on the right, the models of the budget "
        f"{_with_most_models(budgets).exposures} alone."
    )
    data = [
        asdict(budget.models[model][seed])
        for budget in budgets
        for model in budget.order
        for seed in sorted(budget.models[model])
    ]
    pictures = {"frontier.png": lambda path: _draw(budgets, path)}
    write_page(output_dir / "frontier", f"{table}\n\n{text}\n\n![R@1 over costs](frontier.png)", pictures, data=data)
    budget = _with_most_models(budgets)
    seeds = sorted(budget.models[budget.rival])
    scores = {
        _title(model): {f"{world}_{facts}": [{"recall@1": budget.models[model][seed].recall} for seed in seeds]}
        for model in budget.order
        if sorted(budget.models[model]) == seeds
    }
    with new_file(output_dir / "seeds.json") as partial:
        partial.write_text(json.dumps(scores, indent=1) + "\n", encoding="utf-8")
    return table


def _title(model: Model) -> str:
    width, experts = model
    return f"{width} wide, {experts} experts" if experts else f"dense, {width} wide"


def _with_most_models(budgets: Sequence[Budget]) -> Budget:
    """That with most models."""
    return max(budgets, key=lambda budget: len(budget.models))


def _draw(budgets: Sequence[Budget], path: Path) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(12, 4), sharey=True, layout="constrained")
    panels = {"training": budgets, "seconds": budgets, "multiply_adds": [_with_most_models(budgets)]}
    labels = ("multiply-adds of training", "seconds of training", "multiply-adds of one use")
    for axis, label, (name, shown) in zip(axes, labels, panels.items(), strict=True):
        for kind, color in (("dense", "C0"), ("sparse", "C1")):
            best = []
            for budget in shown:
                places = []
                for (width, experts), seed_points in budget.models.items():
                    if bool(experts) == (kind == "sparse"):
                        places.append((_mean(seed_points, name), 100 * _mean(seed_points, "recall")))
                        fill = "full" if len(seed_points) > 1 else "none"
                        axis.plot(*places[-1], "o", color=color, fillstyle=fill)
                        text = f"{width}" + (f", {experts}" if experts else "")
                        axis.annotate(text, places[-1], (3, 3), textcoords="offset points", fontsize=7)
                if places:
                    best.append(max(places, key=lambda place: place[1]))
            axis.plot(*zip(*sorted(best), strict=True), color=color, alpha=0.5, label=f"best {kind}")
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter(ScalarFormatter(useMathText=True))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_xlabel(label)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("R@1, %")
    axes[0].legend(frameon=False)
    axes[1].set_title("width, experts")
    save(figure, path)


def _mean(seed_points: Mapping[int, Point], name: str) -> float:
    return statistics.mean(getattr(point, name) for point in seed_points.values())


def _row(budget: Budget, model: Model) -> list[str]:
    width, seed_points, rival = model[0], budget.models[model], budget.models[budget.rival]
    recalls = [100 * point.recall for point in seed_points.values()]
    spread = f" ± {statistics.stdev(recalls):.1f}" if len(recalls) > 1 else ""
    both = sorted(seed_points.keys() & rival.keys())
    gains = [100 * (seed_points[seed].recall - rival[seed].recall) for seed in both]
    gain = with_interval(gains) if len(gains) > 1 else f"{gains[0]:+.1f}" if gains else ""
    row = [f"{budget.exposures:,}", _title(model)]
    row += [f"{next(iter(seed_points.values())).rate * width / RATE:g}", str(len(seed_points))]
    row += [f"{statistics.mean(recalls):.1f}{spread}", "the best dense" if model == budget.rival else gain]
    for name in ("multiply_adds", "seconds"):
        row.append(f"{_mean(seed_points, name):,.0f} ({_mean(seed_points, name) / _mean(rival, name):.2f})")
    return row


if __name__ == "__main__":
    write_frontier.main()
