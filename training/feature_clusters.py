"""Clusters of the features of images and captions, by which the experts of CLIP-MoE and CLIP-FMoE are told apart."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from scipy.sparse import csr_array

from data.identity import OTHER_DATA
from evaluation.feature_store import open_arrays, save_arrays
from training.kmeans import CHUNK, TEN_STARTS, Method, kmeans

FEATURE_CLUSTERS = "clusters.safetensors"


@dataclass(frozen=True)
class FeatureClusters:
    """The accumulated clusters of a dataset: every sample has a tuple of labels, one label a stage so far.

    Args:
        labels: (samples,), the cluster of each sample, a row of `tuples`.
        tuples: (C, stages), the labels that make up each cluster; sorted.
        centers: (C, D), the mean features of each.
    """

    labels: np.ndarray
    tuples: np.ndarray
    centers: np.ndarray


def split(
    features: Mapping[str, np.ndarray],
    num_clusters: Mapping[str, int],
    seed: int,
    groups: np.ndarray | None = None,
    method: Method = TEN_STARTS,
    stage: int = 0,
) -> dict[str, np.ndarray]:
    """Labels of each modality by itself; a sample's label is the combination of all (CLIP-MoE section 5.3).

    Args:
        features: modality -> (samples, D), normalized; they may be mapped from a file.
        num_clusters: modality -> number of K-means clusters, 1 for none; "random" cuts a permutation into that many
            equal parts instead (CLIP-FMoE appendix D).
        groups: (samples,), to cluster the samples of each group by themselves (CLIP-FMoE section 4.2, level 2).
        stage: how many stages were before, whose labels these are combined with: each draws other random parts.

    Returns:
        modality -> (samples,) labels, of those with more than one cluster.

    Raises:
        ValueError: see `kmeans`; names the group.
    """
    num_samples = len(next(iter(features.values())))
    groups = np.zeros(num_samples, int) if groups is None else groups
    labels = {name: np.zeros(num_samples, int) for name, number in num_clusters.items() if number > 1}
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        of_group = f" of cluster {group}" if groups.any() else ""
        for name in labels:
            number = num_clusters[name]
            if name == "random":
                if len(members) < number:
                    raise ValueError(f"{len(members)} samples{of_group} cannot make {number} random clusters")
                labels[name][np.random.default_rng([seed, group, stage]).permutation(members)] = (
                    np.arange(len(members)) % number
                )
            else:
                labels[name][members] = kmeans(
                    features[name], number, seed, f"{name} features{of_group}", method, members
                )
    return labels


def accumulate(
    labels: np.ndarray, features: Sequence[np.ndarray], previous: FeatureClusters | None = None
) -> FeatureClusters:
    """The clusters of samples that agree in this stage's label and in those of all stages before (CLIP-MoE section 3).

    Args:
        labels: (samples,), of this stage.
        features: each (samples, D), of which the centers are means, one beside the other.
        previous: of the stages before.

    Raises:
        ValueError: `previous` is of another number of samples.
    """
    if previous is None:
        found, accumulated = np.unique(labels, return_inverse=True)
        tuples = found[:, None]
    else:
        if len(previous.labels) != len(labels):
            raise ValueError(f"{len(labels)} samples, but the previous clusters have {len(previous.labels)}")
        number = labels.max() + 1
        found, accumulated = np.unique(previous.labels * number + labels, return_inverse=True)
        tuples = np.concatenate([previous.tuples[found // number], found[:, None] % number], axis=1)
    centers = np.concatenate([_means(of_one, accumulated, len(tuples)) for of_one in features], axis=1)
    return FeatureClusters(accumulated, tuples, centers)


def combine(columns: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Labels (samples,) of the combinations of labels (samples,) that occur, and by their numbers what to call them:
    `image 2, text 0`."""
    shape = [labels.max() + 1 for labels in columns.values()]
    found, combined = np.unique(np.ravel_multi_index(tuple(columns.values()), shape), return_inverse=True)
    by_number = zip(*np.unravel_index(found, shape), strict=True)
    names = [", ".join(f"{name} {label}" for name, label in zip(columns, labels, strict=True)) for labels in by_number]
    return combined, np.array(names)


def _means(features: np.ndarray, labels: np.ndarray, number: int) -> np.ndarray:
    """(number, D) of the features (samples, D) of each label, of which a chunk is in memory at a time."""
    sums = np.zeros((number, features.shape[1]))
    for start in range(0, len(features), CHUNK):
        chunk = features[start : start + CHUNK]
        columns = np.arange(len(chunk)), labels[start : start + CHUNK]
        members = csr_array((np.ones(len(chunk), chunk.dtype), columns[::-1]), shape=(number, len(chunk)))
        sums += members @ chunk
    return (sums / np.bincount(labels)[:, None]).astype(features.dtype)


def save_feature_clusters(
    directory: Path, clusters: FeatureClusters, dataset_fingerprint: str, method: str = ""
) -> None:
    """Keep clusters, what samples they are of, see `load_feature_clusters`, and how they were computed."""
    metadata = {"dataset_fingerprint": dataset_fingerprint, "method": method}
    save_arrays(directory / FEATURE_CLUSTERS, asdict(clusters), metadata)


def load_feature_clusters(directory: Path, dataset_fingerprint: str | None = None) -> FeatureClusters:
    """The clusters of a cluster stage.

    Args:
        dataset_fingerprint: `data.identity.data_fingerprint` of the samples they are to be used for; None: of none.

    Raises:
        FileNotFoundError: the folder has no clusters.
        ValueError: the file is damaged, or the labels are of other samples or of the same in another order.
    """
    with open_arrays(directory / FEATURE_CLUSTERS, "a cluster stage") as file:
        found = file.metadata()["dataset_fingerprint"]
        arrays = {name: file.get_tensor(name) for name in ("labels", "tuples", "centers")}
    if dataset_fingerprint not in (None, found):
        raise ValueError(
            f"the labels in {directory} belong to {OTHER_DATA} (fingerprint "
            f"{found[:12]}, not {dataset_fingerprint[:12]}): use the same data settings in all stages, or embed and "
            "cluster these data"
        )
    return FeatureClusters(**arrays)
