"""The tokens that the routers of a sparse model send to each expert, and the share of its base FFN that gates keep."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from clip_moe.conversion.presets import TOWERS
from clip_moe.conversion.upcycle import counted_as_one, sparse_blocks
from modeling_clip_moe import CLIPMoEModel
from modeling_clip_moe.router_losses import router_probabilities


class LayerCounts:
    """Counts of the tokens that a sparse layer saw, without padding.

    Args:
        computed: (E,), the tokens that each expert computed, as any of their K choices.
        num_choices: K for each token, in all.
        weight: the sum of all weights of all choices.
        entropy: the sum of the entropies of the router's distribution, in bits.
        gate: the sum over tokens of the mean fusion gate, 1 where all comes from the base FFN; None: there is none.
    """

    def __init__(self, num_experts: int):
        self.computed = np.zeros(num_experts, dtype=np.int64)
        self.num_tokens = self.num_choices = 0
        self.weight, self.entropy = 0.0, 0.0
        self.gate: float | None = None

    def add(
        self,
        probabilities: torch.Tensor,
        weights: torch.Tensor,
        expert_ids: torch.Tensor,
        mask: torch.Tensor | None,
        gate: torch.Tensor | None = None,
    ) -> None:
        """Count one call of a router: its probabilities (B, S, E), weights and ids, `mask` (B, S), 0 for padding, and
        the fusion gate (B, S, D)."""
        mask = torch.ones_like(expert_ids[..., 0]) if mask is None else mask
        num_experts, num_tokens = len(self.computed), int(mask.sum())
        self.computed += torch.bincount(expert_ids.flatten(), minlength=num_experts + 1)[:num_experts].cpu().numpy()
        self.num_tokens += num_tokens
        self.num_choices += num_tokens * expert_ids.shape[-1]
        self.weight += weights.sum(dtype=torch.float64).item()
        entropies = torch.special.entr(probabilities).sum(dim=-1) / math.log(2)
        self.entropy += (entropies * mask).sum().item()
        if gate is not None:
            self.gate = (self.gate or 0.0) + (gate.double().mean(dim=-1) * mask).sum().item()

    def means(self) -> dict[str, Any]:
        """Means over tokens.

        Returns:
            `shares` (E,) of the tokens that each expert computed, which sum to K where nothing is dropped;
            `share_entropy` in bits, log2(E) where all experts compute as many tokens; `entropy` of the router's
            distribution in bits, 0 where it is sure of every token; `weight`, that of a token's experts together; the
            share of the choices that were `dropped`; and the `gate`.
        """
        num_computed = int(self.computed.sum())
        shares = torch.from_numpy(self.computed / max(num_computed, 1))
        return {
            "shares": (self.computed / self.num_tokens).tolist(),
            "share_entropy": torch.special.entr(shares).sum().item() / math.log(2),
            "entropy": self.entropy / self.num_tokens,
            "weight": self.weight / self.num_tokens,
            "dropped": 1 - num_computed / self.num_choices,
            "gate": None if self.gate is None else self.gate / self.num_tokens,
        }


@contextmanager
def count_tokens(model: CLIPMoEModel) -> Iterator[dict[str, dict[int, LayerCounts]]]:
    """Count what the sparse layers of a model do within the block: tower ("text", "vision") -> layer, from 0 -> counts.
    A dense tower has none."""
    counts: dict[str, dict[int, LayerCounts]] = {}
    hooks = []
    for tower in TOWERS:
        for number in sorted(getattr(model.config, f"{tower}_config").moe_layers):
            mlp = getattr(model, f"{tower}_model").encoder.layers[number].mlp
            counts.setdefault(tower, {})[number] = LayerCounts(mlp.router.config.num_experts)

            def count(router, inputs, outputs, fusion_gate=mlp.fusion_gate, layer_counts=counts[tower][number]):
                tokens, mask = inputs
                logits, weights, expert_ids = outputs[:3]
                gate = None if fusion_gate is None else fusion_gate.proj(tokens).sigmoid()
                probabilities = router_probabilities(logits.double(), router.config.scoring_func)
                layer_counts.add(probabilities, weights, expert_ids, mask, gate)

            hooks.append(mlp.router.register_forward_hook(count))
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
@torch.no_grad()
def averaged_experts(model: CLIPMoEModel) -> Iterator[None]:
    """Within the block, every expert is the mean of its layer's experts, of narrow ones of those in the same place of
    their FFN: what is then lost is what the experts know apart from each other."""
    blocks = sparse_blocks(model).values()
    before = [(tensor, tensor.clone(), block) for block in blocks for tensor in block.experts.parameters()]
    try:
        for tensor, _, block in before:
            experts_per_ffn = counted_as_one(block.config)
            for place in range(experts_per_ffn):
                tensor[place::experts_per_ffn] = tensor[place::experts_per_ffn].mean(dim=0)
        yield
    finally:
        for tensor, value, _ in before:
            tensor.copy_(value)
