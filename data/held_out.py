"""A test held out of pairs that have none."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import datasets
import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from transformers import PreTrainedTokenizerBase

from clip_moe.data.near_copies import Copies
from clip_moe.data.overview import are_classes
from clip_moe.data.texts import plain_words, present_captions
from clip_moe.data.tokenizer import read_texts


def hold_out(
    rows: datasets.Dataset,
    share: float,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
    copies: Copies,
    names: Sequence[str] | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of rows to train on and of rows to test on, which have no caption and no image in common, also not under
    other bytes. Where captions repeat as classes do, they have the classes in common, and no image. A ValueError where
    captions or images tie too many of them together.

    Args:
        rows: columns `image` and `caption`, a text or a list of texts.
        share: at least this share of the rows is for the test.
        tokenizer: captions that it reads alike are one.
        copies: those among the images.
        names: the class of each row, where captions repeat as classes do; see `class_names`.
    """
    image_keys = [[f"pixels {pixels}"] for pixels in copies.pixels]
    for first, second in copies.near.tolist():
        image_keys[second].append(image_keys[first][0])
    rng = np.random.default_rng(seed)
    if names is None:
        caption_keys = _caption_keys(rows["caption"], tokenizer)
        parts = _components([images + captions for images, captions in zip(image_keys, caption_keys, strict=True)])
        sizes = np.bincount(parts)
        order = rng.permutation(len(sizes))
    else:
        parts = _components(image_keys)
        sizes, (_, first) = np.bincount(parts), np.unique(parts, return_index=True)
        order = _spread([names[row] for row in first], rng)
    # A part that is larger than the test would leave little to train on
    order = order[sizes[order] <= share * len(rows)]
    before = np.cumsum(sizes[order]) - sizes[order]
    is_test = np.isin(parts, order[before < share * len(rows)])
    if not 2 <= len(set(parts[is_test])) or is_test.all():
        raise ValueError(
            f"cannot hold out {share:.0%} of the {len(rows)} pairs as a test: it needs two captions that are not in "
            f"training, with all their pairs, but {sizes.max()} pairs are connected by a shared caption or picture. "
            "Give the data a split test, or more pairs"
        )
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)


def _spread(classes: Sequence[str], rng: np.random.Generator) -> np.ndarray:
    """Orders parts, by the class of each, so that any first n have about the same share of each class. Leaves
    out the last part of each class, so that training has one."""
    parts_of: dict[str, list[int]] = defaultdict(list)
    for part in rng.permutation(len(classes)):
        parts_of[classes[part]].append(part)
    several = [parts for parts in parts_of.values() if len(parts) > 1]
    place = {part: (rank + rng.random()) / len(parts) for parts in several for rank, part in enumerate(parts)}
    return np.array(sorted((part for parts in several for part in parts[:-1]), key=place.get), int)


def class_names(captions: Iterable[str | list[str]], tokenizer: PreTrainedTokenizerBase) -> list[str] | None:
    """The class of each row, called by the most frequent of the captions that are alike, with blanks for underscores;
    None: captions do not repeat as classes do."""
    texts = [present_captions(image_captions) for image_captions in captions]
    if any(len(image_texts) != 1 for image_texts in texts):
        return None
    parts = _components(_caption_keys(texts, tokenizer))
    if not are_classes(np.bincount(parts)):
        return None
    counts: dict[int, Counter[str]] = defaultdict(Counter)
    for part, [text] in zip(parts.tolist(), texts, strict=True):
        counts[part][text] += 1
    names = {part: texts.most_common(1)[0][0].replace("_", " ") for part, texts in counts.items()}
    return [names[part] for part in parts.tolist()]


def _caption_keys(captions: Iterable[str | list[str]], tokenizer: PreTrainedTokenizerBase) -> list[list[str]]:
    """Keys of each row: the words and the tokens of each caption. A tokenizer that heeds case reads other tokens of the
    same words."""
    texts = [present_captions(image_captions) for image_captions in captions]
    tokens = iter(read_texts(tokenizer, list(itertools.chain.from_iterable(texts))).digests)
    return [
        [key for text in row_texts for key in (f"words {plain_words(text)}", f"tokens {next(tokens).hex()}")]
        for row_texts in texts
    ]


def _components(keys: Sequence[Sequence[str]]) -> np.ndarray:
    """(rows,) The number of each row's part: rows with a key in common are of one."""
    numbers = np.repeat(np.arange(len(keys)), list(map(len, keys)))
    places = np.unique(list(itertools.chain.from_iterable(keys)), return_inverse=True)[1] + len(keys)
    size = places.max() + 1
    graph = coo_array((np.ones(len(numbers), bool), (numbers, places)), shape=(size, size))
    return np.unique(connected_components(graph, directed=False)[1][: len(keys)], return_inverse=True)[1]
