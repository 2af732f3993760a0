"""Whether the experts of a sparse model do anything, in three measures, and how much they agree."""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from clip_moe.engine.intervals import score_difference_reach
from clip_moe.engine.result_schema import Collapse, ExpertSummary, Spread
from clip_moe.evaluation.report import primary_columns
from clip_moe.evaluation.task import Task

# Columns of the table; an expert's number follows
ROUTED, EXPERT, MEAN = "routed", "expert", "mean of experts"
# What each tower embeds
EMBEDDED = {"text": "texts", "vision": "images"}


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


def summarize(
    tasks: Mapping[str, Task],
    routed: Mapping[str, dict[str, Any]],
    mean: Mapping[str, dict[str, Any]],
    entropy: Mapping[str, Mapping[int, float]],
    agreement: Mapping[str, Mapping[str, Mapping[str, float | None]]],
    num_experts: int,
    experts_per_ffn: int = 1,
) -> ExpertSummary:
    """The collapse test, the entropy of the routers and how alike the experts are.

    Args:
        tasks: by their names.
        routed, mean: task -> what `evaluation.measures.measure` gives of the model, and of the one whose layers have
            the mean of their experts.
        entropy: tower -> sparse layer -> bits.
        agreement: "images" or "texts" -> "expert N" -> "expert N" -> linear CKA; other columns do not count.
        num_experts: those that a router has to choose from.
        experts_per_ffn: how many of them count as one, see `conversion.upcycle.experts_of_ffn`.
    """
    rows = {name: {"title": task.title, "primary": task.primary} for name, task in tasks.items()}
    collapse = []
    for (task, metric), title in primary_columns(rows).items():
        scores = [of[task]["metrics"][metric] for of in (routed, mean)]
        reach = score_difference_reach(routed[task], mean[task], metric)
        error = None if reach is None else max(reach)
        collapse.append(Collapse(title=title, routed=scores[0], mean=scores[1], error=error))
    experts = [f"{EXPERT} {number}" for number in range(num_experts // experts_per_ffn)]
    # A dense tower makes the same for all experts
    pairs = [
        agreement[EMBEDDED[tower]][first][other]
        for tower in entropy
        for first, other in itertools.combinations(experts, 2)
    ]
    values = [value for value in pairs if value is not None]
    return ExpertSummary(
        collapse=collapse,
        entropy=Spread.of(value for layers in entropy.values() for value in layers.values()),
        most_entropy=math.log2(num_experts),
        agreement=Spread.of(values) if values else None,
    )
