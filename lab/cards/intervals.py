"""Intervals over seeds."""

from collections.abc import Sequence

import numpy as np

from clip_moe.engine.intervals import LEVEL


def paired_interval(better: Sequence[float], worse: Sequence[float], comparisons: int = 1) -> tuple[float, float]:
    """An interval for the mean difference of two models' scores, which belong together seed by seed (Student's t).

    It covers what a seed changes: first weights, the pictures that a world draws, the order of batches. It does not
    cover which samples were chosen as the test, which all seeds have in common.

    Args:
        better, worse: the scores of each seed, at least two.
        comparisons: how many intervals have to be right together (Bonferroni): each is that much wider.

    Returns:
        The lower and the upper end.
    """
    from scipy import stats

    differences = np.subtract(better, worse, dtype=float)
    error = differences.std(ddof=1) / np.sqrt(len(differences))
    reach = stats.t.ppf(1 - (1 - LEVEL) / 2 / comparisons, df=len(differences) - 1) * error
    mean = differences.mean()
    return float(mean - reach), float(mean + reach)


def with_interval(differences: Sequence[float]) -> str:
    """The mean of differences that belong to a seed each, and half its `paired_interval`, to a decimal place."""
    low, high = paired_interval(differences, np.zeros(len(differences)))
    return f"{np.mean(differences):+.1f} ± {(high - low) / 2:.1f}"
