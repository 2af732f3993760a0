"""K-means as the cluster stage computes it, beside faiss by itself and scikit-learn: time, memory and inertia.

    python -m benchmarks.clustering [--rows 100000 --size 768 --clusters 4 256] --output clustering.md

Normalized features around many means, as features of images are, lie in a file and are mapped. Every method runs in a
process of its own. Memory is what the process holds beside the libraries and pages of the file. Inertia is the mean
squared distance of a feature to the mean of its cluster. Methods that learn from all rows run up to --all-rows.
"""

import argparse
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from records.files import write_text
from records.markdown import markdown_table
from training.feature_clusters import accumulate
from training.kmeans import Method, import_faiss, kmeans

OURS, FAISS = "cluster stage", "faiss alone"
PART = 16_384


def random_rows(start: int, stop: int, size: int, num_means: int) -> np.ndarray:
    means = np.random.default_rng(num_means).standard_normal((num_means, size), np.float32)
    rng = np.random.default_rng(start)
    rows = means[rng.integers(num_means, size=stop - start)]
    rows += 1.5 * rng.standard_normal(rows.shape, np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def write_rows(path: Path, num_rows: int, size: int, num_means: int) -> None:
    rows = np.lib.format.open_memmap(path, "w+", np.float32, (num_rows, size))
    for start in range(0, num_rows, PART):
        stop = min(start + PART, num_rows)
        rows[start:stop] = random_rows(start, stop, size, num_means)


def _by_faiss_alone(rows: np.ndarray, number: int) -> np.ndarray:
    """With its defaults: it learns from 256 rows of each cluster, and assigns all of them together."""
    return _assigned(rows, import_faiss().Kmeans(rows.shape[1], number, seed=0))


def _by_faiss_of_all(rows: np.ndarray, number: int) -> np.ndarray:
    return _assigned(rows, import_faiss().Kmeans(rows.shape[1], number, seed=0, max_points_per_centroid=len(rows)))


def _assigned(rows: np.ndarray, search) -> np.ndarray:
    search.train(rows)
    return search.index.search(rows, 1)[1][:, 0]


def _by_mini_batches(rows: np.ndarray, number: int) -> np.ndarray:
    from sklearn.cluster import MiniBatchKMeans

    return MiniBatchKMeans(number, n_init=1, batch_size=4096, random_state=0).fit_predict(rows)


METHODS: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    OURS: lambda rows, number: kmeans(rows, number, 0, method=Method("faiss", n_init=1)),
    FAISS: _by_faiss_alone,
    "faiss alone, of all rows": _by_faiss_of_all,
    "scikit-learn, MiniBatchKMeans": _by_mini_batches,
    "scikit-learn, one start": lambda rows, number: kmeans(rows, number, 0, method=Method(n_init=1)),
}


class PeakMemory:
    """The most memory, in bytes, that this process held beside mapped files, more than at the start (Linux)."""

    def __enter__(self) -> "PeakMemory":
        self.start = self.most = self._held()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._ended.set()
        self._thread.join()
        self.bytes = self.most - self.start

    def _watch(self) -> None:
        while not self._ended.wait(0.02):
            self.most = max(self.most, self._held())

    @staticmethod
    def _held() -> int:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("RssAnon:")[1].split()[0])


def measure(path: Path, name: str, number: int) -> dict[str, float]:
    """Seconds, those of all cores together, bytes of memory and inertia of one method."""
    rows = np.load(path, mmap_mode="r")
    METHODS[name](rows[:1000], 2)  # libraries are loaded
    with PeakMemory() as memory:
        started, cpu_started = time.perf_counter(), time.process_time()
        labels = METHODS[name](rows, number)
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu_started
    # Features of length 1: what their clusters' means lack of it
    found = accumulate(labels.astype(int), [rows])
    inertia = 1 - np.average(np.square(found.centers).sum(axis=1), weights=np.bincount(found.labels))
    return {"seconds": seconds, "cpu": cpu, "memory": memory.bytes, "inertia": inertia}


def compare(
    num_rows: int, size: int, clusters: Sequence[int], num_means: int, names: Sequence[str]
) -> dict[int, dict[str, dict[str, float]]]:
    """Number of clusters -> method -> what `measure` found, each in a process of its own."""
    found: dict[int, dict[str, dict[str, float]]] = {number: {} for number in clusters}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "features.npy"
        write_rows(path, num_rows, size, num_means)
        for number in clusters:
            for name in names:
                # A fork of a process that has used OpenMP would wait for threads that are not there
                with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                    found[number][name] = process.submit(measure, path, name, number).result()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.clustering", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--size", type=int, default=768)
    parser.add_argument("--clusters", type=int, nargs="+", default=[4, 256])
    parser.add_argument("--means", type=int, default=1000, help="that the features lie around")
    parser.add_argument("--all-rows", type=int, default=100_000)
    parser.add_argument("--output", type=Path, help="markdown file to write besides printing")
    args = parser.parse_args()
    names = list(METHODS) if args.rows <= args.all_rows else [OURS, FAISS]
    lines = []
    for number, results in compare(args.rows, args.size, args.clusters, args.means, names).items():
        for name, found in results.items():
            relative = {key: f"{found[key] / results[OURS][key]:.3f}" for key in ("cpu", "inertia")}
            cells = f"{found['seconds']:.1f}", f"{found['cpu']:.1f}", relative["cpu"]
            cells += (f"{found['memory'] / 2**20:,.0f} MiB",)
            lines.append([f"{number:,}", name, *cells, f"{found['inertia']:.5f}", relative["inertia"]])
    header = ["clusters", "", "seconds", "CPU seconds", "relative", "memory", "inertia", "relative"]
    threads = os.environ.get("OMP_NUM_THREADS", os.cpu_count())
    page = "\n".join(
        [
            f"# K-means of {args.rows:,} features of size {args.size}",
            "",
            markdown_table(header, lines),
            "",
            f"{platform.machine()}, {threads} threads (one for scikit-learn's KMeans), faiss "
            f"{import_faiss().__version__}.",
        ]
    )
    print(page)
    if args.output is not None:
        write_text(args.output, page + "\n")


if __name__ == "__main__":
    main()
