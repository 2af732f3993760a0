"""What an encoder makes of a whole data set, in a `FeatureStore`."""

from collections.abc import Iterator

import datasets
import numpy as np

from data.pairs import first_caption
from evaluation.feature_store import Compute
from evaluation.sentence_encoders import SentenceEncoder

# Which pairs of the data have features and labels: those with a readable image, or with a caption
READABLE, CAPTIONED = "readable", "captioned"
# Batches that are written together: what a run that is killed loses, and what is in memory at a time
CAPTION_BATCHES_PER_SHARD = 128


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
