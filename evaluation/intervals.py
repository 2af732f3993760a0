"""How sure a difference between two models is."""

from collections.abc import Sequence

import numpy as np
from scipy import stats

LEVEL = 0.95


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
    differences = np.subtract(better, worse, dtype=float)
    error = differences.std(ddof=1) / np.sqrt(len(differences))
    reach = stats.t.ppf(1 - (1 - LEVEL) / 2 / comparisons, df=len(differences) - 1) * error
    mean = differences.mean()
    return float(mean - reach), float(mean + reach)


def sampling_error(shares: Sequence[float], number: int) -> float:
    """Half the interval of one model's share of test samples, or of the difference between those of two, from one run.

    It covers which samples were chosen as the test, and nothing that a seed changes. Two models see the same samples
    and mostly fail at the same ones, which is not known here: taken as if each had samples of its own, the interval is
    wider than it need be.

    Args:
        shares: one or two, from 0 to 1, each a mean over the samples.
        number: of samples.
    """
    variance = sum(share * (1 - share) for share in shares) / number
    return float(stats.norm.ppf((1 + LEVEL) / 2) * np.sqrt(variance))
