"""A test held out of pairs that have none."""

import itertools

import datasets
import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from transformers import PreTrainedTokenizerBase

from data.identity import image_digests
from data.pairs import present_captions, same_words
from data.tokenizer import read_texts

# Pairs whose images are read together
AT_ONCE = 1000


def hold_out(
    rows: datasets.Dataset, share: float, seed: int, tokenizer: PreTrainedTokenizerBase
) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Rows to train on and rows to test on, which have no caption and no image in common.

    Args:
        rows: columns `image` and `caption`, a text or a list of texts.
        share: at least this share of the rows is for the test.
        tokenizer: captions that it reads alike are one.

    Raises:
        ValueError: captions or images tie too many of them together.
    """
    parts = _parts(rows, tokenizer)
    sizes = np.bincount(parts)
    order = np.random.default_rng(seed).permutation(len(sizes))
    # A part that is larger than the test would leave little to train on
    order = order[sizes[order] <= share * len(rows)]
    before = np.cumsum(sizes[order]) - sizes[order]
    is_test = np.isin(parts, order[before < share * len(rows)])
    if not 2 <= len(set(parts[is_test])) or is_test.all():
        raise ValueError(
            f"no test of {share:.0%} of the {len(rows)} pairs can be held out: it needs two captions that are not in "
            f"training, with all their pairs, and the most frequent one has {sizes.max()}. Give the data a split "
            "test, or more pairs"
        )
    return rows.select(np.flatnonzero(~is_test)), rows.select(np.flatnonzero(is_test))


def image_keys(rows: datasets.Dataset) -> list[str]:
    """(rows,) The hashes of their images."""
    return [key for batch in rows.select_columns("image").iter(AT_ONCE) for key in image_digests(batch["image"])]


def _parts(rows: datasets.Dataset, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """(rows,) The number of each row's part: rows with a caption or an image in common are of one."""
    numbers, names = [], []
    for start in range(0, len(rows), AT_ONCE):
        batch = rows[start : start + AT_ONCE]
        captions = [present_captions(of_image) for of_image in batch["caption"]]
        read = read_texts(tokenizer, list(itertools.chain(*captions)))
        tokens = iter(read.digests)
        for row, (digest, texts) in enumerate(zip(image_digests(batch["image"]), captions, strict=True), start):
            # A tokenizer that heeds case reads other tokens of the same words
            of_row = [digest, *(f"words {same_words(text)}" for text in texts)]
            of_row += [f"tokens {next(tokens).hex()}" for _ in texts]
            numbers += [row] * len(of_row)
            names += of_row
    places = np.unique(names, return_inverse=True)[1] + len(rows)
    size = places.max() + 1
    graph = coo_array((np.ones(len(numbers), bool), (numbers, places)), shape=(size, size))
    return np.unique(connected_components(graph, directed=False)[1][: len(rows)], return_inverse=True)[1]
