"""
What the project wants of its speed and memory, and what it has, in one table.

    OMP_NUM_THREADS=1 python -m benchmarks.goals --output benchmarks/results/goals_cpu.md

Every figure is a ratio against a peer or an ideal. Missed goals stand here as missed. Most figures are of the
processor's time, in which threads that wait for each other should not count. Larger sizes take longer and have pages of
their own: `benchmarks/{experts,batches,clustering,real_steps}.py`.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm.auto import tqdm

from benchmarks import batches, clustering, experts, loader
from benchmarks.devices import described
from records.files import write_text
from records.markdown import markdown_table


@dataclass(frozen=True)
class Figure:
    """A ratio and what it should be."""

    what: str
    ratio: float
    at_most: float = math.inf
    at_least: float = 0.0

    def row(self) -> list[str]:
        target = f"{self.at_least:g} to {self.at_most:g}"
        if math.isinf(self.at_most):
            target = f"at least {self.at_least:g}"
        elif self.at_least == 0:
            target = f"at most {self.at_most:g}"
        reached = self.at_least <= self.ratio <= self.at_most
        return [self.what, f"{self.ratio:.2f}", target, "yes" if reached else "missed"]


def of_experts(repeats: int) -> Iterator[Figure]:
    """A sparse FFN over K dense ones."""
    for size, title in (("b16", "B/16"), ("l14", "L/14")):
        for num_experts in (4, 8):
            found = experts.ratios(size, 8, num_experts, repeats=repeats, implementations=["by_device"])
            where = f"{title}, 8 images, top-2 of {num_experts}, over 2 dense FFNs"
            for mode, target in (("forward", 1.05), ("frozen", 1.05), ("trained", 1.15)):
                yield Figure(f"time of sparse FFNs, {mode}: {where}", found["by_device", mode], at_most=target)
    for num_experts in (4, 8):
        found = experts.ratios(
            "b16", 8, num_experts, repeats=repeats, implementations=["by_device"], dropped=0.5, modes=["forward"]
        )
        where = f"B/16, 8 images, top-2 of {num_experts}, half of the choices dropped, over 2 dense FFNs"
        yield Figure(f"time of sparse FFNs, forward: {where}", found["by_device", "forward"], at_most=0.5 * 1.05)


def of_batches(repeats: int) -> Iterator[Figure]:
    *_, memory, seconds = batches.ratios("loss", (16384, 768, None), (16384, 768, 1024), repeats)
    where = "loss of 16,384 x 768 in chunks of 1,024, over the plain one"
    yield Figure(f"memory: {where}", memory, at_most=0.125)
    yield Figure(f"time: {where}", seconds, at_most=1.3)
    _, part, _, seconds = batches.ratios("step", (128, None), (128, 32), repeats)
    yield Figure("time: step of 128 pairs, 32 embedded at a time, over all at once", seconds, at_most=1.4)
    growth = batches.measure("step", [512, 32])["bytes"] / part["bytes"]
    yield Figure("memory: step of 512 pairs, 32 at a time, over one of 128", growth, at_most=1.1)


def of_data(repeats: int) -> Iterator[Figure]:
    names = "loaded, 2 workers", f"indexed in {loader.SHARDS} shards, 2 workers"
    found = loader.medians(320, repeats, names)
    for name in names:
        yield Figure(f"images/s: {name}, over Pillow in a loop", found[name] / found[loader.LOOP], at_least=1.6)


def of_clusters(repeats: int) -> Iterator[Figure]:
    names = [clustering.OURS, clustering.FAISS]
    runs = [clustering.compare(100_000, 768, [256], 1000, names)[256] for _ in range(repeats)]
    times = statistics.median(run[clustering.OURS]["cpu"] / run[clustering.FAISS]["cpu"] for run in runs)
    yield Figure("CPU time: 256 clusters of 100,000 x 768, over faiss", times, at_most=1.0)


def of_steps(repeats: int) -> Iterator[Figure]:
    for name in ("dense, all weights", "CLIP-UP"):
        command = ["--size", "ViT-B/32", "--batch", "8", "--one", name]
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.real_steps", *command], capture_output=True, text=True, check=True
        )
        row = json.loads(done.stdout.splitlines()[-1])
        what = f"memory of a step: {name}, B/32, 8 pairs, over --plan"
        yield Figure(what, row["held"] / row["plan"], at_most=1.15, at_least=0.85)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.goals", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3, help="alternating runs, of which the median counts")
    parser.add_argument("--output", type=Path, help="markdown file to write besides printing")
    options = parser.parse_args(argv)
    parts = (of_experts, of_batches, of_data, of_clusters, of_steps)
    rows = []
    for figure in (figure for part in tqdm(parts) for figure in part(options.repeats)):
        rows.append(figure.row())
        tqdm.write(" | ".join(rows[-1]))  # at once: a run may be stopped
    table = "\n".join(
        [
            "# Goals",
            "",
            f"Medians of {options.repeats} alternating runs, five times as many of FFNs' forwards; memory of a step "
            f"is that of one. {described(torch.device('cpu'))}.",
            "",
            markdown_table(["", "ratio", "goal", "reached"], rows),
        ]
    )
    print(table)
    if options.output is not None:
        write_text(options.output, table + "\n")


if __name__ == "__main__":
    main()
