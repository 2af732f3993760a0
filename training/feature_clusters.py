"""Clusters of the features of images and captions, by which the experts of CLIP-MoE and CLIP-FMoE are told apart."""

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from threadpoolctl import threadpool_limits

from data.identity import OTHER_DATA
from training.arrays import open_arrays, save_arrays

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


def kmeans(features: np.ndarray, num_clusters: int, seed: int, what: str = "features", n_init: int = 10) -> np.ndarray:
    """K-means (scikit-learn's) on one thread, which makes it repeatable to the bit.

    Args:
        features: (samples, D).
        what: they are, for error messages.
        n_init: starts, of which the best counts.

    Returns:
        (samples,) labels from 0 to `num_clusters` - 1. None is empty.

    Raises:
        ValueError: fewer samples than clusters, features that are not finite, or fewer different ones than clusters.
    """
    if len(features) < num_clusters:
        raise ValueError(f"{len(features)} samples cannot make {num_clusters} clusters of {what}")
    if not np.isfinite(features).all():
        raise ValueError(f"the {what} are not finite")
    with warnings.catch_warnings(), threadpool_limits(1):
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer different features than clusters: see below
        labels = KMeans(num_clusters, n_init=n_init, random_state=seed).fit_predict(features)
    found = len(np.unique(labels))
    if found < num_clusters:
        raise ValueError(
            f"only {found} of {num_clusters} clusters of {what} have samples: too few of the {len(features)} {what} "
            "differ. Ask for fewer clusters, or look at the model they come from"
        )
    return labels


def split(
    features: Mapping[str, np.ndarray],
    num_clusters: Mapping[str, int],
    seed: int,
    groups: np.ndarray | None = None,
    n_init: int = 10,
    stage: int = 0,
) -> dict[str, np.ndarray]:
    """Labels of each modality by itself; a sample's label is the combination of all (CLIP-MoE section 5.3).

    Args:
        features: modality -> (samples, D), normalized.
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
                    features[name][members], number, seed, f"{name} features{of_group}", n_init
                )
    return labels


def accumulate(labels: np.ndarray, features: np.ndarray, previous: FeatureClusters | None = None) -> FeatureClusters:
    """The clusters of samples that agree in this stage's label and in those of all stages before (CLIP-MoE section 3).

    Args:
        labels: (samples,), of this stage.
        features: (samples, D), of which the centers are means.
        previous: of the stages before.

    Raises:
        ValueError: `previous` is of another number of samples.
    """
    columns = labels[:, None]
    if previous is not None:
        if len(previous.labels) != len(labels):
            raise ValueError(f"{len(labels)} samples, but the previous clusters have {len(previous.labels)}")
        columns = np.concatenate([previous.tuples[previous.labels], columns], axis=1)
    tuples, accumulated = np.unique(columns, axis=0, return_inverse=True)
    accumulated = accumulated.reshape(-1)
    centers = np.stack([features[accumulated == cluster].mean(axis=0) for cluster in range(len(tuples))])
    return FeatureClusters(accumulated, tuples, centers)


def save_feature_clusters(directory: Path, clusters: FeatureClusters, dataset_fingerprint: str) -> None:
    """Keep clusters and what samples they are of, see `load_feature_clusters`."""
    save_arrays(directory / FEATURE_CLUSTERS, asdict(clusters), {"dataset_fingerprint": dataset_fingerprint})


def load_feature_clusters(directory: Path, dataset_fingerprint: str) -> FeatureClusters:
    """The clusters of a cluster stage.

    Args:
        dataset_fingerprint: `data.identity.data_fingerprint` of the samples they are to be used for.

    Raises:
        FileNotFoundError: the folder has no clusters.
        ValueError: the file is damaged, or the labels are of other samples or of the same in another order.
    """
    with open_arrays(directory / FEATURE_CLUSTERS, "a cluster stage") as file:
        found = file.metadata()["dataset_fingerprint"]
        arrays = {name: file.get_tensor(name) for name in ("labels", "tuples", "centers")}
    if found != dataset_fingerprint:
        raise ValueError(
            f"the labels in {directory} belong to {OTHER_DATA} (fingerprint "
            f"{found[:12]}, not {dataset_fingerprint[:12]}): use the same data settings in all stages, or embed and "
            "cluster these data"
        )
    return FeatureClusters(**arrays)
