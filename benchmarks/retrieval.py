"""Retrieval's recall in bounded memory, beside a plain full matrix of similarities.

    python -m benchmarks.retrieval --output benchmarks/results/retrieval_cpu.md [--large]

Both measure the same random embeddings of 5,000 images and 25,000 captions in turn. --large adds all of
Flickr30k in Karpathy's list: 31,014 images and 155,070 captions. Memory is that of a process of its own, beyond what it
had with the embeddings.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

from evaluation.retrieval import retrieval_metrics
from evaluation.speed import peak_resident
from records.files import write_text
from records.markdown import markdown_table

SMALL, LARGE = (5_000, 25_000), (31_014, 155_070)
SIZE = 768
ROUNDS = 3


def embeddings(num_images: int, num_texts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images, captions that lie about them, and the image of each caption."""
    rng = np.random.default_rng(0)
    images = rng.standard_normal((num_images, SIZE), np.float32)
    image_of_text = np.arange(num_texts) % num_images
    texts = rng.standard_normal((num_texts, SIZE), np.float32)
    for start in range(0, num_texts, 1000):  # a little at a time, lest the memory of this be that of the process
        part = slice(start, start + 1000)
        texts[part] = 5 * texts[part] + images[image_of_text[part]]
        texts[part] /= np.linalg.norm(texts[part], axis=1, keepdims=True)
    for start in range(0, num_images, 1000):
        images[start : start + 1000] /= np.linalg.norm(images[start : start + 1000], axis=1, keepdims=True)
    return images, texts, image_of_text


def plain(images: np.ndarray, texts: np.ndarray, image_of_text: np.ndarray) -> dict[str, float]:
    """Recall with all similarities in memory, by torch's `topk`: no ties are looked at."""
    similarity = torch.as_tensor(images) @ torch.as_tensor(texts).T
    right = torch.as_tensor(image_of_text)
    found = {"image_to_text": right[similarity.topk(10).indices] == torch.arange(len(images))[:, None]}
    found["text_to_image"] = similarity.T.topk(10).indices == right[:, None]
    return {
        f"{name}_recall@{k}": of[:, :k].any(dim=1).double().mean().item()
        for name, of in found.items()
        for k in (1, 5, 10)
    }


def _memory(method: Callable, sizes: tuple[int, int]) -> tuple[int, int, float]:
    """Bytes with the embeddings, bytes at most, and seconds."""
    arguments = embeddings(*sizes)
    before, started = peak_resident(), time.perf_counter()
    method(*arguments)
    return before, peak_resident(), time.perf_counter() - started


def memory(method: Callable, sizes: tuple[int, int]) -> tuple[int, int, float]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(_memory, method, sizes).result()


def seconds(methods: dict[str, Callable], sizes: tuple[int, int]) -> dict[str, float]:
    """Medians of rounds in each of which all methods have their turn.

    Raises:
        ValueError: they do not agree.
    """
    arguments, times, metrics = embeddings(*sizes), {name: [] for name in methods}, {}
    for _ in range(ROUNDS):
        for name, method in methods.items():
            started = time.perf_counter()
            metrics[name] = method(*arguments)
            times[name].append(time.perf_counter() - started)
    first, *others = metrics.values()
    if any(abs(first[key] - other[key]) > 2 / sizes[0] for other in others for key in first):
        raise ValueError(f"the methods do not agree: {metrics}")
    return {name: statistics.median(of) for name, of in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true", help="also Flickr30k's size, which takes minutes")
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    methods = {"ours": retrieval_metrics, "a plain full matrix": plain}
    rows = []
    times = seconds(methods, SMALL)
    for name, method in methods.items():
        ratio = f"{times[name] / times['a plain full matrix']:.2f}"
        rows.append(
            [name, *map("{:,}".format, SMALL), f"{times[name]:.1f}", ratio, *_mebibytes(*memory(method, SMALL))]
        )
    if options.large:
        *bytes_at, duration = memory(retrieval_metrics, LARGE)
        rows.append(["ours", *map("{:,}".format, LARGE), f"{duration:.0f}", "", *_mebibytes(*bytes_at)])
    header = ["", "images", "captions", "seconds", "relative", "MiB with the embeddings", "MiB more for recall"]
    matrix = LARGE[0] * LARGE[1] * 4 / 2**20
    text = (
        f"# Retrieval at {SIZE} dimensions\n\n{markdown_table(header, rows)}\n\n"
        f"Recall at 1, 5 and 10 in both directions. Medians of {ROUNDS} rounds in turn; the large one once. A full "
        f"matrix of {LARGE[0]:,} x {LARGE[1]:,} would take {matrix:,.0f} MiB. {platform.machine()}, "
        f"{torch.get_num_threads()} threads, numpy {np.__version__}, torch {torch.__version__}."
    )
    print(text)
    if options.output is not None:
        write_text(options.output, text)


def _mebibytes(before: int, most: int, _: float = 0) -> list[str]:
    return [f"{before / 2**20:,.0f}", f"{(most - before) / 2**20:,.0f}"]


if __name__ == "__main__":
    main()
