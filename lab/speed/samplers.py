"""An epoch of global batches without two pairs of the same text or image, beside a shuffle.

    python -m lab.speed.samplers --output lab/speed/results/samplers_cpu.md

Every sampler runs in a process of its own. Memory is what comes on top of the keys of texts and images.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from clip_moe.engine.command_line import command
from clip_moe.evaluation.speed import in_turn
from clip_moe.training.duplicates import Duplicates
from clip_moe.training.samplers import GlobalBatchSampler
from lab.speed.page import Output, Rounds, cost, machine, median_of, median_ratio, mib, page, table

SHUFFLE = "a shuffle"


# Name -> the share of the texts that are repeated, how often each of these is there, and the texts of an image
DATA = {
    "a quarter of the texts, each four times": (0.25, 4, 1),
    "every text 16 times": (1.0, 16, 1),
    "five texts an image, a quarter of them of several images": (0.25, 4, 5),
}


def keys(name: str, pairs: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys of the images and of the texts of pairs."""
    share, times, texts_an_image = DATA[name]
    rng, numbers = np.random.default_rng(0), np.arange(pairs)
    repeated = rng.permutation(pairs) < share * pairs
    texts = numbers + pairs
    texts[repeated] = rng.permutation(repeated.sum()) // times
    return numbers // texts_an_image, texts


def finding(name: str, pairs: int, size: int) -> Callable:
    """Finds the duplicates, and prepares the first epoch."""
    of_pairs = keys(name, pairs)
    return lambda: _sampler(of_pairs, pairs, size)._spread.num_batches


def epoch(name: str, pairs: int, size: int) -> Callable:
    """Makes the batches of an epoch."""
    if name == SHUFFLE:
        sampler = GlobalBatchSampler(pairs, size)
    else:
        sampler = _sampler(keys(name, pairs), pairs, size)
        sampler.all_batches()  # which finds what is the same in all epochs
    return lambda: len(sampler.all_batches())


def _sampler(of_pairs: tuple[np.ndarray, np.ndarray], pairs: int, size: int) -> GlobalBatchSampler:
    sampler = GlobalBatchSampler(pairs, size)
    sampler.duplicates = Duplicates(*of_pairs)
    return sampler


def share_left(name: str, pairs: int, size: int) -> float:
    sampler = _sampler(keys(name, pairs), pairs, size)
    return sampler.duplicates.share_in(sampler.all_batches())


@command
def compare_samplers(*, output: Output = None, pairs: int = 10_000_000, size: int = 1024, rounds: Rounds = 5) -> str:
    """An epoch of batches without duplicates, beside a shuffle. In each round, every sampler has its turn.

    Args:
        pairs: how many the dataset has
        size: how many a global batch has
    """
    epochs = in_turn({name: partial(cost, epoch, name, pairs, size) for name in (SHUFFLE, *DATA)}, rounds)
    rows = []
    for name, costs in epochs.items():
        times = [result["cpu"] for result in costs]
        cells = f"{median_of(costs, 'cpu'):.2f}", mib(median_of(costs, "memory"))
        relative = median_ratio(times, [result["cpu"] for result in epochs[SHUFFLE]])
        once = ("", "", "") if name == SHUFFLE else _once(name, pairs, size)
        rows.append([name, cells[0], f"{relative:.2f}", cells[1], *once])
    header = ["", "epoch, CPU seconds", "relative", "memory", "once, CPU seconds", "memory", "pairs with a duplicate"]
    return page(
        output,
        f"# Batches of {size:,} of {pairs:,} pairs",
        table(header, rows),
        "Where no text and no image is there twice, batches are those of the shuffle.",
        f"Medians of {rounds} rounds, each in a process of its own, one thread. {machine()}.",
    )


def _once(name: str, pairs: int, size: int) -> tuple[str, str, str]:
    found = cost(finding, name, pairs, size)
    return f"{found['cpu']:.2f}", mib(found["memory"]), f"{share_left(name, pairs, size):.1%}"


if __name__ == "__main__":
    compare_samplers.main()
