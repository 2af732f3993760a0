"""A test held out of pairs that have none."""

import datasets
import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from data.identity import image_digests
from data.pairs import present_captions, same_words

# Pairs whose images are read together
AT_ONCE = 1000


def hold_out(rows: datasets.Dataset, share: float, seed: int) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Rows to train on and rows to test on, which have no caption and no image in common.

    Args:
        rows: columns `image` and `caption`, a text or a list of texts.
        share: about this share of the rows is for the test.

    Raises:
        ValueError: captions or images tie too many of them together.
    """
    parts = _parts(rows)
    sizes = np.bincount(parts)
    order = np.random.default_rng(seed).permutation(len(sizes))
    # A part that is larger than the test would leave little to train on
    order = order[sizes[order] <= share * len(rows)]
    before = np.cumsum(sizes[order]) - sizes[order]
    is_test = np.isin(parts, order[before < share * len(rows)])
    if not 2 <= len(set(parts[is_test])) or is_test.all():
        raise ValueError(
            f"no test of {share:.0%} of the {len(rows)} pairs can be held out: it needs two captions that are not in "
            f"training, and one caption or image has {sizes.max()} pairs. Give the data a split test, or more pairs"
        )
    return rows.select(np.flatnonzero(~is_test)), rows.select(np.flatnonzero(is_test))


def _parts(rows: datasets.Dataset) -> np.ndarray:
    """(rows,) The number of each row's part: rows with a caption or an image in common are of one."""
    numbers, names = [], []
    for start in range(0, len(rows), AT_ONCE):
        batch = rows[start : start + AT_ONCE]
        digests = image_digests(batch["image"])
        for row, (digest, captions) in enumerate(zip(digests, batch["caption"], strict=True), start):
            of_row = [digest, *(f"caption {same_words(text)}" for text in present_captions(captions))]
            numbers += [row] * len(of_row)
            names += of_row
    places = np.unique(names, return_inverse=True)[1] + len(rows)
    size = places.max() + 1
    graph = coo_array((np.ones(len(numbers), bool), (numbers, places)), shape=(size, size))
    return np.unique(connected_components(graph, directed=False)[1][: len(rows)], return_inverse=True)[1]
