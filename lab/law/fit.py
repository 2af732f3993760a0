"""The law of lab/law/README.md: fitted to points, and predictions of cases that were not run yet.

python -m lab.law.fit model_cards/law/points.json model_cards/law/cases.yaml model_cards/law/predictions.json
"""

import dataclasses
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats
from scipy.optimize import least_squares, minimize

from clip_moe.engine.command_line import command
from clip_moe.engine.files import read_text, refuse_to_overwrite
from clip_moe.engine.intervals import LEVEL as INTERVAL_LEVEL
from clip_moe.engine.markdown import markdown_table
from clip_moe.engine.yaml_files import read_yaml
from lab.law.cases import RATE, Case, batch_size, costs, steps
from lab.law.law import LEVEL, Errors, Law, TrainedModel, interval, known_share, probability
from lab.law.points import Point

# Where the search for the numbers of the law begins, in their order
START = (2.0, 0.4, 240.0, 1.1, 0.5, 0.3, 3.0, 1.5, 1.1)
# How much a gain weighs beside a share, and where the search for the errors begins
GAIN_WEIGHT, FIRST_ERRORS = 2.0, (0.3, 0.1, 0.1, 0.4)
# R@1 that some model of a world must have for the law to be fitted to it
LEARNED = 0.02
# Share of all bits below which a run never left chance: its loss stayed at the logarithm of the batch
AT_CHANCE = 0.01
# Shares differ by less than a seed changes where the training multiply-adds differ by no more
SAME_BUDGET = 0.02
NO_ERRORS = Errors(0.0, 0.0, 0.0, 0.0)


def at_rule_rate(points: Iterable[Point]) -> list[Point]:
    """The points at the rule's rate."""
    return [point for point in points if math.isclose(point.rate * point.width, RATE, rel_tol=0.01)]


def known(point: Point) -> float:
    """The share of the bits to remember that a model knows."""
    return known_share(point.information, point.facts, point.world)


def model_of(point: Point) -> TrainedModel:
    dense = costs(point.world, point.width, 0, 2)[1]
    return TrainedModel(point.width, dense, point.exposures, point.parameters - dense)


def pairs(points: Sequence[Point]) -> list[tuple[int, int]]:
    """Positions of each sparse point and of each dense one with its facts, seed and budget, as wide or wider."""
    positions = itertools.product(range(len(points)), repeat=2)
    return [(sparse, dense) for sparse, dense in positions if _are_rivals(points[sparse], points[dense])]


def _are_rivals(sparse: Point, dense: Point) -> bool:
    same = (sparse.world, sparse.facts, sparse.seed) == (dense.world, dense.facts, dense.seed)
    wider = bool(sparse.experts) and not dense.experts and dense.width >= sparse.width
    return same and wider and abs(sparse.training / dense.training - 1) < SAME_BUDGET


def fit(points: Sequence[Point], errors: Errors = NO_ERRORS) -> Law:
    """The law whose numbers come closest to the shares of points and the gains of pairs, in worlds where some
    model learned anything."""
    best = {world: max(p.recall for p in points if p.world == world) for world in {p.world for p in points}}
    points = [point for point in points if best[point.world] > LEARNED]
    worlds = sorted({point.world for point in points} - {"names"})
    shares, point_pairs = np.array([known(point) for point in points]), pairs(points)

    def law_of(logs: np.ndarray) -> Law:
        numbers = [float(number) for number in np.exp(logs)]
        difficulties = dict(zip(worlds, numbers[len(START) :], strict=True))
        return Law(*numbers[: len(START)], difficulties, errors)

    def residuals(logs: np.ndarray) -> np.ndarray:
        law = law_of(logs)
        error = np.array([share(law, point) for point in points]) - shares
        return np.concatenate([error, [GAIN_WEIGHT * (error[sparse] - error[dense]) for sparse, dense in point_pairs]])

    start = np.log([*START, *[2.0] * len(worlds)])
    return law_of(least_squares(residuals, start, loss="soft_l1", f_scale=0.05).x)


def share(law: Law, point: Point) -> float:
    """The share that the law predicts for a point."""
    return law.share(law.facts(point.facts, point.world), model_of(point))


def seed_reach(points: Sequence[Point]) -> float:
    """Half of the 95 % interval of a pair's gain in one seed, by `seed_error`."""
    error, freedom = seed_error(points)
    return float(stats.t.ppf((1 + INTERVAL_LEVEL) / 2, freedom)) * error


LeftOut = list[tuple[Law, Point, Point]]


def left_out(points: Sequence[Point]) -> LeftOut:
    """Each pair, with a law fitted to all points except those of its world, number of facts and width."""
    members = defaultdict(list)
    for number, point in enumerate(points):
        members[point.world, point.facts, point.width].append(number)
    laws = {
        group: fit([point for number, point in enumerate(points) if number not in inside])
        for group, inside in members.items()
    }
    rivals = ((points[sparse], points[dense]) for sparse, dense in pairs(points))
    return [(laws[sparse.world, sparse.facts, sparse.width], sparse, dense) for sparse, dense in rivals]


def fit_errors(pairs: LeftOut) -> Errors:
    """The errors with which the gains of the pairs are most likely, each as a draw of a normal distribution."""

    def surprise(logs: np.ndarray) -> float:
        errors, total = Errors(*np.exp(logs)), 0.0
        for law, sparse, dense in pairs:
            drawn = dataclasses.replace(law, errors=errors).gains(
                law.facts(sparse.facts, sparse.world), model_of(sparse), model_of(dense)
            )
            deviation = drawn.std()
            total += ((known(sparse) - known(dense) - drawn.mean()) / deviation) ** 2 / 2 + math.log(deviation)
        return total

    found = minimize(surprise, np.log(FIRST_ERRORS), method="Nelder-Mead", options={"xatol": 0.02, "fatol": 0.1})
    return Errors(*(float(number) for number in np.exp(found.x)))


def seed_error(points: Sequence[Point]) -> tuple[float, int]:
    """Standard deviation of a pair's gain between seeds, pooled over the cases with several, and its degrees of
    freedom."""
    gains = defaultdict(list)
    for sparse, dense in ((points[sparse], points[dense]) for sparse, dense in pairs(points)):
        model = (sparse.width, sparse.experts, sparse.experts_per_token, sparse.parts, sparse.pairs)
        gains[sparse.world, sparse.facts, model, dense.width].append(known(sparse) - known(dense))
    several = [values for values in gains.values() if len(values) > 1]
    freedom = sum(len(values) - 1 for values in several)
    return math.sqrt(sum(np.var(values) * len(values) for values in several) / freedom), freedom


def fitted(points: Sequence[Point]) -> Law:
    return fit(points, fit_errors(left_out(points)))


@dataclass(frozen=True)
class Prediction:
    """A case: a sparse model and its rival, a dense one, with equal multiply-adds in training.

    Args:
        sparse_share, rival_share: the predicted shares of the bits.
        gain: their difference.
        low, high: its interval, with the errors of the law.
        winner, probability: "sparse" or "dense", and how likely that is.
    """

    sparse: Case
    rival: Case
    why: str
    sparse_share: float
    rival_share: float
    gain: float
    low: float
    high: float
    winner: str
    probability: float


def predict(law: Law, case: dict[str, Any]) -> Prediction:
    """The law's prediction for a case of cases.yaml."""
    case = dict(case)
    why, rival_width = case.pop("why"), case.pop("rival_width", None)
    sparse = Case(**{"budget_width": case["width"], **case})
    rival = dataclasses.replace(sparse, width=rival_width or sparse.width, experts=0, parts=1)
    facts = law.facts(sparse.facts, sparse.world)
    models = model_of_case(sparse), model_of_case(rival)
    shares = [float(law.share(facts, model)) for model in models]
    drawn = law.gains(facts, *models)
    ahead = probability(drawn)
    winner, ahead = ("sparse", ahead) if ahead > 0.5 else ("dense", 1 - ahead)
    numbers = (round(number, 4) for number in (*shares, shares[0] - shares[1], *interval(drawn)))
    return Prediction(sparse, rival, why, *numbers, winner, round(ahead, 3))


def model_of_case(case: Case) -> TrainedModel:
    exposures = sum(steps(case)) * batch_size(case) / case.facts
    experts = (case.experts, case.experts_per_token, case.parts)
    parameters, dense = (costs(case.world, case.width, *of)[1] for of in (experts, (0, 2)))
    return TrainedModel(case.width, dense, exposures, parameters - dense)


def is_dead(point: Point) -> bool:
    """Whether a run never left chance. Such a run is no case: it does not show what its model can learn."""
    return point.information < AT_CHANCE


def read_points(*files: Path, dead: bool = False) -> list[Point]:
    """The points of runs that left chance, or else of those that did not.

    Raises:
        ValueError: two points are of one model and seed.
    """
    points = [Point(**point) for file in files for point in json.loads(file.read_text(encoding="utf-8"))]
    models: dict[tuple, Point] = {}
    for point in points:
        model = (point.world, point.facts, point.width, point.experts, point.experts_per_token, point.parts)
        if models.setdefault((*model, point.pairs, point.rate, point.seed), point) is not point:
            raise ValueError(f"{', '.join(map(str, files))}: two points of one model and seed: {point}")
    return [point for point in points if is_dead(point) == dead]


@command
def write_predictions(points: Path, cases: Path, output: Path, /) -> str:
    """Fit the law to points, and write it with its predictions of cases as JSON.

    Args:
        points: file written by `lab.law.points`.
        cases: see `model_cards/law/cases.yaml`.
        output: a new file.
    """
    fitted_to = at_rule_rate(read_points(points))
    law = fitted(fitted_to)
    predictions = [predict(law, case) for case in read_yaml(read_text(cases), str(cases))]
    content = {"law": asdict(law), "level": LEVEL, "cases": [asdict(prediction) for prediction in predictions]}
    refuse_to_overwrite(output)
    output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    rows = []
    for case in predictions:
        sparse, rival = case.sparse, case.rival
        row = [sparse.world, f"{sparse.facts:,}", str(sparse.width), str(sparse.experts), str(rival.width)]
        row += [str(sparse.exposures), case.why, f"{100 * case.sparse_share:.1f}", f"{100 * case.rival_share:.1f}"]
        row.append(f"{100 * case.gain:+.1f} ({100 * case.low:+.1f} to {100 * case.high:+.1f})")
        rows.append([*row, f"{case.winner}, {case.probability:.0%}"])
    head = ["world", "facts", "width", "experts", "rival", "exposures", "why", "sparse", "dense", "gain", "winner"]
    return markdown_table(head, rows)


if __name__ == "__main__":
    write_predictions.main()
