"""Rows of a router are drawn to the tokens of their experts, and away from those of others (ProMoE, arXiv:2510.24711).

- {name: upcycled, stage: upcycle, model: dense, preset: clip_up, changes: {router_aux_loss_coef: 0}}
- {name: guided, stage: lab.methods.routing_contrastive:RoutingContrastStage, model: upcycled, clusters: clusters}
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from clip_moe.conversion.processors import load_processor
from clip_moe.conversion.upcycle import sparse_blocks
from clip_moe.data.columns import Rows
from clip_moe.data.pairs import shared_fingerprint
from clip_moe.data.texts import present_captions
from clip_moe.engine.settings import STRICT, Reads
from clip_moe.training.clusters import READABLE, load_clusters
from clip_moe.training.duplicates import text_keys, token_keys
from clip_moe.training.losses import Reduce
from clip_moe.training.stages.train import TrainStage
from clip_moe.training.task import AuxiliaryLoss, Batch, mean_over_parts
from lab.methods import TOWERS, logits_and_mask
from modeling_clip_moe.families import sparse_towers

# From a batch to the cluster of each of its pairs, (B,)
ClustersOf = Callable[[Batch], torch.Tensor]


@dataclass(config=STRICT, kw_only=True)
class RoutingContrastStage(TrainStage):
    """A `train` stage with ProMoE's loss of the routers in place of the balance loss."""

    # The weight of the loss, and its temperature. The authors' configurations have 1 and 0.07.
    contrast_coef: float = Field(default=1.0, gt=0)
    temperature: float = Field(default=0.07, gt=0)
    # A cluster stage of the pairs, best with a cluster for each expert, that guides the routers; None: no guidance.
    clusters: Annotated[str, Reads("cluster")] | None = None

    @model_validator(mode="after")
    def _check_clusters(self):
        if self.clusters is not None and (self.data.streaming or self.caption_weights is not None):
            raise ValueError("clusters go with numbered pairs of one caption: drop data.streaming and caption_weights")
        return self

    def choose_pairs(self, rows, inputs, context):
        if self.clusters is not None:
            folder = Path(inputs.clusters)
            has_images = load_clusters(folder)[1]["pairs"] == READABLE
            clusters, _ = load_clusters(folder, shared_fingerprint(context, rows, has_images))
            # For `auxiliary_losses`, which is asked later
            inputs.clusters_of = clusters_of_captions(rows, clusters.labels, load_processor(inputs.model).tokenizer)
        return rows

    def auxiliary_losses(self, model, inputs):
        if not sparse_towers(model.config) or getattr(model.config, "shared_encoder", False):
            raise ValueError(f"{self.name}: the loss goes with sparse towers of their own, which {self.model} lacks")
        if model.config.router_aux_loss_coef:
            raise ValueError(f"{self.name}: it replaces the balance loss: set router_aux_loss_coef of the model to 0")
        if self.lora is not None:
            raise ValueError(f"{self.name}.lora: the loss takes weights, which adapters replace: drop one")
        loss = RoutingContrast(model, self.contrast_coef, self.temperature, getattr(inputs, "clusters_of", None))
        return [*super().auxiliary_losses(model, inputs), loss]


class RoutingContrast(AuxiliaryLoss):
    """`routing_contrastive_loss`, the mean over a tower's layers, summed over the towers as the balance loss is.

    As in the authors' code, each of a token's K choices counts, and the gradient flows into tokens and rows. Their code
    sums over layers, takes the centroids of each process by itself, and its routers score by cosine similarity.

    Guided, with `clusters_of`, a token counts for one expert, whichever compute it: for expert c mod E, where c is the
    cluster of its caption or of its image's caption, and for none if c is -1. The paper shows that guidance by classes
    helps. How it assigns classes to experts could not be read, and its code has no such guidance: clusters in place of
    classes, the assignment, and centroids of assigned tokens in this loss are ours.
    """

    def __init__(self, model: PreTrainedModel, coef: float, temperature: float, clusters_of: ClustersOf | None = None):
        super().__init__()
        self.coef, self.temperature, self.clusters_of = coef, temperature, clusters_of
        # What the routers of a tower read, from the model's call to that of the loss: not when the backward pass
        # computes a checkpointed layer again
        self.read: dict[str, list[torch.Tensor]] = {}
        model.register_forward_pre_hook(lambda *_: self.read.update({tower: [] for tower in TOWERS}))
        for tower in TOWERS:
            for block in sparse_blocks(getattr(model, f"{tower}_model")).values():
                block.router.register_forward_pre_hook(lambda _, read, at=tower: self.read.get(at, []).append(read[0]))

    def forward(self, model, outputs, batch, progress, reduce):
        read, self.read, loss = self.read, {}, 0.0
        clusters = None if self.clusters_of is None else self.clusters_of(batch)
        for tower in TOWERS:
            blocks = sparse_blocks(getattr(model, f"{tower}_model")).values()
            mask = logits_and_mask(tower, outputs, batch)[1]
            for number, (block, hidden_states) in enumerate(zip(blocks, read[tower], strict=True)):
                ids = getattr(outputs, f"{tower}_model_output").expert_ids[number]
                if clusters is not None:
                    is_token = torch.ones_like(hidden_states[..., 0]) if mask is None else mask
                    ids = guided_ids(clusters, is_token, block.num_experts)
                rows = mean_over_parts(block.router.weight.float(), reduce)
                contrast = routing_contrastive_loss(hidden_states.float(), ids, rows, self.temperature, reduce)
                loss = loss + contrast / len(blocks)
        return self.coef * loss, {"routing_contrastive_loss": loss.detach()}


def routing_contrastive_loss(
    hidden_states: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor, temperature: float, reduce: Reduce
) -> torch.Tensor:
    """The mean over the experts e of -log [exp(sim(p_e, m_e) / t) / sum_j exp(sim(p_e, m_j) / t)], where p_e is an
    expert's row of the router, m_e the mean of its tokens over the global batch, and sim the cosine similarity. Experts
    without tokens are left out of both.

    Args:
        hidden_states: what a router reads, (B, S, D).
        ids: the experts of each token, (B, S, K), E for none.
        rows: (E, D).
    """
    tokens, ids = hidden_states.flatten(0, 1), ids.flatten(0, 1)
    belongs = tokens.new_zeros(len(tokens), len(rows) + 1).scatter(1, ids, 1)[:, :-1]  # (T, E)
    sums = reduce(belongs.T @ F.pad(tokens, (0, 1), value=1.0))  # (E, D + 1), the last is the number of tokens
    is_used = sums[:, -1] > 0
    # A sum has the direction of the mean
    similarities = F.normalize(rows[is_used]) @ F.normalize(sums[is_used, :-1]).T / temperature
    return (similarities.logsumexp(dim=1) - similarities.diagonal()).sum() / max(len(similarities), 1)


def guided_ids(clusters: torch.Tensor, mask: torch.Tensor, num_experts: int) -> torch.Tensor:
    """(B, S, 1), the expert that the cluster (B,) of each token's pair is assigned to; E for padding, 0 in the mask
    (B, S), and for cluster -1."""
    is_guided = mask.bool() & (clusters >= 0)[:, None]
    return (clusters % num_experts)[:, None].where(is_guided, num_experts)[..., None]


def clusters_of_captions(rows: Rows, labels: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> ClustersOf:
    """By captions, from the labels of all pairs. Of pairs with equal captions in several clusters, the last counts."""
    texts = [present_captions(captions) for captions in rows["caption"]]
    keys = text_keys([text for captions in texts for text in captions], tokenizer)
    clusters = dict(zip(keys.tolist(), np.repeat(labels, list(map(len, texts))).tolist(), strict=True))

    def clusters_of(batch: Batch) -> torch.Tensor:
        keys = token_keys(batch["input_ids"].cpu(), batch["attention_mask"].cpu(), tokenizer.eos_token_id)
        return torch.tensor([clusters[key] for key in keys.tolist()], device=batch["input_ids"].device)

    return clusters_of
