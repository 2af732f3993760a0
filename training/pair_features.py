"""Embeddings and labels of a dataset's pairs, a row each, as `embed` and `cluster` stages keep them."""

from collections.abc import Iterator
from pathlib import Path

import datasets
import numpy as np

from clip_moe.data.arguments import DataArguments
from clip_moe.data.pairs import shared_fingerprint, shared_pairs
from clip_moe.data.texts import first_caption
from clip_moe.engine.context import Context
from clip_moe.engine.settings import dump
from clip_moe.evaluation.feature_store import Compute, FeatureStore
from clip_moe.evaluation.sentence_encoders import SentenceEncoder
from clip_moe.training.clusters import CAPTIONED, READABLE

# The folder of the encoder, in that of an embed stage of images or captions alone
ENCODER = "encoder"
# Batches of an encoder that are written together: what a run that is killed loses, and what is in memory at a time
BATCHES_PER_SHARD = 128


def new_store(
    directory: Path,
    rows: datasets.Dataset,
    data: DataArguments,
    shard_size: int,
    context: Context,
    images: bool = True,
    encoder: str | None = None,
) -> FeatureStore:
    """A store with a row for each of the pairs `rows` of `data`.

    Args:
        images: whether they are the pairs with a readable image, or those with a caption.
        encoder: the name of the encoder that is kept beside; None: a CLIP embeds both.
    """
    about = {"data": dump(data), "pairs": READABLE if images else CAPTIONED}
    about["dataset_fingerprint"] = shared_fingerprint(context, rows, images)
    return FeatureStore(directory, len(rows), shard_size, about if encoder is None else {"encoder": encoder, **about})


def open_store(folder: Path, maker: str, by_encoder: bool) -> FeatureStore:
    """The feature store that `new_store` made.

    Args:
        maker: what writes such folders, for the error.
        by_encoder: whether it has to be of one encoder, and not of images and captions together.
    """
    store = FeatureStore.open(folder, maker, {"data": dict, "dataset_fingerprint": str, "pairs": str})
    if by_encoder != ("encoder" in store.about):
        wanted = "what: captions or images" if by_encoder else "what: both"
        raise ValueError(f"{folder} has other embeddings than needed here: use an embed stage with {wanted}")
    return store


def pairs_of(store: FeatureStore, context: Context) -> datasets.Dataset:
    """The pairs that a store has rows of. Raises a ValueError if they have changed since."""
    data, images = DataArguments(**store.about["data"]), store.about["pairs"] == READABLE
    rows = shared_pairs(context, data, images)
    if shared_fingerprint(context, rows, images) != store.about["dataset_fingerprint"]:
        raise ValueError(f"{data.source} has changed since {store.folder} was made; delete the folder to make it again")
    return rows


def encode_pairs(encoder: SentenceEncoder, rows: datasets.Dataset, batch_size: int) -> Compute:
    """`text` or `image` (pairs, d) of captions or of images, normalized, or zeros, as TF-IDF's of a text without a
    known word. Clusters of what is not finite would mean nothing: it is a ValueError."""

    def compute(shards: list[range]) -> Iterator[dict[str, np.ndarray]]:
        for pairs in shards:
            part = rows.select(pairs)
            embeddings = encoder.encode(part if encoder.modality == "image" else first_captions(part), batch_size)
            lengths = np.linalg.norm(embeddings, axis=1)
            bad = int((~(np.isclose(lengths, 1, atol=1e-2) | (lengths == 0))).sum())
            if bad:
                raise ValueError(f"{bad} {encoder.modality} embeddings from pair {pairs.start} on are not finite")
            yield {encoder.modality: embeddings.astype(np.float32, copy=False)}

    return compute


def first_captions(rows: datasets.Dataset) -> list[str]:
    """The captions of rows, of several the first."""
    return [*map(first_caption, rows.select_columns("caption")["caption"])]  # the images stay where they are
