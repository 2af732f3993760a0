"""Clusters of captions for data experts: fine-grained centers, the experts they belong to, and the expert of each pair
(MoDE section 3.2)."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from safetensors.numpy import save_file
from sklearn.cluster import kmeans_plusplus
from tqdm.auto import tqdm

from conversion.files import new_file, read_record
from data.identity import OTHER_DATA
from training.embedding import open_arrays

INDEX, CENTERS, LABELS = "index.json", "centers.safetensors", "labels.safetensors"
# Batches of captions that make a part: what is in memory at a time, and what a run that is killed loses
BATCHES_PER_PART = 128
# Rows whose distances to all centers are held at a time
CHUNK = 8192
# Rows that K-means++ chooses the first centers from, for each center
ROWS_PER_CENTER = 20


@dataclass(frozen=True)
class DataClusters:
    """The clusters of a dataset's captions.

    Args:
        centers: (m, d), the fine-grained cluster centers.
        expert_of_center: (m,), the expert that each belongs to, or -1.
        coarse_centers: (n, d), the mean of the centers of each expert.
    """

    centers: np.ndarray
    expert_of_center: np.ndarray
    coarse_centers: np.ndarray

    @property
    def ranges(self) -> np.ndarray:
        """(n,) the mean distance of an expert's centers to their mean, by which experts are trained first (MoDE section
        5.5)."""
        return center_ranges(self.centers, self.expert_of_center, self.coarse_centers)


def balanced_kmeans(
    features: np.ndarray, num_clusters: int, seed: int, iterations: int = 20, device: str | torch.device = "cpu"
) -> tuple[np.ndarray, np.ndarray]:
    """K-means whose clusters have at most ceil(n / k) of the n samples each.

    Every iteration of Lloyd's algorithm assigns by deferred acceptance (Gale and Shapley 1962): each sample goes to the
    nearest center that takes it, and a center that more samples want than it may take keeps the nearest. The rejected
    ask again, so that this costs more than an assignment without limits the more unequal the clusters would be without;
    distances to all centers are held for some samples at a time.

    Args:
        features: (samples, d).
        device: where distances are computed.

    Returns:
        (k, d) centers and (samples,) labels.

    Raises:
        ValueError: fewer samples than clusters, or features that are not finite.
    """
    if len(features) < num_clusters:
        raise ValueError(
            f"{len(features)} samples cannot make {num_clusters} clusters: ask for fewer, or give more samples"
        )
    if not np.isfinite(features).all():
        raise ValueError("the features are not finite")
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
        for part in waiting.split(CHUNK):
            candidates = squared_distances(points[part], centers)
            distances[part], labels[part] = candidates.masked_fill(candidates >= radii, float("inf")).min(dim=1)
        rejected = []
        for center in (torch.bincount(labels, minlength=len(centers)) > capacity).nonzero()[:, 0].tolist():
            members = (labels == center).nonzero()[:, 0]
            members = members[distances[members].argsort(stable=True)]
            radii[center] = distances[members[capacity - 1]]
            rejected.append(members[capacity:])
        waiting = torch.cat(rejected).sort().values if rejected else waiting[:0]
    return labels


def squared_distances(points: torch.Tensor, centers: torch.Tensor) -> torch.Tensor:
    """(points, centers)"""
    squares = points.square().sum(1, keepdim=True) + centers.square().sum(1)
    return torch.addmm(squares, points, centers.T, alpha=-2).clamp_min(0)


def nearest_centers(features: np.ndarray, centers: torch.Tensor) -> np.ndarray:
    """(rows,) the nearest of the centers (m, d) to each row (rows, d): the fine-grained cluster of a pair (MoDE section
    3.3).

    Raises:
        ValueError: features of another size than the centers', or that are not finite.
    """
    if features.shape[1] != centers.shape[1]:
        raise ValueError(f"the features have size {features.shape[1]}, the centers {centers.shape[1]}")
    labels, squares = [], centers.square().sum(1)
    for start in range(0, len(features), CHUNK):
        chunk = torch.as_tensor(features[start : start + CHUNK]).to(centers.device, torch.float32)
        if not chunk.isfinite().all():
            raise ValueError(f"the features of rows {start} to {start + len(chunk) - 1} are not all finite")
        # The square of the row is the same for all centers
        labels.append(torch.addmm(squares, chunk, centers.T, alpha=-2).argmin(1).to(torch.int32).cpu())
    return torch.cat(labels).numpy()


def group_centers(centers: np.ndarray, num_experts: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The second step: the centers (m, d) grouped into experts by balanced K-means (MoDE eq. 2).

    Experts are numbered by the range of their centers, the largest first: the order in which they are to be trained
    where there is no time for all (MoDE section 5.5).

    Returns:
        (m,) the expert of each center, and (n, d) the mean of each expert's centers.
    """
    coarse_centers, labels = balanced_kmeans(centers, num_experts, seed)
    order = np.argsort(-center_ranges(centers, labels, coarse_centers), kind="stable")
    return np.argsort(order)[labels], coarse_centers[order]


def center_ranges(centers: np.ndarray, labels: np.ndarray, coarse_centers: np.ndarray) -> np.ndarray:
    """(n,) the mean distance between the centers (m, d) of each label and its coarse center (n, d)."""
    return np.array(
        [np.linalg.norm(centers[labels == i] - center, axis=1).mean() for i, center in enumerate(coarse_centers)]
    )


def write_parts(accelerator: Accelerator, directory: Path, name: str, num_rows: int, part_size: int, compute) -> None:
    """Write an array in parts of `part_size` rows, of which every process computes its share; parts that are there are
    kept.

    Args:
        compute: first row, row after the last -> array.
    """
    parts = directory / "parts"
    parts.mkdir(exist_ok=True)
    starts = range(0, num_rows, part_size)[accelerator.process_index :: accelerator.num_processes]
    for start in tqdm(starts, desc=f"{name} of {num_rows} rows", disable=not accelerator.is_local_main_process):
        path = parts / f"{start:012d}.safetensors"
        if not path.exists():
            array = np.ascontiguousarray(compute(start, min(start + part_size, num_rows)))
            with new_file(path) as partial:
                save_file({name: array}, partial)


def read_parts(directory: Path, name: str, stop: int, start: int = 0) -> Iterator[tuple[int, np.ndarray]]:
    """The parts that `write_parts` wrote, each with the number of its first row; one of them is held at a time.

    Args:
        start, stop: rows to read, from the first one of a part to the last one of a part.

    Raises:
        ValueError: a part is damaged or not there.
    """
    row = start
    while row < stop:
        path = directory / "parts" / f"{row:012d}.safetensors"
        if not path.is_file():
            raise ValueError(
                f"{path} is not there: do all processes see this folder? Delete {directory} to have it made anew"
            )
        with open_arrays(path, "this stage") as file:
            array = file.get_tensor(name)
        yield row, array
        row += len(array)
    if row != stop:
        raise ValueError(f"{path} ends with row {row}, not {stop}: delete {directory} to have it made anew")


def sample_rows(parts: Iterable[tuple[int, np.ndarray]], num_rows: int, num_samples: int, seed: int) -> np.ndarray:
    """(num_samples, d) rows of all parts, drawn uniformly; of the parts one is held at a time."""
    chosen = np.sort(np.random.default_rng(seed).choice(num_rows, min(num_samples, num_rows), replace=False))
    rows = []
    for start, part in parts:
        rows.append(part[chosen[(chosen >= start) & (chosen < start + len(part))] - start])
    return np.concatenate(rows)


def save_centers(directory: Path, centers: np.ndarray, encoder: str) -> None:
    """Keep fine-grained centers (m, d) and the name of the encoder that they were made with."""
    save_file({"centers": centers}, directory / CENTERS, {"encoder": encoder})


def load_centers(directory: Path) -> tuple[np.ndarray, str]:
    """The centers (m, d) of a cluster_fine or assign stage and the name of their encoder.

    Raises:
        FileNotFoundError: the folder has none.
        ValueError: the file is damaged.
    """
    with open_arrays(directory / CENTERS, "a cluster_fine or assign stage") as file:
        return file.get_tensor("centers"), file.metadata()["encoder"]


def save_data_clusters(directory: Path, clusters: DataClusters, labels: np.ndarray, metadata: dict[str, str]) -> None:
    """Keep the clusters and the expert of each pair (pairs,), -1 for none."""
    arrays = {name: np.ascontiguousarray(array) for name, array in asdict(clusters).items()}
    save_file(arrays, directory / CENTERS, metadata)
    save_file({"labels": labels}, directory / LABELS, metadata)


def load_data_clusters(directory: Path) -> tuple[DataClusters, dict[str, str]]:
    """The clusters of a cluster_coarse or select stage, and what they were made of: `encoder`, `dataset_fingerprint`.

    Raises:
        FileNotFoundError: the folder has none.
        ValueError: the file is damaged.
    """
    with open_arrays(directory / CENTERS, "a cluster_coarse or select stage") as file:
        arrays = {name: file.get_tensor(name) for name in ("centers", "expert_of_center", "coarse_centers")}
        return DataClusters(**arrays), file.metadata()


def load_data_labels(directory: Path, dataset_fingerprint: str) -> np.ndarray:
    """(pairs,) the expert of each pair, or -1.

    Raises:
        FileNotFoundError: the folder has no labels.
        ValueError: the file is damaged, or the labels are of other pairs.
    """
    with open_arrays(directory / LABELS, "a cluster_coarse or select stage") as file:
        if file.metadata()["dataset_fingerprint"] != dataset_fingerprint:
            raise ValueError(
                f"the labels in {directory} belong to {OTHER_DATA}: use the same data settings in all stages"
            )
        return file.get_tensor("labels")


def save_index(directory: Path, index: dict) -> None:
    (directory / INDEX).write_text(json.dumps(index) + "\n", encoding="utf-8")


def load_index(directory: Path, maker: str) -> dict:
    """What a stage wrote beside its parts.

    Raises:
        FileNotFoundError: it is not the folder of such a stage.
    """
    if not (directory / INDEX).is_file():
        raise FileNotFoundError(f"{directory} is not the folder of {maker}")
    return read_record(directory / INDEX, dict, ("num_rows", "part_size", "encoder", "data", "dataset_fingerprint"))
