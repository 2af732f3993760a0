"""Duplicates: pairs of a dataset that have a text or an image in common.

In a batch with both, the text of one is right for the image of the other. A loss that takes it for a negative teaches
what is wrong, so `clip_moe.training.samplers` keeps duplicates apart, and `clip_moe.training.losses` counts those that
meet as positives.
"""

import hashlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import datasets
import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from clip_moe.data.identity import image_digests, named_files_stamp
from clip_moe.data.texts import present_captions, same_words
from clip_moe.data.tokenizer import tokenize
from clip_moe.engine.context import Context
from clip_moe.engine.digests import value_digest

# More texts are compared word by word in lower case: to tokenize them would take minutes
TOKENIZED = 1_000_000
# Pairs that are read together
PAIRS_AT_ONCE = 1000


def text_keys(texts: list[str], tokenizer: PreTrainedTokenizerBase | None) -> np.ndarray:
    """(texts,) of int64, equal for texts that the tokenizer reads alike; without one, for those of the same words."""
    if tokenizer is None:
        words = [same_words(text).encode(errors="surrogatepass") for text in texts]
        return np.array([_number(hashlib.blake2b(word, digest_size=8).digest()) for word in words], np.int64)
    tokens = tokenize(tokenizer, texts)
    return token_keys(tokens["input_ids"], tokens["attention_mask"], tokenizer.eos_token_id).numpy()


def token_keys(input_ids: torch.Tensor, attention_mask: torch.Tensor, end: int | None) -> torch.Tensor:
    """(texts,) of int64, equal for equal tokens (texts, S) up to the first end token, however far they are padded."""
    is_end = torch.zeros_like(input_ids) if end is None else (input_ids == end).long()
    mask = attention_mask * (is_end.cumsum(dim=1) - is_end == 0)
    return ((input_ids + 1) * mask * _factors(input_ids.shape[1])).sum(dim=1)


@cache
def _factors(length: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(-(2**63), 2**63 - 1, length))


def streamed_image_key(image: str | dict[str, Any]) -> int:
    """The key of an image by its bytes, or else by its path: no file is read for it."""
    image = {"path": image} if isinstance(image, str) else image
    content = image.get("bytes") or str(image.get("path")).encode()
    return _number(hashlib.sha256(content).digest())


def _number(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little", signed=True)


class Duplicates:
    """Which pairs of a dataset have a text or an image in common.

    A group has all pairs of one text or of one image. The number of a pair's largest group is its `label`, or -1 where
    it has no duplicate.

    Args:
        images: (pairs,) of int64, equal for equal images.
        texts: (texts,) of int64, equal for equal texts, of all captions of all pairs.
        pair_of: (texts,) the pair of each text; None: each pair has one.
        tokenized: whether equal texts are those that the tokenizer reads alike.
    """

    def __init__(
        self, images: np.ndarray, texts: np.ndarray, pair_of: np.ndarray | None = None, tokenized: bool = True
    ):
        self.num_pairs, self.images, self.tokenized = len(images), images, tokenized
        members, sizes = map(np.concatenate, zip(_groups(texts, pair_of), _groups(images, None), strict=True))
        order = np.argsort(sizes, kind="stable")  # largest last: it labels its pairs
        members, sizes = members[ranges(_starts(sizes)[order], sizes[order])], sizes[order]
        self.labels = np.full(self.num_pairs, -1, np.int32)
        self.labels[members] = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        # A group's pairs all carry its own label, or all carry that of a larger group that contains it, or carry
        # several labels (groups that overlap)
        labels, starts = self.labels[members], _starts(sizes)
        lowest = np.minimum.reduceat(labels, starts) if len(sizes) else sizes
        highest = np.maximum.reduceat(labels, starts) if len(sizes) else sizes
        kept = (lowest != highest) | (lowest == np.arange(len(sizes)))
        self.members, self.sizes = members[np.repeat(kept, sizes)], sizes[kept]
        self.labels = np.append(np.cumsum(kept, dtype=np.int32) - 1, np.int32(-1))[self.labels]

    @classmethod
    def of(cls, rows: datasets.Dataset, tokenizer: PreTrainedTokenizerBase | None) -> "Duplicates":
        """Those of a dataset with the columns `image` and `caption`, all of which are read. It may have no images."""
        if isinstance(rows.features.get("image"), datasets.Image):
            rows = rows.cast_column("image", datasets.Image(decode=False))
        images, texts, counts = [], [], []
        num_texts = len(rows) * max(len(present_captions(rows.select_columns("caption")[0]["caption"])), 1)
        reader = tokenizer if num_texts <= TOKENIZED else None
        for batch in rows.iter(PAIRS_AT_ONCE):
            captions = [present_captions(image_captions) for image_captions in batch["caption"]]
            images += image_digests(batch["image"]) if "image" in batch else []
            texts.append(text_keys([text for image_captions in captions for text in image_captions], reader))
            counts += map(len, captions)
        numbers = np.array([_number(bytes.fromhex(digest)) for digest in images], np.int64)
        numbers = numbers if len(images) else np.arange(len(rows))
        pair_of = None if set(counts) == {1} else np.repeat(np.arange(len(rows), dtype=np.int32), counts)
        return cls(numbers, np.concatenate(texts), pair_of, reader is not None)

    @property
    def may_be_there(self) -> bool:
        """Whether two pairs may have a text or an image in common, as the tokenizer reads it."""
        return len(self.members) > 0 or not self.tokenized

    def share_in(self, batches: Sequence[np.ndarray]) -> float:
        """The share of the pairs of batches that have a duplicate in theirs."""
        batch_of = np.full(self.num_pairs, -1, np.int32)
        for number, batch in enumerate(batches):
            batch_of[batch] = number
        batch, group = batch_of[self.members], np.repeat(np.arange(len(self.sizes)), self.sizes)
        is_used = batch >= 0
        _, meeting, sizes = np.unique((group * len(batches) + batch)[is_used], return_inverse=True, return_counts=True)
        have_duplicate = np.unique(self.members[is_used][sizes[meeting] > 1])
        return len(have_duplicate) / max((batch_of >= 0).sum(), 1)

    def are_of_one_group(self, pairs: np.ndarray) -> bool:
        """Whether all of these pairs have the same text or the same image, as their labels tell."""
        labels = self.labels[pairs]
        return labels[0] >= 0 and bool((labels == labels[0]).all())


def _groups(keys: np.ndarray, pair_of: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """The pairs of each key that several have, one group after another, and the sizes of the groups."""
    in_order = np.sort(keys)
    repeated = np.unique(in_order[1:][in_order[1:] == in_order[:-1]])
    del in_order  # of millions of texts, few are repeated: what follows is of these alone
    texts = np.flatnonzero(np.searchsorted(repeated, keys) < np.searchsorted(repeated, keys, side="right"))
    texts = texts[np.argsort(keys[texts], kind="stable")]  # within a group, by pairs
    keys, pairs = keys[texts], (texts if pair_of is None else pair_of[texts]).astype(np.int32)
    new = np.append(True, keys[1:] != keys[:-1])[: len(keys)]
    if pair_of is not None:  # a pair may have a text twice
        first = new | np.append(True, pairs[1:] != pairs[:-1])[: len(pairs)]
        pairs, new = pairs[first], new[first]
    starts = np.flatnonzero(new)
    sizes = np.diff(np.append(starts, len(pairs)))
    several = sizes > 1
    return pairs[np.repeat(several, sizes)], sizes[several]


def ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The concatenated ranges of `sizes` numbers from each of `starts`."""
    return np.repeat((starts - _starts(sizes)).astype(np.int32), sizes) + np.arange(sizes.sum(), dtype=np.int32)


def _starts(sizes: np.ndarray) -> np.ndarray:
    return np.cumsum(sizes) - sizes


def shared_duplicates(context: Context, rows: datasets.Dataset, tokenizer: PreTrainedTokenizerBase) -> Duplicates:
    """`Duplicates.of`, with the last ones kept. Every process has to ask, as one reads while the others wait."""
    files = named_files_stamp(rows) if "image" in rows.column_names else ""
    vocabulary = sorted(tokenizer.get_vocab().items())
    key = value_digest([rows._fingerprint, rows.column_names, files, vocabulary, tokenizer.model_max_length])
    return context.kept("duplicates", key, lambda: Duplicates.of(rows, tokenizer))
