"""Clustering as the stages compute it, beside faiss by itself, scikit-learn and k-means-constrained.

    python -m benchmarks.clustering kmeans [--rows 100000 --size 768 --clusters 4 256] --output clustering.md

Every method runs in a process of its own. Memory is what this holds beside the features that are clustered.
"""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from accelerate import Accelerator
from sklearn.cluster import MiniBatchKMeans
from sklearn.metrics import pairwise_distances_argmin

from benchmarks.page import Output, cost, described, mib, page, table
from evaluation.feature_store import FeatureStore
from evaluation.speed import in_turn
from records.command_line import command_line, run
from training.clusters import Method, balanced_kmeans, import_faiss, kmeans, nearest_centers

OURS, FAISS = "cluster stage", "faiss alone"
PART, IN_MEMORY, ITERATIONS = 32_768, 131_072, 20
line = command_line("python -m benchmarks.clustering", help=__doc__)


def random_rows(num_rows: int, size: int, num_means: int, uneven: bool = False) -> np.ndarray:
    """Normalized rows around many means, as features of images are, (num_rows, size) float32."""
    rng = np.random.default_rng(0)
    means = rng.standard_normal((num_means, size), np.float32)
    shares = rng.dirichlet(np.full(num_means, 0.5)) if uneven else None
    rows = np.empty((num_rows, size), np.float32)
    for start in range(0, num_rows, PART):  # a part at a time, lest the memory of this be that of the process
        part = rows[start : start + PART]
        part[:] = means[rng.choice(num_means, len(part), p=shares)]
        part += (1.0 if uneven else 1.5) * rng.standard_normal(part.shape, np.float32)
        part /= np.linalg.norm(part, axis=1, keepdims=True)
    return rows


def _faiss_alone(rows: np.ndarray, number: int, **settings: int) -> np.ndarray:
    """By default it learns from 256 rows of each cluster, and assigns all of them together."""
    search = import_faiss().Kmeans(rows.shape[1], number, seed=0, **settings)
    search.train(rows)
    return search.index.search(rows, 1)[1][:, 0]


def _constrained(rows: np.ndarray, number: int) -> np.ndarray:
    from k_means_constrained import KMeansConstrained

    limit = -(-len(rows) // number)
    return KMeansConstrained(number, size_max=limit, n_init=1, max_iter=ITERATIONS, random_state=0).fit_predict(rows)


METHODS: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    OURS: lambda rows, number: kmeans(rows, number, 0, method=Method("faiss", n_init=1)),
    FAISS: _faiss_alone,
    "faiss, all rows": lambda rows, number: _faiss_alone(rows, number, max_points_per_centroid=len(rows)),
    "mini batches": lambda rows, number: MiniBatchKMeans(number, n_init=1, batch_size=4096, random_state=0).fit_predict(
        rows
    ),
    "scikit-learn": lambda rows, number: kmeans(rows, number, 0, method=Method(n_init=1)),
    "balanced": lambda rows, number: balanced_kmeans(rows, number, 0, ITERATIONS)[1],
    "k-means-constrained": _constrained,
}
LIMITED = ("balanced", "k-means-constrained")


def clustered(name: str, number: int, num_rows: int, size: int, num_means: int, uneven: bool) -> Callable:
    rows = random_rows(num_rows, size, num_means, uneven)
    METHODS[name](rows[:1000], 2)  # libraries are loaded
    return lambda: METHODS[name](rows, number)


def inertia(rows: np.ndarray, labels: np.ndarray) -> float:
    """Mean squared distance of a row of length 1 to the mean of its cluster: what the means lack of that length."""
    lengths = [np.square(rows[labels == name].mean(axis=0)).sum() for name in range(labels.max() + 1)]
    return 1 - np.average(np.nan_to_num(lengths), weights=np.bincount(labels))


def compare(names: Sequence[str], number: int, *features: int | bool, rounds: int = 1) -> dict[str, list[dict]]:
    """The cost of each method in each round, with its labels."""
    return in_turn({name: partial(cost, clustered, name, number, *features) for name in names}, rounds)


@line.command(name="kmeans")
def compare_kmeans(
    *,
    output: Output = None,
    rows: int = 100_000,
    size: int = 768,
    clusters: Sequence[int] = (4, 256),
    means: int = 1000,
    methods: Sequence[Literal[*METHODS]] = (OURS, FAISS),
) -> str:
    """Features around many means, those of balanced clusters around means of very different shares, so that limits
    matter. Inertia is the mean squared distance of a feature to the mean of its cluster.

    Args:
        means: that the features lie around
    """
    features = rows, size, means, bool({*LIMITED} & {*methods})
    embeds, lines = random_rows(*features), []
    for number in clusters:
        costs = {name: result for name, (result,) in compare(methods, number, *features).items()}
        inertias = {name: inertia(embeds, result["result"]) for name, result in costs.items()}
        first = methods[0]
        for name, result in costs.items():
            sizes = np.bincount(result["result"], minlength=number) / (rows / number)
            cells = f"{result['cpu']:.1f}", f"{result['cpu'] / costs[first]['cpu']:.3f}", mib(result["memory"])
            cells += f"{sizes.min():.2f} to {sizes.max():.2f}", f"{inertias[name]:.5f}"
            lines.append([f"{number:,}", name, *cells, f"{inertias[name] / inertias[first]:.3f}"])
    header = ["clusters", "", "CPU seconds", "relative", "memory", "sizes / mean size", "inertia", "relative"]
    return page(
        output,
        f"# K-means of {rows:,} features of size {size}",
        table(header, lines),
        f"{described()}, one thread for scikit-learn.",
    )


def assigned(name: str, folder: Path, num_rows: int, size: int, number: int) -> Callable[[], object]:
    """Assigns rows that `of_assign` wrote: from disk as the stage does, or the first ones in memory by a peer."""
    centers, accelerator = random_rows(number, size, number), Accelerator(cpu=True)
    rows = FeatureStore.open(folder, "this benchmark")["embeddings"]

    def compute(shards: Iterable[range]) -> Iterator[dict[str, np.ndarray]]:
        for shard in shards:
            yield {"labels": nearest_centers(rows[shard.start : shard.stop], torch.as_tensor(centers))}

    if name == "cluster_fine":
        store = FeatureStore(folder / f"labels_{num_rows}", num_rows, PART)
        return lambda: store.write(accelerator, "labels", compute)
    in_memory = rows[:num_rows].astype(np.float32)
    if name == "scikit-learn":
        return lambda: pairwise_distances_argmin(in_memory, centers)
    index = import_faiss().IndexFlatL2(size)
    index.add(centers)
    return lambda: index.search(in_memory, 1)[1][:, 0]


@line.command(name="assign")
def compare_assignment(
    *, output: Output = None, rows: int = 100_000, size: int = 768, clusters: int = 256, means: int = 1000
) -> str:
    """Captions on disk to their nearest centers, as a `cluster_fine` stage does it, for half of the rows and for all:
    memory must not grow.

    Args:
        means: that the features lie around
    """
    with tempfile.TemporaryDirectory() as folder:
        part = random_rows(PART, size, means).astype(np.float16)  # every part: only how many there are matters
        half = -(-rows // PART) // 2 * PART
        store = FeatureStore(Path(folder), rows, PART)
        store.write(None, "rows", lambda shards: ({"embeddings": part[: len(shard)]} for shard in shards))
        peers = ["scikit-learn", *(["faiss"] if find_spec("faiss") else [])]
        cases = [("cluster_fine", rows), ("cluster_fine", half), *((name, min(IN_MEMORY, half)) for name in peers)]
        costs = [cost(assigned, name, Path(folder), number, size, clusters) for name, number in cases]
    rates = [number / result["seconds"] for (_, number), result in zip(cases, costs, strict=True)]
    lines = [
        [name, f"{number:,}", f"{rate:,.0f}", f"{rate / rates[0]:.2f}", mib(result["before"] + result["memory"])]
        for (name, number), rate, result in zip(cases, rates, costs, strict=True)
    ]
    return page(
        output,
        f"# Assigning {size}-d rows to {clusters:,} centers",
        table(["", "rows", "rows/s", "relative", "peak memory"], lines),
        f"From disk by the stage, in memory by the others. {described()}.",
    )


if __name__ == "__main__":
    run(line)
