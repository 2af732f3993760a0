"""Assigning millions of captions to cluster centers: rate against faiss and scikit-learn, memory against rows.

    python -m benchmarks.assign [--rows 2000000 --size 768 --centers 1024]

The rows are written to disk in the parts that an embed_captions stage makes, and assigned from there as the assign
stage does it, with one process each for half of the rows and for all of them: memory must not grow. faiss (if
installed) and scikit-learn assign the first parts, in memory.
"""

import argparse
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from sklearn.metrics import pairwise_distances_argmin

from evaluation.feature_store import FeatureStore
from records.markdown import markdown_table
from training.balanced_kmeans import nearest_centers

PART_SIZE = 32_768
PARTS_IN_MEMORY = 4


def random_rows(start: int, stop: int, size: int) -> np.ndarray:
    rows = np.random.default_rng(start).standard_normal((stop - start, size), np.float32)
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float16)


def assign(folder: Path, num_rows: int, size: int, num_centers: int) -> None:
    """What the assign stage does; prints seconds and the largest memory."""
    centers = torch.as_tensor(random_rows(10**9, 10**9 + num_centers, size).astype(np.float32))
    accelerator = Accelerator(cpu=True)

    rows = FeatureStore.open(folder, "this benchmark")["embeddings"]

    def compute(shards: list[range]) -> Iterator[dict[str, np.ndarray]]:
        return ({"labels": nearest_centers(rows[shard.start : shard.stop], centers)} for shard in shards)

    store = FeatureStore(folder / f"labels_{num_rows}", num_rows, PART_SIZE)
    started = time.perf_counter()
    store.write(accelerator, "labels", compute)
    seconds = time.perf_counter() - started
    # In kilobytes on Linux
    print(json.dumps({"seconds": seconds, "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))


def _write_rows(folder: Path, num_rows: int, size: int) -> None:
    store = FeatureStore(folder, num_rows, PART_SIZE)
    store.write(None, "rows", lambda shards: ({"embeddings": random_rows(r.start, r.stop, size)} for r in shards))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.assign", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--size", type=int, default=768)
    parser.add_argument("--centers", type=int, default=1024)
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        assign(args.folder, args.only, args.size, args.centers)
        return
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        _write_rows(folder, args.rows, args.size)
        parts = -(-args.rows // PART_SIZE)
        lines, rates = [], {}
        for num_rows in (parts // 2 * PART_SIZE, args.rows):
            command = [sys.executable, "-m", "benchmarks.assign", "--only", str(num_rows), "--folder", str(folder)]
            command += ["--size", str(args.size), "--centers", str(args.centers)]
            (output,) = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
            found = json.loads(output)
            rates["assign stage"] = num_rows / found["seconds"]
            lines.append(["assign stage, from disk", num_rows, rates["assign stage"], found["memory"] / 2**20])
        rows = FeatureStore.open(folder, "this benchmark")["embeddings"]
        rows = rows[: PARTS_IN_MEMORY * PART_SIZE].astype(np.float32)
        centers = random_rows(10**9, 10**9 + args.centers, args.size).astype(np.float32)
        expected = nearest_centers(rows, torch.as_tensor(centers))
        for name, search in _peers(centers).items():
            started = time.perf_counter()
            found = search(rows)
            rate = len(rows) / (time.perf_counter() - started)
            # Random rows have centers that are as near as rounding can tell
            assert (found == expected).mean() > 0.999
            lines.append([f"{name}, in memory", len(rows), rate, None])
    table = [
        [
            name,
            f"{num_rows:,}",
            f"{rate:,.0f}",
            f"{rate / rates['assign stage']:.2f}",
            "" if memory is None else f"{memory:,.0f} MiB",
        ]
        for name, num_rows, rate, memory in lines
    ]
    print(f"# Assigning {args.size}-d rows to {args.centers:,} centers\n")
    print(markdown_table(["", "rows", "rows/s", "relative", "peak memory"], table))
    print(f"\n{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}.")


def _peers(centers: np.ndarray) -> dict:
    peers = {"scikit-learn": lambda rows: pairwise_distances_argmin(rows, centers)}
    try:
        import faiss
    except ImportError:
        return peers
    index = faiss.IndexFlatL2(centers.shape[1])
    index.add(centers)
    return {**peers, f"faiss {faiss.__version__}": lambda rows: index.search(rows, 1)[1][:, 0]}


if __name__ == "__main__":
    main()
