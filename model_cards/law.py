"""The law of docs/law.md: fitted to points, and predictions of cases that were not run yet.

python -m model_cards.law model_cards/law/points.json model_cards/law/cases.yaml model_cards/law/predictions.json
"""

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from evaluation.law import TOLD, Capacity, Law
from model_cards.law_cases import RATE, Case, batch_size, costs, steps
from model_cards.law_points import Point
from records.command_line import command
from records.files import read_text, refuse_to_overwrite
from records.markdown import markdown_table
from records.yaml_files import read_yaml

# Where a search for the numbers of the law begins, and how much a gain weighs beside a share
START, GAIN_WEIGHT = (2.0, 0.5, 240.0, 1.5, 0.4, 1.9), 2.0
# R@1 that some model of a world must have for the law to be fitted to it
LEARNED = 0.02
# Shares differ by less than a seed changes where the training multiply-adds differ by no more
SAME_BUDGET = 0.02


def of_rule(points: Iterable[Point]) -> list[Point]:
    """The points at the rule's rate."""
    return [point for point in points if math.isclose(point.rate * point.width, RATE, rel_tol=0.01)]


def known(point: Point) -> float:
    """The share of the bits to remember that a model knows."""
    told, bits = TOLD.get(point.world, 0.0), math.log2(point.facts)
    return max(0.0, (point.information * bits - told) / (bits - told))


def capacity(world: str, width: int, parameters: int) -> Capacity:
    dense = costs(world, width, 0, 2)[1]
    return Capacity(width, dense, parameters - dense)


def pairs(points: Sequence[Point]) -> list[tuple[int, int]]:
    """Numbers of each sparse point and of the dense one of its width, budget and seed."""
    found = []
    for number, sparse in enumerate(points):
        for other, dense in enumerate(points):
            same = all(getattr(sparse, name) == getattr(dense, name) for name in ("world", "facts", "width", "seed"))
            if (
                sparse.experts
                and not dense.experts
                and same
                and abs(sparse.training / dense.training - 1) < SAME_BUDGET
            ):
                found.append((number, other))
    return found


def fit(points: Sequence[Point], gain_error: float = math.nan) -> Law:
    """The numbers of the law that come closest to the points' shares and to the gains of pairs, of worlds in which a
    model knew anything."""
    best = {world: max(p.recall for p in points if p.world == world) for world in {p.world for p in points}}
    points = [point for point in points if best[point.world] > LEARNED]
    worlds = sorted({point.world for point in points} - {"names"})
    shares, of_pairs = np.array([known(point) for point in points]), pairs(points)

    def law_of(numbers: np.ndarray) -> Law:
        first, difficulties = np.exp(numbers[: len(START)]), np.exp(numbers[len(START) :])
        return Law(*map(float, first), dict(zip(worlds, map(float, difficulties), strict=True)), gain_error)

    def errors(numbers: np.ndarray) -> np.ndarray:
        law = law_of(numbers)
        error = np.array([share(law, point) for point in points]) - shares
        return np.concatenate([error, [GAIN_WEIGHT * (error[sparse] - error[dense]) for sparse, dense in of_pairs]])

    start = np.log([*START, *[2.0] * len(worlds)])
    return law_of(least_squares(errors, start, loss="soft_l1", f_scale=0.05).x)


def share(law: Law, point: Point) -> float:
    """What the law says of a point."""
    facts = law.facts(point.facts, point.world)
    return law.share(facts, capacity(point.world, point.width, point.parameters), point.exposures)


def gains(law: Law, points: Sequence[Point]) -> list[tuple[float, float]]:
    """Of each pair, the gain and what the law says of it."""
    return [
        (known(points[sparse]) - known(points[dense]), share(law, points[sparse]) - share(law, points[dense]))
        for sparse, dense in pairs(points)
    ]


def seed_error(points: Sequence[Point]) -> tuple[float, int]:
    """Standard deviation of a pair's gain between seeds, pooled over the cases with several, and its degrees of
    freedom."""
    of_case = defaultdict(list)
    for sparse, dense in pairs(points):
        one = points[sparse]
        key = (one.world, one.facts, one.width, one.experts, one.experts_per_token, one.training)
        of_case[key].append(known(one) - known(points[dense]))
    several = [values for values in of_case.values() if len(values) > 1]
    freedom = sum(len(values) - 1 for values in several)
    return math.sqrt(sum(np.var(values) * len(values) for values in several) / freedom), freedom


def left_out_errors(points: Sequence[Point]) -> list[float]:
    """Errors of the gains of each world and number of facts, by a law that is fitted to all others."""
    groups = sorted({(point.world, point.facts) for point in points})
    errors = []
    for group in groups:
        inside = [point for point in points if (point.world, point.facts) == group]
        law = fit([point for point in points if (point.world, point.facts) != group])
        errors += [said - gain for gain, said in gains(law, inside)]
    return errors


def fitted(points: Sequence[Point]) -> Law:
    error = math.sqrt(np.mean(np.square(left_out_errors(points))))
    return fit(points, error)


@dataclass(frozen=True)
class Prediction:
    """A case: a sparse model and its rival, a dense one, with equal multiply-adds in training.

    Args:
        sparse_share, rival_share: the predicted shares of the bits.
        gain, reach: their difference, and half of its interval.
        winner, probability: "sparse" or "dense", and how likely that is.
    """

    sparse: Case
    rival: Case
    why: str
    sparse_share: float
    rival_share: float
    gain: float
    reach: float
    winner: str
    probability: float


LEVEL = 0.9


def predict(law: Law, case: dict[str, Any]) -> Prediction:
    """What the law says of a case of cases.yaml."""
    case = dict(case)
    why, rival_width = case.pop("why"), case.pop("rival_width", None)
    sparse = Case(**{"budget_width": case["width"], **case})
    rival = dataclasses.replace(sparse, width=rival_width or sparse.width, experts=0)
    of_sparse, of_rival = (share_of_case(law, one) for one in (sparse, rival))
    gain = of_sparse - of_rival
    probability = law.probability(gain)
    winner, probability = ("sparse", probability) if gain > 0 else ("dense", 1 - probability)
    numbers = (round(number, 4) for number in (of_sparse, of_rival, gain, law.reach(LEVEL)))
    return Prediction(sparse, rival, why, *numbers, winner, round(probability, 3))


def share_of_case(law: Law, case: Case) -> float:
    exposures = sum(steps(case)) * batch_size(case) / case.facts
    parameters = costs(case.world, case.width, case.experts, case.experts_per_token)[1]
    model = capacity(case.world, case.width, parameters)
    return law.share(law.facts(case.facts, case.world), model, exposures)


def read_points(path: Path) -> list[Point]:
    return [Point(**point) for point in json.loads(path.read_text(encoding="utf-8"))]


@command
def write_predictions(points: Path, cases: Path, output: Path) -> str:
    """Fit the law to points, and write it and what it says of cases as JSON.

    Args:
        points: what `model_cards.law_points` wrote.
        cases: see `model_cards/law/cases.yaml`.
        output: a file that is not there yet.
    """
    fitted_to = of_rule(read_points(points))
    law, (of_seed, freedom) = fitted(fitted_to), seed_error(fitted_to)
    made = [predict(law, case) for case in read_yaml(read_text(cases), str(cases))]
    content = {
        "law": asdict(law),
        "level": LEVEL,
        "seed_error": of_seed,
        "freedom": freedom,
        "cases": [asdict(one) for one in made],
    }
    refuse_to_overwrite(output)
    output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    rows = [
        [
            *(one.sparse.world, f"{one.sparse.facts:,}", str(one.sparse.width), str(one.sparse.experts)),
            *(str(one.rival.width), str(one.sparse.exposures), one.why),
            *(f"{100 * number:.1f}" for number in (one.sparse_share, one.rival_share)),
            f"{100 * one.gain:+.1f} ± {100 * one.reach:.1f}",
            f"{one.winner}, {one.probability:.0%}",
        ]
        for one in made
    ]
    head = ["world", "facts", "width", "experts", "rival", "exposures", "why", "sparse", "dense", "gain", "winner"]
    return markdown_table(head, rows)


if __name__ == "__main__":
    write_predictions.main()
