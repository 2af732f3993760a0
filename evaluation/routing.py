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
from modeling_clip_moe.dispatch import as_fraction, dispatch_within_capacity
from modeling_clip_moe.router_losses import router_probabilities
from modeling_clip_moe.sparse_moe import CLIPMoERouter

# The token whose last hidden state a tower's output is made of
POOLED_TOKEN = {"text": "end token", "vision": "class token"}


class LayerCounts:
    """Counts of the tokens that a sparse layer saw, without padding.

    Args:
        computed: (E,), the tokens that each expert computed, as any of their K choices.
        num_choices: K for each token, in all.
        num_overflowing: the choices that the capacity of training would have dropped, in the batches as they came.
        weight: the sum of all weights of all choices.
        entropy: the sum of the entropies of the router's distribution, in bits.
        gate: the sum over tokens of the mean fusion gate, 1 where all comes from the base FFN; None: there is none.
    """

    def __init__(self, num_experts: int):
        self.computed = np.zeros(num_experts, dtype=np.int64)
        self.num_tokens = self.num_choices = self.num_overflowing = 0
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
            shares of the choices that were `dropped`, and `overflowing`, that the capacity of training would have
            dropped; and the `gate`.
        """
        num_computed = int(self.computed.sum())
        shares = torch.from_numpy(self.computed / max(num_computed, 1))
        return {
            "shares": (self.computed / self.num_tokens).tolist(),
            "share_entropy": torch.special.entr(shares).sum().item() / math.log(2),
            "entropy": self.entropy / self.num_tokens,
            "weight": self.weight / self.num_tokens,
            "dropped": 1 - num_computed / self.num_choices,
            "overflowing": self.num_overflowing / self.num_choices,
            "gate": None if self.gate is None else self.gate / self.num_tokens,
        }


# tower ("text", "vision") -> layer, from 0 -> "all" tokens, or those that a tower is pooled at, its "output" -> counts
Counts = dict[str, dict[int, dict[str, LayerCounts]]]


@contextmanager
def count_tokens(model: CLIPMoEModel) -> Iterator[Counts]:
    """Count what the sparse layers of a model do within the block; a dense tower has none."""
    counts: Counts = {}
    ends: list[torch.Tensor] = []  # the position that each text of the last batch is pooled at

    def note_ends(text_model, args, kwargs):
        ends[:] = [text_model.pooled_positions(args[0] if args else kwargs["input_ids"])]

    def at_output(tower: str, values: torch.Tensor | None) -> torch.Tensor | None:
        """(B, 1, ...) of what a layer has for each token (B, S, ...)."""
        if values is None or tower == "vision":
            return None if values is None else values[:, :1]
        end = ends[0].to(values.device)
        return values[torch.arange(len(end), device=values.device), end][:, None]

    hooks = [model.text_model.register_forward_pre_hook(note_ends, with_kwargs=True)]
    for tower in TOWERS:
        for number in sorted(getattr(model.config, f"{tower}_config").moe_layers):
            layer = getattr(model, f"{tower}_model").encoder.layers[number]
            layer_counts = {kind: LayerCounts(layer.mlp.router.config.num_experts) for kind in ("all", "output")}
            counts.setdefault(tower, {})[number] = layer_counts

            def count(
                router, inputs, outputs, tower=tower, fusion_gate=layer.mlp.fusion_gate, layer_counts=layer_counts
            ):
                gate = None if fusion_gate is None else fusion_gate.proj(inputs[0]).sigmoid()
                probabilities = router_probabilities(outputs[0].double(), router.config.scoring_func)
                values = (probabilities, *outputs[1:3], inputs[1], gate)
                layer_counts["all"].add(*values)
                layer_counts["output"].add(*(at_output(tower, value) for value in values))
                layer_counts["all"].num_overflowing += _num_overflowing(router, outputs[0], inputs[1])

            hooks.append(layer.mlp.router.register_forward_hook(count))
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


def _num_overflowing(router: CLIPMoERouter, logits: torch.Tensor, mask: torch.Tensor | None) -> int:
    """How many choices of a batch the capacity of training has no room for. A batch that its groups do not divide ends
    with a smaller one."""
    config = router.config
    if config.capacity_factor is None:
        return 0
    _, ids = router.choose(router.score(logits))
    if mask is not None:
        ids = ids.masked_fill(~mask.bool()[..., None], config.num_experts)
    factor, num_overflowing = as_fraction(config.capacity_factor), 0
    for group in ids.split(config.capacity_group_size or len(ids)):
        kept = dispatch_within_capacity(group.flatten(0, 1), config.num_experts, factor)[1]
        num_overflowing += int((group < config.num_experts).sum() - kept.sum())
    return num_overflowing


@contextmanager
def chosen_experts(model: CLIPMoEModel, num_experts_per_tok: int) -> Iterator[None]:
    """Within the block, every token is computed by so many experts (CLIP-FMoE Tables 18 and 19)."""
    configs = [config for config in (model.config.text_config, model.config.vision_config) if config.moe_layers]
    before = [config.num_experts_per_tok for config in configs]
    try:
        for config in configs:
            config.num_experts_per_tok = num_experts_per_tok
        yield
    finally:
        for config, number in zip(configs, before, strict=True):
            config.num_experts_per_tok = number


@contextmanager
@torch.no_grad()
def averaged_experts(model: CLIPMoEModel) -> Iterator[None]:
    """Within the block, every expert is the mean of its layer's experts, of narrow ones of those in the same place of
    their FFN: what is then lost is what the experts know apart from each other."""
    blocks = sparse_blocks(model).values()
    tensors_with_sizes = [
        (tensor, counted_as_one(block.config)) for block in blocks for tensor in block.experts.parameters()
    ]
    tensors = [tensor for tensor, _ in tensors_with_sizes]
    before = [tensor.clone() for tensor in tensors]
    try:
        for tensor, experts_per_ffn in tensors_with_sizes:
            copies = tensor.unflatten(0, (-1, experts_per_ffn))
            tensor.copy_(copies.mean(dim=0).repeat(len(copies), *[1] * (tensor.ndim - 1)))
        yield
    finally:
        for tensor, value in zip(tensors, before, strict=True):
            tensor.copy_(value)
