"""The embeddings of captions by a sentence encoder, as stages keep them (MoDE)."""

from collections.abc import Iterator
from pathlib import Path

import datasets
import numpy as np

from clip_moe.data.arguments import DataArguments
from clip_moe.data.shared_rows import shared_fingerprint
from clip_moe.data.texts import first_caption
from clip_moe.engine.context import Context
from clip_moe.engine.settings import dump
from clip_moe.evaluation.feature_store import Compute, FeatureStore
from clip_moe.evaluation.sentence_encoders import SentenceEncoder
from clip_moe.training.clusters import CAPTIONED, READABLE

# The folder of the encoder of captions, in that of an embed_captions stage
ENCODER = "encoder"
# Batches that are written together: what a run that is killed loses, and what is in memory at a time
BATCHES_PER_SHARD = 128


def caption_store(
    directory: Path,
    rows: datasets.Dataset,
    data: DataArguments,
    batch_size: int,
    encoder: SentenceEncoder,
    context: Context,
) -> FeatureStore:
    """A store of what is computed of the pairs `rows` of `data`, in parts of a number of batches."""
    images = encoder.modality == "image"
    about = {"encoder": encoder.name, "data": dump(data), "pairs": READABLE if images else CAPTIONED}
    about["dataset_fingerprint"] = shared_fingerprint(context, rows, images)
    return FeatureStore(directory, len(rows), batch_size * BATCHES_PER_SHARD, about)


def open_store(folder: Path, maker: str) -> FeatureStore:
    """What `caption_store` made. Raises see `FeatureStore.open`."""
    return FeatureStore.open(folder, maker, {"encoder": str, "data": dict, "dataset_fingerprint": str, "pairs": str})


def encoder_features(
    encoder: SentenceEncoder, rows: datasets.Dataset, batch_size: int, dtype: str = "float32"
) -> Compute:
    """`embeddings` (pairs, d) of captions or of images, normalized, or zeros, as TF-IDF's of a text without a known
    word. Clusters of what is not finite would mean nothing: it is a ValueError."""

    def compute(shards: list[range]) -> Iterator[dict[str, np.ndarray]]:
        for pairs in shards:
            part = rows.select(pairs)
            embeddings = encoder.encode(part if encoder.modality == "image" else captions_of(part), batch_size)
            lengths = np.linalg.norm(embeddings, axis=1)
            bad = int((~(np.isclose(lengths, 1, atol=1e-2) | (lengths == 0))).sum())
            if bad:
                raise ValueError(f"{bad} {encoder.modality} embeddings from pair {pairs.start} on are not finite")
            yield {"embeddings": embeddings.astype(dtype)}

    return compute


def captions_of(rows: datasets.Dataset) -> list[str]:
    """The captions of rows, of several the first."""
    return [*map(first_caption, rows.select_columns("caption")["caption"])]  # the images stay where they are
