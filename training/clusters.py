"""Clusters of a dataset, by which experts are told apart: K-means of the features of images and captions (CLIP-MoE,
CLIP-FMoE), or fine-grained centers that are grouped (MoDE)."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from scipy.sparse import csr_array
from sklearn.cluster import KMeans, kmeans_plusplus
from sklearn.exceptions import ConvergenceWarning
from threadpoolctl import threadpool_limits

from clip_moe.evaluation.feature_store import Rows, open_arrays, save_arrays

# More features than these are many: K-means learns its centers from a sample, in one start of a few iterations
MANY, STARTS, FEW_ITERATIONS = 100_000, 10, 25
# Features of that sample: SAMPLES_PER_CLUSTER for each cluster, and at least FEWEST_SAMPLES
SAMPLES_PER_CLUSTER, FEWEST_SAMPLES = 256, 65_536
# Features that are read together, and those whose distances to all centers are held
CHUNK, DISTANCES_CHUNK = 4096, 8192
# Rows that balanced K-means chooses its first centers from, for each center
ROWS_PER_CENTER = 20
# The files of clusters, and of the fine-grained centers that they are made of
CLUSTERS, CENTERS = "clusters.safetensors", "centers.safetensors"
# Which pairs of the data have labels: those with a readable image, or with a caption
READABLE, CAPTIONED = "readable", "captioned"


def kmeans(
    features: np.ndarray | Rows,
    num_clusters: int,
    seed: int,
    kind: str = "features",
    rows: np.ndarray | None = None,
    num_samples: int | None = None,
) -> np.ndarray:
    """scikit-learn's K-means on one thread, repeatable to the bit.

    Up to `MANY` features the best of ten starts counts. Of more, a sample gives the centers, and each feature goes to
    the nearest one, a chunk at a time, so that features may be on disk.

    Args:
        features: (samples, D).
        kind: a name for the features, for error messages.
        rows: numbers of the features to cluster, ascending; None: all.
        num_samples: features of the sample; None: 256 for each cluster, and at least 65,536.

    Returns:
        (rows,) labels from 0 to `num_clusters` - 1. None is empty.
    """
    rows = np.arange(len(features)) if rows is None else rows
    with warnings.catch_warnings(), threadpool_limits(1):
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer different features than clusters: said below
        if len(rows) <= MANY:
            labels = KMeans(num_clusters, n_init=STARTS, random_state=seed).fit_predict(features[rows])
        else:
            size = min(num_samples or max(FEWEST_SAMPLES, SAMPLES_PER_CLUSTER * num_clusters), len(rows))
            sample = rows[np.sort(np.random.default_rng(seed).choice(len(rows), size, replace=False))]
            search = KMeans(num_clusters, n_init=1, max_iter=FEW_ITERATIONS, random_state=seed).fit(features[sample])
            centers, chunks = torch.as_tensor(search.cluster_centers_).float(), range(0, len(rows), CHUNK)
            labels = [nearest_centers(features[rows[start : start + CHUNK]], centers) for start in chunks]
            labels = np.concatenate(labels).astype(int)
    if (found := len(np.unique(labels))) < num_clusters:
        raise ValueError(
            f"only {found} of {num_clusters} clusters of {kind} have samples: too many of the {len(rows)} {kind} "
            "are equal. Ask for fewer clusters, or check the model they come from"
        )
    return labels


def balanced_kmeans(
    features: np.ndarray, num_clusters: int, seed: int, device: str | torch.device = "cpu", iterations: int = 20
) -> tuple[np.ndarray, np.ndarray]:
    """K-means whose clusters have at most ceil(n / k) of the n samples each.

    Every iteration of Lloyd's algorithm assigns by deferred acceptance (Gale and Shapley 1962): each sample goes to the
    nearest center that takes it, and a center that more samples want than it may take keeps the nearest.

    Args:
        features: (samples, d).
        device: where distances are computed.

    Returns:
        (k, d) centers and (samples,) labels.
    """
    sample = np.random.default_rng(seed).permutation(len(features))[: ROWS_PER_CENTER * num_clusters]
    first = kmeans_plusplus(features[np.sort(sample)].astype(np.float32), num_clusters, random_state=seed)[0]
    points, centers = torch.as_tensor(features, dtype=torch.float32, device=device), torch.as_tensor(first).to(device)
    capacity, labels = -(-len(features) // num_clusters), None
    for _ in range(iterations):
        previous, labels = labels, assign_balanced(points, centers, capacity)
        if previous is not None and torch.equal(previous, labels):
            break
        sizes = torch.bincount(labels, minlength=num_clusters)
        means = torch.zeros_like(centers).index_add_(0, labels, points) / sizes.clamp_min(1)[:, None]
        centers = torch.where(sizes[:, None] > 0, means, centers)
    return centers.cpu().numpy(), labels.cpu().numpy()


def assign_balanced(points: torch.Tensor, centers: torch.Tensor, capacity: int) -> torch.Tensor:
    """(samples,) the center of each, none with more than `capacity` samples."""
    labels = torch.full((len(points),), -1, device=points.device)
    distances = torch.zeros(len(points), device=points.device)
    # A center that is full takes what is nearer than the farthest that it has
    radii = torch.full((len(centers),), float("inf"), device=points.device)
    waiting = torch.arange(len(points), device=points.device)
    while len(waiting):
        for part in waiting.split(DISTANCES_CHUNK):
            squares = points[part].square().sum(1, keepdim=True) + centers.square().sum(1)
            candidates = torch.addmm(squares, points[part], centers.T, alpha=-2).clamp_min(0)
            distances[part], labels[part] = candidates.masked_fill(candidates >= radii, float("inf")).min(dim=1)
        rejected = []
        for center in (torch.bincount(labels, minlength=len(centers)) > capacity).nonzero()[:, 0].tolist():
            members = (labels == center).nonzero()[:, 0]
            members = members[distances[members].argsort(stable=True)]
            radii[center] = distances[members[capacity - 1]]
            rejected.append(members[capacity:])
        waiting = torch.cat(rejected).sort().values if rejected else waiting[:0]
    return labels


def nearest_centers(features: np.ndarray, centers: torch.Tensor) -> np.ndarray:
    """(rows,) the nearest of the centers (m, d) to each row (rows, d): the fine-grained cluster of a pair (MoDE section
    3.3)."""
    labels, squares = [], centers.square().sum(1)
    for start in range(0, len(features), DISTANCES_CHUNK):
        chunk = torch.as_tensor(features[start : start + DISTANCES_CHUNK]).to(centers.device, torch.float32)
        # The square of the row is the same for all centers
        labels.append(torch.addmm(squares, chunk, centers.T, alpha=-2).argmin(1).to(torch.int32).cpu())
    return torch.cat(labels).numpy()


@dataclass(frozen=True)
class Clusters:
    """The clusters of a dataset's pairs.

    Args:
        labels: (samples,), the cluster of each pair, or -1.
        centers: (C, D), the mean features of each cluster, or the mean of its fine-grained centers.
        tuples: (C, stages), the labels that make up each cluster, one label for each stage so far; sorted.
        fine_centers: (m, D), the fine-grained centers; None: there are none.
        cluster_of_center: (m,), the cluster of each, or -1.
    """

    labels: np.ndarray
    centers: np.ndarray
    tuples: np.ndarray
    fine_centers: np.ndarray | None = None
    cluster_of_center: np.ndarray | None = None


def split(
    features: Mapping[str, np.ndarray | Rows],
    num_clusters: Mapping[str, int],
    seed: int,
    groups: np.ndarray | None = None,
    num_samples: int | None = None,
    stage: int = 0,
) -> dict[str, np.ndarray]:
    """Labels of each modality by itself; a sample's label is the combination of all (CLIP-MoE section 5.3).

    Args:
        features: modality -> (samples, D), normalized; they may be on disk.
        num_clusters: modality -> number of K-means clusters, 1 for none; "random" cuts a permutation into that many
            equal parts instead (CLIP-FMoE appendix D).
        groups: (samples,), to cluster the samples of each group by themselves (CLIP-FMoE section 4.2, level 2).
        num_samples: see `kmeans`.
        stage: how many stages were before, whose labels these are combined with: each draws other random parts.

    Returns:
        modality -> (samples,) labels, of those with more than one cluster.
    """
    num_rows = len(next(iter(features.values())))
    groups = np.zeros(num_rows, int) if groups is None else groups
    labels = {name: np.zeros(num_rows, int) for name, number in num_clusters.items() if number > 1}
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        place = f" of cluster {group}" if groups.any() else ""
        for name in labels:
            number = num_clusters[name]
            if name == "random":
                shuffled = np.random.default_rng([seed, group, stage]).permutation(members)
                labels[name][shuffled] = np.arange(len(members)) % number
            else:
                kind = f"{name} features{place}"
                labels[name][members] = kmeans(features[name], number, seed, kind, members, num_samples)
    return labels


def accumulate(labels: np.ndarray, features: Sequence[np.ndarray | Rows], previous: Clusters | None = None) -> Clusters:
    """The clusters of samples that agree in this stage's label and in those of all stages before (CLIP-MoE section 3).

    Args:
        labels: (samples,), of this stage.
        features: each (samples, D); the centers are their means, one beside the other.
        previous: the clusters that the stages before found of the same samples.
    """
    before, tuples = (0, np.zeros((1, 0), int)) if previous is None else (previous.labels, previous.tuples)
    number = labels.max() + 1
    combinations, accumulated = np.unique(before * number + labels, return_inverse=True)
    tuples = np.concatenate([tuples[combinations // number], combinations[:, None] % number], axis=1)
    centers = np.concatenate(
        [_means(modality_features, accumulated, len(tuples)) for modality_features in features], axis=1
    )
    return Clusters(accumulated, centers, tuples)


def combine(columns: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Labels (samples,) of the combinations of labels (samples,) that occur, and their names: `image 2, text 0`."""
    combinations, labels = np.unique(np.stack(list(columns.values()), axis=1), axis=0, return_inverse=True)
    names = [
        ", ".join(f"{name} {label}" for name, label in zip(columns, combination, strict=True))
        for combination in combinations
    ]
    return labels.ravel(), np.array(names)


def _means(features: np.ndarray | Rows, labels: np.ndarray, number: int) -> np.ndarray:
    """(number, D) means of the features (samples, D) of each label; one chunk is in memory at a time."""
    sums = np.zeros((number, features.shape[1]))
    for start in range(0, len(features), CHUNK):
        chunk = features[start : start + CHUNK]
        columns = np.arange(len(chunk)), labels[start : start + CHUNK]
        members = csr_array((np.ones(len(chunk), chunk.dtype), columns[::-1]), shape=(number, len(chunk)))
        sums += members @ chunk
    return (sums / np.bincount(labels)[:, None]).astype(features.dtype)


def group_centers(fine_centers: np.ndarray, num_clusters: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The fine-grained centers (m, d) grouped by balanced K-means (MoDE eq. 2). Clusters are numbered by the range of
    their centers, the largest first: the order of training where there is no time for all (MoDE section 5.5).

    Returns:
        (m,) the cluster of each center, and (n, d) the mean of each cluster's centers.
    """
    centers, labels = balanced_kmeans(fine_centers, num_clusters, seed)
    order = np.argsort(-center_ranges(fine_centers, labels, centers), kind="stable")
    return np.argsort(order)[labels], centers[order]


def select_centers(fine_centers: np.ndarray, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One cluster of the fine-grained centers (m, d) that are nearest to queries (n, d) (MoDE section 5.5), as
    `group_centers` returns it: the other centers belong to cluster -1."""
    nearest = np.unique(nearest_centers(queries, torch.as_tensor(fine_centers)))
    cluster_of_center = np.where(np.isin(np.arange(len(fine_centers)), nearest), 0, -1)
    return cluster_of_center, fine_centers[nearest].mean(axis=0, keepdims=True)


def center_ranges(fine_centers: np.ndarray, labels: np.ndarray, centers: np.ndarray) -> np.ndarray:
    """(n,) the mean distance between the fine-grained centers (m, d) of each label and its center (n, d)."""
    return np.array(
        [np.linalg.norm(fine_centers[labels == i] - center, axis=1).mean() for i, center in enumerate(centers)]
    )


def save_clusters(directory: Path, clusters: Clusters, **about: str) -> None:
    """Keep clusters, with the `dataset_fingerprint` of their `pairs`, and more about them."""
    arrays = {name: array for name, array in vars(clusters).items() if array is not None}
    save_arrays(directory / CLUSTERS, arrays, about)


def load_clusters(directory: Path, dataset_fingerprint: str | None = None) -> tuple[Clusters, dict[str, str]]:
    """The clusters of a stage, and what was kept about them.

    Args:
        dataset_fingerprint: `clip_moe.data.identity.data_fingerprint` of the samples to use them for; None: none.
    """
    with open_arrays(directory / CLUSTERS, "a cluster stage") as file:
        about, arrays = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    fingerprint = about["dataset_fingerprint"]
    if dataset_fingerprint not in (None, fingerprint):
        raise ValueError(
            f"the labels in {directory} belong to another dataset, another order or other images of the same names "
            f"(fingerprint {fingerprint[:12]}, not {dataset_fingerprint[:12]}): use the same data settings in all "
            "stages, or embed and cluster these data"
        )
    return Clusters(**arrays), about


def load_centers(directory: Path, encoder: str) -> np.ndarray:
    """The fine-grained centers (m, d) of a cluster stage, to compare with features of this encoder."""
    with open_arrays(directory / CENTERS, "a cluster stage with num_centers") as file:
        if encoder != (made_by := file.metadata()["encoder"]):
            raise ValueError(f"the centers in {directory} were made with {made_by}, not with {encoder}")
        return file.get_tensor("centers")
