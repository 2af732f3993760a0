"""Experts that differ before training: their starts in the place of equal copies of the dense FFN.

- {name: drop, stage: lab.methods.expert_starts:RedrawnStage, model: upcycled, how: drop_upcycling}
- {name: clusters, stage: lab.methods.expert_starts:ClustersStage, model: upcycled, dense: dense, data: {source: names}}
"""

from collections.abc import Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from sklearn.cluster import KMeans
from torch import Tensor
from transformers import PreTrainedModel

from clip_moe.conversion.checkpoints import load_dense, load_sparse
from clip_moe.conversion.model_stage import ModelStage
from clip_moe.conversion.processors import load_processor
from clip_moe.conversion.upcycle import experts_of_ffn, sparse_blocks, sparse_ffns
from clip_moe.data.arguments import NumberedData
from clip_moe.data.pairs import shared_pairs
from clip_moe.engine.settings import STRICT
from clip_moe.engine.stage import Model
from clip_moe.training.loader import PairLoader
from clip_moe.training.samplers import Share
from lab.methods.ffn_inputs import ffn_inputs_of_tokens

# Stacked tensor -> the axis of its hidden units; `down_proj_bias` has none
UNIT_AXIS = {"up_proj": 1, "up_proj_bias": 1, "down_proj": 2}
# Rounds after k-means, in which few tokens change their cluster
MOST_ROUNDS = 100
# Pairs that are computed at a time
CALIBRATION_BATCH = 64


@dataclass(config=STRICT, kw_only=True)
class RedrawnStage(ModelStage):
    """Experts that are partly or wholly random."""

    # An upcycled model, whose experts are equal copies.
    model: Model
    # `drop_upcycling`: half of the hidden units are drawn anew, with the mean and deviation of the weights that they
    # replace (arXiv:2502.19261); `random`: every weight is.
    how: Literal["drop_upcycling", "random"]
    # Which those are: the same in all tensors of an `expert`, as the paper has it, or others in each `tensor`, as its
    # released code does.
    units: Literal["expert", "tensor"] = "expert"

    def run(self, inputs, context, directory):
        model = load_sparse(inputs.model)
        redraw(model, self, context.seed)
        self.save(model, inputs.model, directory)


@torch.no_grad()
def redraw(model: PreTrainedModel, settings: RedrawnStage, seed: int) -> None:
    """Replace the copied experts of an upcycled model in place."""
    generator = torch.Generator().manual_seed(seed)
    # A shared encoder has each block twice
    blocks = {id(block.experts.up_proj): block.experts for block in sparse_blocks(model).values()}
    for experts in blocks.values():
        tensors = {name: getattr(experts, name) for name in (*UNIT_AXIS, "down_proj_bias")}
        if settings.how == "random":
            for tensor in tensors.values():
                tensor.copy_(_drawn_like(tensor, generator))
        else:
            for expert in range(experts.num_experts):
                chosen = _units(experts.up_proj.shape[1], generator)
                for name, axis in UNIT_AXIS.items():
                    if settings.units == "tensor" and name != "up_proj_bias":  # a bias goes with its matrix
                        chosen = _units(experts.up_proj.shape[1], generator)
                    place = (expert, chosen) if axis == 1 else (expert, slice(None), chosen)
                    tensors[name][place] = _drawn_like(tensors[name][place], generator)


def _units(number: int, generator: torch.Generator) -> Tensor:
    """Half of the hidden units, at random. The paper permutes units first; that changes no output."""
    return torch.randperm(number, generator=generator)[: number // 2]


def _drawn_like(values: Tensor, generator: torch.Generator) -> Tensor:
    """From a normal distribution with the mean and the standard deviation of the values."""
    drawn = torch.randn(values.shape, generator=generator).to(values)
    return values.mean() + drawn * values.std(correction=0)


@dataclass(config=STRICT, kw_only=True)
class ClustersStage(ModelStage):
    """Experts for clusters of tokens, whose centers are the routers (Cluster-aware Upcycling, arXiv:2604.13508).

    Each expert is the FFN's best approximation of low rank for one of E spherical clusters of what the FFN reads.
    """

    # An upcycled model, whose experts are equal copies of whole FFNs.
    model: Model
    # The dense model that it was upcycled from, which reads the data.
    dense: Model
    # Calibration pairs: so many that each cluster has more tokens than the FFN is wide.
    data: NumberedData
    # The rank of an expert is the least that keeps this share of the squared outputs of its matrices. The paper's could
    # not be read.
    energy: float = Field(default=0.99, gt=0, le=1)

    def rehearsed(self, num_samples):
        """With all pairs, which are few: fewer have too few tokens for a cluster."""
        return self

    def run(self, inputs, context, directory):
        model, dense = load_sparse(inputs.model), load_dense(inputs.dense, torch.float32)
        towers = sparse_ffns(model.config).values()
        if not model.config.sub_configs or getattr(model.config, "shared_encoder", False):
            raise ValueError(f"{self.name}.model: clusters are for a CLIP with an encoder for each tower")
        if any(experts_of_ffn(tower) > 1 or tower.num_shared_experts for tower in towers):
            raise ValueError(
                f"{self.name}.model: clusters make whole FFNs: leave out moe_intermediate_size and shared experts"
            )
        layers = {tower: getattr(model.config, f"{tower}_config").moe_layers for tower in ("text", "vision")}
        rows, processor = shared_pairs(context, inputs.data), load_processor(inputs.dense)
        batches = PairLoader(rows, processor, self.data, Share(min(CALIBRATION_BATCH, len(rows)))).in_order()
        ffn_inputs = ffn_inputs_of_tokens(dense.to(context.accelerator.device), batches, layers)
        experts_of_clusters(model, ffn_inputs, self.energy, context.seed)
        self.save(model, inputs.model, directory)


@torch.no_grad()
def experts_of_clusters(
    model: PreTrainedModel, ffn_inputs: Mapping[tuple[str, int], Tensor], energy: float, seed: int
) -> None:
    """Replace the copied experts and the routers of an upcycled model in place.

    Args:
        ffn_inputs: tower and sparse layer -> inputs (T, D) of the dense FFN on calibration data.

    Raises:
        ValueError: a cluster has fewer tokens than a matrix has inputs.
    """
    for (tower, layer), inputs in ffn_inputs.items():
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
            experts.up_proj[expert] = low_rank(up, inputs[in_cluster], energy)
            experts.down_proj[expert] = low_rank(down, hidden[in_cluster], energy)


def spherical_clusters(points: Tensor, number: int, seed: int, where: str) -> tuple[Tensor, Tensor]:
    """Clusters by cosine similarity: (T,) labels and (number, D) normalized centers."""
    points = F.normalize(points, dim=-1)
    if len(points) < number:
        raise ValueError(f"{where}: {len(points)} tokens of calibration data cannot make {number} clusters")
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
