"""The embeddings of captions, their clusters, and the data experts that these make (MoDE), as stages keep them."""

from collections.abc import Iterator
from pathlib import Path

import datasets
import numpy as np

from clip_moe.data.arguments import DataArguments
from clip_moe.data.contact_sheet import contact_sheet
from clip_moe.data.pairs import first_caption
from clip_moe.engine.context import Context
from clip_moe.engine.settings import dump
from clip_moe.evaluation.feature_store import Compute, FeatureStore
from clip_moe.evaluation.sentence_encoders import SentenceEncoder
from clip_moe.training.clusters import CaptionClusters, center_ranges, save_clusters

# The folder of the encoder of captions, in that of an embed_captions stage
ENCODER = "encoder"
# Pairs that the samples in pictures are drawn from
SAMPLES_DRAWN_FROM = 20_000
# Which pairs of the data have features and labels: those with a readable image, or with a caption
READABLE, CAPTIONED = "readable", "captioned"
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
    about["dataset_fingerprint"] = context.data_fingerprint(rows, images)
    return FeatureStore(directory, len(rows), batch_size * BATCHES_PER_SHARD, about)


def open_store(folder: Path, maker: str) -> FeatureStore:
    """What `caption_store` made. Raises see `FeatureStore.open`."""
    return FeatureStore.open(folder, maker, {"encoder": str, "data": dict, "dataset_fingerprint": str, "pairs": str})


def save_experts(
    name: str,
    fine: Path,
    context: Context,
    directory: Path,
    centers: tuple[np.ndarray, np.ndarray, np.ndarray],
    at_random: bool = False,
) -> None:
    """Keep the clusters and the expert of every pair, and draw some pairs of each.

    Args:
        name: the stage that keeps them.
        fine: the folder of the fine-grained clusters.
        centers: the fields of `CaptionClusters` without the labels.
        at_random: give every expert as many pairs as its clusters have, but any.
    """
    store = open_store(fine, "a cluster_fine stage")
    about = {key: store.about[key] for key in ("encoder", "dataset_fingerprint", "pairs")}
    images = about["pairs"] == READABLE
    rows = context.pairs(DataArguments(**store.about["data"]), images)
    if context.data_fingerprint(rows, images) != about["dataset_fingerprint"]:
        raise ValueError(f"the pairs have changed since {fine} was made; delete it to assign them anew")
    fine_centers, expert_of_center, coarse_centers = centers
    labels = expert_of_center[store["labels"][:]].astype(np.int16)
    if at_random:
        labels = np.random.default_rng(context.seed).permutation(labels)
    if not (labels >= 0).any():
        raise ValueError("no pair belongs to the centers that the metadata retrieve: name more of them")
    clusters = CaptionClusters(labels, fine_centers, expert_of_center, coarse_centers)
    save_clusters(directory, clusters, **about)
    drawn = np.random.default_rng(context.seed).permutation(np.flatnonzero(labels >= 0))[:SAMPLES_DRAWN_FROM]
    drawn = np.sort(drawn)
    titles = np.array([f"expert {label}" for label in labels[drawn]])
    contact_sheet(directory / "clusters.png", rows.select(drawn), titles, context.seed)
    sizes = np.bincount(labels[labels >= 0], minlength=len(clusters.coarse_centers))
    ranges = zip(sizes, center_ranges(fine_centers, expert_of_center, coarse_centers), strict=True)
    sizes = ", ".join(f"{size} pairs (range {r:.2f})" for size, r in ranges)
    print(f"{name}: {sizes}; look at {context.output_dir / name / 'clusters.png'}")


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
