"""Clustering as the stages compute it, beside faiss by itself.

    python -m lab.speed.clustering [--rows 100000 --size 768 --clusters 4 256] --output clustering.md

Every method runs in a process of its own. Memory is what this holds beside the features that are clustered.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from clip_moe.engine.command_line import command
from clip_moe.evaluation.speed import in_turn
from clip_moe.training.clusters import Method, import_faiss, kmeans
from lab.speed.page import Output, cost, machine, mib, page, table

OURS, FAISS = "cluster stage", "faiss alone"
NUM_MEANS, PART = 1000, 32_768


def random_rows(num_rows: int, size: int) -> np.ndarray:
    """Normalized rows around many means, as features of images are, (num_rows, size) float32."""
    rng = np.random.default_rng(0)
    means = rng.standard_normal((NUM_MEANS, size), np.float32)
    rows = np.empty((num_rows, size), np.float32)
    for start in range(0, num_rows, PART):  # a part at a time, lest the memory of this be that of the process
        part = rows[start : start + PART]
        part[:] = means[rng.choice(NUM_MEANS, len(part))]
        part += 1.5 * rng.standard_normal(part.shape, np.float32)
        part /= np.linalg.norm(part, axis=1, keepdims=True)
    return rows


def cluster(name: str, rows: np.ndarray, number: int) -> np.ndarray:
    """The cluster of each row. Faiss alone learns from 256 rows of each cluster, and assigns all of them together."""
    if name == OURS:
        return kmeans(rows, number, 0, method=Method("faiss", n_init=1))
    search = import_faiss().Kmeans(rows.shape[1], number, seed=0)
    search.train(rows)
    return search.index.search(rows, 1)[1][:, 0]


def clustering(name: str, number: int, num_rows: int, size: int) -> Callable:
    rows = random_rows(num_rows, size)
    cluster(name, rows[:1000], 2)  # libraries are loaded
    return lambda: cluster(name, rows, number)


def inertia(rows: np.ndarray, labels: np.ndarray) -> float:
    """Mean squared distance of a row of length 1 to the mean of its cluster: what the means lack of that length."""
    lengths = [np.square(rows[labels == name].mean(axis=0)).sum() for name in range(labels.max() + 1)]
    return 1 - np.average(np.nan_to_num(lengths), weights=np.bincount(labels))


def compare(number: int, num_rows: int, size: int, rounds: int = 1) -> dict[str, list[dict]]:
    """The cost of each method in each round, with its labels."""
    calls = {name: partial(cost, clustering, name, number, num_rows, size) for name in (OURS, FAISS)}
    return in_turn(calls, rounds)


@command
def compare_kmeans(
    *, output: Output = None, rows: int = 100_000, size: int = 768, clusters: Sequence[int] = (4, 256)
) -> str:
    """Random features. Inertia is the mean squared distance of a feature to the mean of its cluster."""
    embeds, lines = random_rows(rows, size), []
    for number in clusters:
        costs = {name: result for name, (result,) in compare(number, rows, size).items()}
        inertias = {name: inertia(embeds, result["result"]) for name, result in costs.items()}
        for name, result in costs.items():
            cells = f"{result['cpu']:.1f}", f"{result['cpu'] / costs[OURS]['cpu']:.3f}", mib(result["memory"])
            cells += f"{inertias[name]:.5f}", f"{inertias[name] / inertias[OURS]:.3f}"
            lines.append([f"{number:,}", name, *cells])
    header = ["clusters", "", "CPU seconds", "relative", "memory", "inertia", "relative"]
    return page(output, f"# K-means of {rows:,} features of size {size}", table(header, lines), f"{machine()}.")


if __name__ == "__main__":
    compare_kmeans.main()
