"""Balanced K-means beside what there is: scikit-learn's K-means (no limits) and k-means-constrained (if installed).

python -m benchmarks.balanced_kmeans

Points around centers of very different sizes, so that limits matter. The cost is the mean squared distance to the mean
of the point's cluster.
"""

import platform
import time
import warnings
from collections.abc import Callable

import numpy as np
from sklearn.cluster import KMeans
from threadpoolctl import threadpool_limits

from records.markdown import markdown_table
from training.balanced_kmeans import balanced_kmeans

SIZES = ((2_000, 16), (10_000, 64), (50_000, 256))
# Rows times centers above which minimum-cost flow takes more than some minutes
LARGEST_FLOW = 10_000 * 64
DIM = 64
ITERATIONS = 20


def points(num_points: int, num_clusters: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    means = rng.normal(size=(num_clusters, DIM))
    shares = rng.dirichlet(np.full(num_clusters, 0.5))
    rows = means[rng.choice(num_clusters, num_points, p=shares)] + rng.normal(size=(num_points, DIM))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def methods(num_points: int, num_clusters: int) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    found = {
        "ours": lambda rows: balanced_kmeans(rows, num_clusters, 0, ITERATIONS)[1],
        "scikit-learn": lambda rows: KMeans(num_clusters, n_init=1, max_iter=ITERATIONS, random_state=0).fit_predict(
            rows
        ),
    }
    try:
        from k_means_constrained import KMeansConstrained
    except ImportError:
        return found
    if num_points * num_clusters <= LARGEST_FLOW:
        limit = -(-num_points // num_clusters)
        options = {"size_max": limit, "n_init": 1, "max_iter": ITERATIONS, "random_state": 0}
        found["k-means-constrained"] = lambda rows: KMeansConstrained(num_clusters, **options).fit_predict(rows)
    return found


def main() -> None:
    lines = []
    for num_points, num_clusters in SIZES:
        rows, ours = points(num_points, num_clusters), None
        for name, method in methods(num_points, num_clusters).items():
            started = time.perf_counter()
            with threadpool_limits(1), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                labels = method(rows)
            seconds = time.perf_counter() - started
            ours = ours or seconds
            sizes = np.bincount(labels, minlength=num_clusters) / (num_points / num_clusters)
            means = [rows[labels == k].mean(axis=0) if (labels == k).any() else rows[0] for k in range(num_clusters)]
            cost = ((rows - np.stack(means)[labels]) ** 2).sum(axis=1).mean()
            share = f"{sizes.min():.2f} to {sizes.max():.2f}"
            lines.append([f"{num_points:,}", str(num_clusters), name, f"{seconds / ours:.1f}", share, f"{cost:.4f}"])
    print("# Balanced K-means\n")
    print(markdown_table(["rows", "clusters", "", "time", "sizes / mean size", "cost"], lines))
    print(f"\nTime relative to ours. {platform.machine()}, 1 thread, at most {ITERATIONS} iterations.")


if __name__ == "__main__":
    main()
