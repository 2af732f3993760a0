"""Clusters of captions for data experts: fine-grained centers, the experts they belong to, and the expert of each pair
(MoDE section 3.2)."""

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from data.identity import OTHER_DATA
from evaluation.feature_store import open_arrays, save_arrays
from training.balanced_kmeans import balanced_kmeans

# Which pairs of the data have labels: those with a readable image, or with a caption
READABLE, CAPTIONED = "readable", "captioned"
CENTERS, LABELS = "centers.safetensors", "labels.safetensors"


@dataclass(frozen=True)
class CaptionClusters:
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


def save_centers(directory: Path, centers: np.ndarray, encoder: str) -> None:
    """Keep fine-grained centers (m, d) and the name of the encoder that they were made with."""
    save_arrays(directory / CENTERS, {"centers": centers}, {"encoder": encoder})


def load_centers(directory: Path) -> tuple[np.ndarray, str]:
    """The centers (m, d) of a cluster_fine or assign stage and the name of their encoder.

    Raises:
        FileNotFoundError: the folder has none.
        ValueError: the file is damaged.
    """
    with open_arrays(directory / CENTERS, "a cluster_fine or assign stage") as file:
        return file.get_tensor("centers"), file.metadata()["encoder"]


def save_caption_clusters(
    directory: Path, clusters: CaptionClusters, expert_of_pair: np.ndarray, metadata: dict[str, str]
) -> None:
    """Keep the clusters and the expert of each pair (pairs,), -1 for none."""
    save_arrays(directory / CENTERS, asdict(clusters), metadata)
    save_arrays(directory / LABELS, {"labels": expert_of_pair}, metadata)


def load_caption_clusters(directory: Path) -> tuple[CaptionClusters, dict[str, str]]:
    """The clusters of a cluster_coarse or select stage, and what they were made of: `encoder`,
    `dataset_fingerprint`, and which of its `pairs` have labels.

    Raises:
        FileNotFoundError: the folder has none.
        ValueError: the file is damaged.
    """
    with open_arrays(directory / CENTERS, "a cluster_coarse or select stage") as file:
        arrays = {name: file.get_tensor(name) for name in ("centers", "expert_of_center", "coarse_centers")}
        return CaptionClusters(**arrays), file.metadata()


def load_expert_of_pair(directory: Path, dataset_fingerprint: str | None = None) -> np.ndarray:
    """(pairs,) the expert of each pair, or -1.

    Args:
        dataset_fingerprint: of the pairs that they are to be used for; None: of none.

    Raises:
        FileNotFoundError: the folder has no labels.
        ValueError: the file is damaged, or the labels are of other pairs.
    """
    with open_arrays(directory / LABELS, "a cluster_coarse or select stage") as file:
        if dataset_fingerprint not in (None, file.metadata()["dataset_fingerprint"]):
            raise ValueError(
                f"the labels in {directory} belong to {OTHER_DATA}: use the same data settings in all stages"
            )
        return file.get_tensor("labels")
