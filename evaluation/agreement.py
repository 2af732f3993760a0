"""How much experts agree in what they make of the same images and texts."""

from collections.abc import Mapping

import numpy as np


def linear_cka(first: np.ndarray, second: np.ndarray) -> float | None:
    """Linear centered kernel alignment (Kornblith et al., 2019, https://arxiv.org/abs/1905.00414, section 3): 1 for
    embeddings that are equal up to rotation and scale, 0 for such as have nothing to do with each other.

    Args:
        first, second: (rows, D) and (rows, D'), two embeddings of the same rows.

    Returns:
        None where one of the two is the same for all rows.
    """
    first, second = (np.asarray(x, np.float64) - np.mean(x, axis=0, dtype=np.float64) for x in (first, second))
    scale = np.linalg.norm(first.T @ first) * np.linalg.norm(second.T @ second)
    return float(np.linalg.norm(first.T @ second) ** 2 / scale) if scale > 0 else None


def agreement(embeds: Mapping[str, np.ndarray]) -> dict[str, dict[str, float | None]]:
    """name -> name -> `linear_cka` of the embeddings (rows, D) of every two."""
    return {one: {other: linear_cka(embeds[one], embeds[other]) for other in embeds} for one in embeds}
