"""Ways to start experts other than as equal copies of the dense FFN, so that they differ before training."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from sklearn.cluster import KMeans
from torch import Tensor, nn

from clip_moe.conversion.presets import ExpertInit
from modeling_clip_moe.experts import CLIPMoEExperts

# Stacked tensor -> the axis of its hidden units; `down_proj_bias` has none
UNIT_AXIS = {"up_proj": 1, "up_proj_bias": 1, "down_proj": 2}

# Rounds after k-means, in which few tokens change their cluster
MOST_ROUNDS = 100


@torch.no_grad()
def init_experts(model: nn.Module, init: ExpertInit, seed: int) -> None:
    """Replace the copied experts of an upcycled model in place."""
    generator = torch.Generator().manual_seed(seed)
    modules = [module for module in model.modules() if isinstance(module, CLIPMoEExperts)]
    # A shared encoder has each twice
    modules = list({id(experts.up_proj): experts for experts in modules}.values())
    for experts in modules if init.kind != "copies" else ():
        tensors = {name: getattr(experts, name) for name in (*UNIT_AXIS, "down_proj_bias")}
        if init.kind == "noise":
            for tensor in tensors.values():
                tensor.add_(tensor.std() * init.noise * torch.randn(tensor.shape, generator=generator).to(tensor))
        elif init.kind == "random":
            for tensor in tensors.values():
                tensor.copy_(_drawn_like(tensor, generator))
        else:
            for expert in range(experts.num_experts):
                chosen = _units(experts.up_proj.shape[1], init.ratio, generator)
                for name, axis in UNIT_AXIS.items():
                    if init.units == "tensor" and name != "up_proj_bias":  # a bias goes with its matrix
                        chosen = _units(experts.up_proj.shape[1], init.ratio, generator)
                    place = (expert, chosen) if axis == 1 else (expert, slice(None), chosen)
                    tensors[name][place] = _drawn_like(tensors[name][place], generator)


def _units(number: int, ratio: float, generator: torch.Generator) -> Tensor:
    """Random hidden units, a share `ratio` of all. The paper permutes units first; that changes no output."""
    return torch.randperm(number, generator=generator)[: round(ratio * number)]


def _drawn_like(values: Tensor, generator: torch.Generator) -> Tensor:
    """From a normal distribution with the mean and the standard deviation of the values."""
    drawn = torch.randn(values.shape, generator=generator).to(values)
    return values.mean() + drawn * values.std(correction=0)


@torch.no_grad()
def init_by_clusters(model: nn.Module, init: ExpertInit, read: Mapping[tuple[str, int], Tensor], seed: int) -> None:
    """Replace the copied experts and the routers of an upcycled model in place (Cluster-aware Upcycling,
    arXiv:2604.13508).

    Args:
        read: tower and sparse layer -> (T, D), what the dense FFN reads of calibration data.

    Raises:
        ValueError: a cluster has fewer tokens than a matrix has inputs.
    """
    for (tower, layer), inputs in read.items():
        block = getattr(model, f"{tower}_model").encoder.layers[layer].mlp
        experts, where = block.experts, f"layer {layer} of the {tower} tower"
        labels, centers = spherical_clusters(inputs.float(), block.num_experts, seed, where)
        block.router.weight.copy_(centers)
        up, bias, down = (t[0].float() for t in (experts.up_proj, experts.up_proj_bias, experts.down_proj))
        hidden = experts.act_fn(F.linear(inputs.float(), up, bias))
        for expert in range(block.num_experts):
            in_cluster = labels == expert
            most = max(up.shape[1], down.shape[1])
            if (tokens := int(in_cluster.sum())) < most:
                raise ValueError(
                    f"{where}: cluster {expert} of the calibration data has {tokens} tokens, fewer than the {most} "
                    "inputs of a matrix: take more pairs or fewer experts"
                )
            experts.up_proj[expert] = low_rank(up, inputs[in_cluster], init.energy)
            experts.down_proj[expert] = low_rank(down, hidden[in_cluster], init.energy)


def spherical_clusters(points: Tensor, number: int, seed: int, what: str) -> tuple[Tensor, Tensor]:
    """Clusters by cosine similarity: (T,) labels and (number, D) normalized centers."""
    points = F.normalize(points, dim=-1)
    if len(points) < number:
        raise ValueError(f"{what}: {len(points)} tokens of calibration data cannot make {number} clusters")
    centers = torch.from_numpy(KMeans(number, n_init=1, random_state=seed).fit(points.numpy()).cluster_centers_)
    labels = torch.full((len(points),), -1)
    for _ in range(MOST_ROUNDS):
        before, labels = labels, (points @ F.normalize(centers, dim=-1).T).argmax(dim=-1)
        if torch.equal(labels, before):
            break
        sums = torch.zeros_like(centers).index_add(0, labels, points)
        centers = torch.where(sums.any(dim=-1, keepdim=True), sums, centers)
    return labels, F.normalize(centers, dim=-1)


def low_rank(weight: Tensor, inputs: Tensor, energy: float) -> Tensor:
    """The matrix of the least rank that keeps a share `energy` of the squared norm of `inputs @ weight.T`; of that
    rank, the one that keeps most.

    With S S^T = X^T X (Cholesky) and W S = U diag(s) V^T, it is U_r diag(s_r) V_r^T S^-1.

    Args:
        weight: W (out, in). inputs: X (T, in).
    """
    inputs = inputs.double()
    gram = inputs.T @ inputs
    # Channels that are always 0 leave it without a root
    root = torch.linalg.cholesky(gram + 1e-9 * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype))
    u, s, v = torch.linalg.svd(weight.double() @ root, full_matrices=False)
    kept = s.square().cumsum(0) / s.square().sum()
    rank = min(int((kept < energy).sum()) + 1, len(s))
    truncated = (u[:, :rank] * s[:rank]) @ v[:rank]
    return torch.linalg.solve_triangular(root, truncated, upper=False, left=False).to(weight)
