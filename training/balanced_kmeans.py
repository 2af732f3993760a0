"""Balanced K-means, and the centers that are nearest to rows."""

import numpy as np
import torch
from sklearn.cluster import kmeans_plusplus

# Rows whose distances to all centers are held at a time
CHUNK = 8192
# Rows that K-means++ chooses the first centers from, for each center
ROWS_PER_CENTER = 20


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
