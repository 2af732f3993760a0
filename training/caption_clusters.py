"""The embeddings of captions, their clusters, and the data experts that these make (MoDE), as stages keep them."""

from pathlib import Path

import datasets
import numpy as np

from data.arguments import DataArguments
from data.contact_sheet import contact_sheet
from evaluation.feature_store import FeatureStore
from evaluation.sentence_encoders import SentenceEncoder
from training.clusters import CaptionClusters, save_clusters
from training.context import Context
from training.features import CAPTION_BATCHES_PER_SHARD, CAPTIONED, READABLE
from training.settings import dump

# The folder of the encoder of captions, in that of an embed_captions stage
ENCODER = "encoder"
# Pairs that the samples in pictures are drawn from
SAMPLES_DRAWN_FROM = 20_000


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
    about = {
        "encoder": encoder.name,
        "data": dump(data),
        "pairs": READABLE if images else CAPTIONED,
        "dataset_fingerprint": context.data_fingerprint(rows, images),
    }
    return FeatureStore(directory, len(rows), batch_size * CAPTION_BATCHES_PER_SHARD, about)


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
    labels = centers[1][store["labels"][:]].astype(np.int16)
    if at_random:
        labels = np.random.default_rng(context.seed).permutation(labels)
    if not (labels >= 0).any():
        raise ValueError("no pair belongs to the centers that the metadata retrieve: name more of them")
    clusters = CaptionClusters(labels, *centers)
    save_clusters(directory, clusters, **about)
    drawn = np.random.default_rng(context.seed).permutation(np.flatnonzero(labels >= 0))[:SAMPLES_DRAWN_FROM]
    drawn = np.sort(drawn)
    titles = np.array([f"expert {label}" for label in labels[drawn]])
    contact_sheet(directory / "clusters.png", rows.select(drawn), titles, context.seed)
    sizes = np.bincount(labels[labels >= 0], minlength=len(clusters.coarse_centers))
    ranges = ", ".join(f"{size} pairs (range {r:.2f})" for size, r in zip(sizes, clusters.ranges, strict=True))
    print(f"{name}: {ranges}; look at {context.output_dir / name / 'clusters.png'}")
