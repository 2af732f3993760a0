"""Predictions of the law beside what came out.

    python -m lab.law.outcomes model_cards/law/predictions.json model_cards/law/points.json \
      model_cards/law/outcome_points.json --output_dir model_cards/law

`points.json` are those that the law of the predictions was fitted to, `outcome_points.json` those that were run since.
Runs that never left chance (`lab.law.fit.is_dead`) are no case.

A case is conclusive if the mean gain of its seeds is further from 0 than its 95 % interval reaches, by the deviation
between seeds of all cases with several. Then its winner is known, and the prediction was right or wrong. Whether it
is conclusive or not, the mean gain is inside the predicted interval or outside.
"""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from clip_moe.engine.command_line import Folder, command
from clip_moe.engine.markdown import markdown_table
from clip_moe.evaluation.page import write_page
from lab.law.cases import RATE, Case, batch_size, steps
from lab.law.fit import at_rule_rate, known, model_of_case, pairs, read_points, seed_error, seed_reach
from lab.law.law import FITTED, TOLD, Facts
from lab.law.points import Point

# A rule of one number: experts pay above so many bits for each parameter of the rival's layers
BITS_A_PARAMETER = 0.55


@dataclass(frozen=True)
class Outcome:
    """Measurements of one case.

    Args:
        seeds: how many.
        gain: mean over the seeds, of the sparse model's share of bits over its rival's, and half of its interval.
        winner: "sparse" or "dense"; None: inconclusive.
        is_right: whether the predicted winner is that; None: inconclusive.
        is_inside: whether the gain lies in the predicted interval.
    """

    seeds: int
    sparse_share: float
    rival_share: float
    sparse_recall: float
    rival_recall: float
    sparse_seconds: float
    rival_seconds: float
    gain: float
    reach: float
    winner: str | None
    is_right: bool | None
    is_inside: bool


def points_of(case: Case, points: Sequence[Point]) -> dict[int, Point]:
    """Seed -> the point of a case."""
    pairs = sum(steps(case)) * batch_size(case)
    token = case.experts_per_token if case.experts else 0
    wanted = (case.world, case.facts, case.width, case.experts, token, case.parts, pairs)
    fields = attrgetter("world", "facts", "width", "experts", "experts_per_token", "parts", "pairs")
    return {
        point.seed: point
        for point in points
        if math.isclose(point.rate * point.width, RATE * case.rate, rel_tol=0.01) and fields(point) == wanted
    }


def outcome(case: dict[str, Any], points: Sequence[Point], seed_reach: float) -> Outcome | None:
    """Measurements of a case of predictions.json; None: not run, or in each seed a model never left chance.

    Args:
        seed_reach: half of the interval of a gain in one seed.
    """
    sparse, rival = (points_of(Case(**case[name]), points) for name in ("sparse", "rival"))
    seeds = sorted(sparse.keys() & rival.keys())
    if not seeds:
        return None

    def means(value: Callable[[Point], float]) -> Iterator[float]:
        """Means of the sparse model and of its rival."""
        return (round(statistics.mean(value(run[seed]) for seed in seeds), 4) for run in (sparse, rival))

    gain = statistics.mean(known(sparse[seed]) - known(rival[seed]) for seed in seeds)
    reach = seed_reach / math.sqrt(len(seeds))
    winner = None if abs(gain) <= reach else "sparse" if gain > 0 else "dense"
    return Outcome(
        len(seeds),
        *means(known),
        *means(attrgetter("recall")),
        *means(attrgetter("seconds")),
        round(gain, 4),
        round(reach, 4),
        winner,
        None if winner is None else winner == case["winner"],
        case["low"] <= gain <= case["high"],
    )


def cases_run(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Each model with 8 experts beside the dense one of its width, for `lab.law.estimate`: means over seeds."""
    gains = defaultdict(list)
    for sparse, dense in ((points[sparse], points[dense]) for sparse, dense in pairs(points)):
        if dense.width > sparse.width or (sparse.experts, sparse.experts_per_token, sparse.parts) != (8, 2, 1):
            continue
        case = {name: getattr(sparse, name) for name in ("world", "facts", "width", "experts", "experts_per_token")}
        case |= {"parameters": dense.parameters, "expert_parameters": sparse.parameters - dense.parameters}
        case |= {"exposures": round(dense.exposures), "sparse_exposures": round(sparse.exposures)}
        gains[tuple(case.items())].append(known(sparse) - known(dense))
    return [dict(case) | {"gain": round(statistics.mean(gain), 4), "seeds": len(gain)} for case, gain in gains.items()]


def bits_a_parameter(case: dict[str, Any]) -> float:
    """Bits to remember, for each parameter of the layers of a prediction's rival."""
    rival = Case(**case["rival"])
    facts = Facts(rival.facts, TOLD.get(rival.world, 0.0), difficulty=1.0, slope=1.0)
    return facts.bits / model_of_case(rival).dense


@command
def write_outcomes(predictions: Path, points: Sequence[Path], /, output_dir: Folder) -> str:
    """Write `outcomes.md` and `outcomes.json`, and `lab/law/law.json`: the law of the predictions, and all cases.

    Args:
        predictions: file written by `lab.law.fit` before the runs.
        points: files written by `lab.law.points`.
    """
    predicted = json.loads(predictions.read_text(encoding="utf-8"))
    run = at_rule_rate(read_points(*points))
    reach, (deviation, freedom) = seed_reach(run), seed_error(run)
    outcomes = [outcome(case, run, reach) for case in predicted["cases"]]
    cases = list(zip(predicted["cases"], outcomes, strict=True))
    rows = [_row(case, out) for case, out in cases]
    head = ["world", "facts", "sparse", "rival", "exposures", "why", "predicted gain", "gain", "R@1 sparse, rival"]
    table = markdown_table([*head, "seconds", "predicted winner", "winner"], rows)
    measured = [out for out in outcomes if out is not None]
    conclusive = [out for out in measured if out.winner is not None]
    right, inside = sum(out.is_right for out in conclusive), sum(out.is_inside for out in measured)
    sparse = sum(out.winner == "sparse" for out in conclusive)
    by_rule = sum(
        out.winner == ("sparse" if bits_a_parameter(case) > BITS_A_PARAMETER else "dense")
        for case, out in cases
        if out and out.winner
    )
    dead = [
        f"{point.facts:,} {point.world}, {point.width} wide, {point.experts or 'no'} experts, seed {point.seed}"
        for point in read_points(*points, dead=True)
    ]
    summary = (
        f"{len(measured)} of {len(outcomes)} cases count. {len(conclusive)} are conclusive: the predicted winner "
        f"is right in {right}, and sparse is ahead in {sparse}. {inside} of {len(measured)} gains lie in the predicted "
        f"{predicted['level']:.0%} interval. The rule of one number, sparse above {BITS_A_PARAMETER} bits for each "
        f"parameter of the rival's layers, is right in {by_rule}."
    )
    if dead:
        summary += f" Runs that never left chance, left out: {'; '.join(dead)}."
    text = (
        "Shares are of the bits to remember, in points. A model is named by its width and its experts. ± is the 95 % "
        f"interval that seeds leave, by their deviation of {100 * deviation:.1f} points, pooled over all cases with "
        f"several ({freedom} degrees of freedom). Seconds: of training, sparse and rival, on one core of an x86-64, "
        "beside another run."
    )
    page = "\n\n".join([summary, table, text])
    write_page(output_dir / "outcomes", page, data=[out and asdict(out) for out in outcomes])
    content = {"law": predicted["law"], "cases": cases_run(run)}
    FITTED.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return f"{summary}\n\n{table}"


def _row(case: dict[str, Any], out: Outcome | None) -> list[str]:
    sparse, rival = case["sparse"], case["rival"]
    budget = f" of {sparse['budget_width']} wide" if sparse["budget_width"] != sparse["width"] else ""
    row = [
        sparse["world"],
        f"{sparse['facts']:,}",
        f"{sparse['width']}, {sparse['experts']} experts",
        str(rival["width"]),
    ]
    predicted_gain = " to ".join(f"{100 * case[end]:+.1f}" for end in ("low", "high"))
    row += [f"{sparse['exposures']:,}{budget}", case["why"], predicted_gain]
    predicted = f"{case['winner']}, {case['probability']:.0%}"
    if out is None:
        return [*row, "", "", "", predicted, "no case"]
    winner = "inconclusive" if out.winner is None else f"{out.winner}{'' if out.is_right else ': a miss'}"
    return [
        *row,
        f"{100 * out.gain:+.1f} ± {100 * out.reach:.1f}",
        f"{100 * out.sparse_recall:.1f}, {100 * out.rival_recall:.1f}",
        f"{out.sparse_seconds:.0f}, {out.rival_seconds:.0f}",
        predicted,
        winner,
    ]


if __name__ == "__main__":
    write_outcomes.main()
