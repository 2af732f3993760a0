"""Confidence intervals of scores and differences."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from clip_moe.engine.result_schema import parts_of_mean

LEVEL = 0.95
# A difference worth knowing
FINE = 0.05
# Lower and upper half-widths of an interval
Reach = tuple[float, float]


def share_reach(share: float, number: int) -> Reach:
    """Wilson's score interval of a share of test samples, from one run. It covers which samples were chosen as the
    test, and nothing that a seed changes.

    Args:
        share: from 0 to 1, a mean over the samples.
        number: number of samples.
    """
    from scipy import stats

    interval = stats.binomtest(round(share * number), number).proportion_ci(LEVEL, method="wilson")
    return share - interval.low, interval.high - share


def mean_reach(reaches: Sequence[Reach], independent: bool = True) -> Reach:
    """The interval of a mean of scores, from the intervals of these (Zou and Donner's method of variance estimates
    recovery, Statistics in Medicine 27, 2008, pages 1693 to 1702, as Newcombe's is for a difference).

    Args:
        independent: whether no two scores have samples in common. Else the mean of the reaches is the reach, which is
            right if the scores rise and fall together, and conservative otherwise.
    """
    below, above = np.linalg.norm(reaches, axis=0) / len(reaches) if independent else np.mean(reaches, axis=0)
    return float(below), float(above)


def difference_reach(share: float, other: float, number: int) -> Reach:
    """Newcombe's hybrid score interval of the difference between two models' shares of the same test samples, which
    has a width where shares are 0 or 1, too (Statistics in Medicine 17, 1998, pages 2635 to 2650, method 10).

    Two models mostly fail on the same samples. How often is unknown here and assumed to be chance (the method's phi is
    0), so the interval is conservative.

    Args:
        share, other, number: see `share_reach`.
    """
    below, above = share_reach(share, number)
    other_below, other_above = share_reach(other, number)
    return math.hypot(below, other_above), math.hypot(above, other_below)


def shown_differences(number: int) -> str:
    """A sentence: from which difference on a test of so many pictures tells two models apart that are right half of the
    time; where that is above `FINE`, how many pictures it would take."""
    reach = difference_reach(0.5, 0.5, number)[0]
    sentence = f"A test of {number:,} pictures shows differences of {100 * reach:.0f} points and more"
    if reach <= FINE:
        return f"{sentence}."
    needed = next(
        size for size in (50 * 2**n for n in itertools.count()) if difference_reach(0.5, 0.5, size)[0] <= FINE
    )
    return f"{sentence}; {100 * FINE:.0f} take about {needed:,}."


def score_reach(result: dict[str, Any], metric: str) -> Reach | None:
    """Half-widths of a score's interval over test samples; None: see `parts_of_mean`."""
    parts = parts_of_mean(result, metric)
    return parts and mean_reach([share_reach(share, number) for share, number in parts])


def score_difference_reach(result: dict[str, Any], other: dict[str, Any], metric: str) -> Reach | None:
    """Half-widths of the interval of the difference between two models' scores; None: see `parts_of_mean`."""
    parts, others = parts_of_mean(result, metric), parts_of_mean(other, metric)
    if parts is None or others is None:
        return None
    pairs = zip(parts, others, strict=True)
    return mean_reach([difference_reach(share, other_share, size) for (share, size), (other_share, _) in pairs])
