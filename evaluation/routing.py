"""Which tokens the routers of a sparse model send where, and what its fusion gates keep of the base FFN."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.nn.functional as F

from modeling_clip_moe import CLIPMoETextConfig, CLIPMoEVisionConfig
from modeling_clip_moe.modeling_clip_moe import (
    CLIPMoEExperts,
    CLIPMoEModel,
    CLIPMoERouter,
    CLIPMoESparseMoeBlock,
    expert_capacity_mask,
)


class RouterCounts:
    """What one router did with the tokens it saw. All that it computes raises ValueError where it has seen none.

    Args:
        pairs: (E, E), the tokens that two experts both computed, as any of their K choices; on the diagonal, those that
            an expert computed.
        num_tokens: of all, without padding.
        num_choices: of all tokens: K for each.
        num_overflowing: the choices that the capacity of training would have dropped, in the batches as they came.
        weight: the sum of all weights of all their choices.
        entropy: the sum of the entropies of the router's distribution, in bits.
    """

    def __init__(self, num_experts: int):
        self.pairs = np.zeros((num_experts, num_experts), dtype=np.int64)
        self.num_tokens, self.num_choices, self.num_overflowing = 0, 0, 0
        self.weight, self.entropy = 0.0, 0.0

    def add(
        self, logits: torch.Tensor, weights: torch.Tensor, expert_ids: torch.Tensor, mask: torch.Tensor | None
    ) -> None:
        """Count one call of a router: its outputs, and `mask` (B, S), 0 for padding."""
        mask = torch.ones_like(expert_ids[..., 0]) if mask is None else mask
        num_experts = len(self.pairs)
        chosen = F.one_hot(expert_ids, num_experts + 1)[..., :num_experts].sum(dim=2).flatten(0, 1)  # (T, E)
        self.pairs += (chosen.double().T @ chosen.double()).long().cpu().numpy()
        num_tokens = int(mask.sum())
        self.num_tokens += num_tokens
        self.num_choices += num_tokens * expert_ids.shape[-1]
        self.weight += weights.sum(dtype=torch.float64).item()
        entropies = torch.special.entr(logits.double().softmax(dim=-1)).sum(dim=-1) / math.log(2)
        self.entropy += (entropies * mask).sum().item()

    def shares(self) -> np.ndarray:
        """(E,), the share of the tokens that each expert computed. They sum to K where nothing is dropped."""
        return self.coactivation().diagonal()

    def coactivation(self) -> np.ndarray:
        """(E, E), the share of the tokens that two experts both computed; on the diagonal, `shares`."""
        return self.pairs / self._seen(self.num_tokens)

    def mean_weight(self) -> float:
        """What a token's experts have together, in the mean."""
        return self.weight / self._seen(self.num_tokens)

    def mean_entropy(self) -> float:
        """Of the router's distribution over the experts, in bits: 0 where it is sure of every token, and at most
        log2(E)."""
        return self.entropy / self._seen(self.num_tokens)

    def share_entropy(self) -> float:
        """Of the experts' shares of what was computed, in bits: log2(E) where all experts compute as many tokens."""
        computed = self.pairs.diagonal() / self._seen(self.pairs.trace())
        return torch.special.entr(torch.from_numpy(computed)).sum().item() / math.log(2)

    def dropped(self) -> float:
        """The share of the choices that capacity dropped."""
        return 1 - int(self.pairs.trace()) / self._seen(self.num_choices)

    def overflowing(self) -> float:
        """The share of the choices that the capacity of training would have dropped, in batches as they came."""
        return self.num_overflowing / self._seen(self.num_choices)

    @staticmethod
    def _seen(number: int) -> int:
        if number == 0:
            raise ValueError("the router has seen no token")
        return number


class _PooledTokens:
    """Picks, of what a layer has for each token, what belongs to the token whose last hidden state is the output.

    That is the class token of an image, and of a text the token that the text tower pools at, which is noted when the
    tower is called: `hook` is to be removed.
    """

    def __init__(self, model: CLIPMoEModel):
        self.end: torch.Tensor | None = None
        self.hook = model.text_model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, text_model, args, kwargs):
        self.end = text_model.pooled_positions(args[0] if args else kwargs["input_ids"])

    def __call__(self, tower: str, values: torch.Tensor | None) -> torch.Tensor | None:
        """(B, 1, ...) of `values` (B, S, ...)."""
        if values is None or tower == "vision":
            return None if values is None else values[:, :1]
        end = self.end.to(values.device)
        return values[torch.arange(len(end), device=values.device), end][:, None]


def _all_tokens(tower: str, values: torch.Tensor | None) -> torch.Tensor | None:
    return values


@contextmanager
def count_tokens(model: CLIPMoEModel, at_output: bool = False) -> Iterator[dict[str, dict[int, RouterCounts]]]:
    """Count what the routers of a model do within the block.

    Args:
        at_output: whether only the tokens count that a tower is pooled at: class tokens and end tokens.

    Yields:
        tower ("text", "vision") -> layer, from 0 -> counts; a dense tower has none.

    Raises:
        ValueError: the model has no sparse layer.
    """
    counts: dict[str, dict[int, RouterCounts]] = {}
    select = _PooledTokens(model) if at_output else _all_tokens
    hooks = [select.hook] if at_output else []
    for tower in ("text", "vision"):
        layers = getattr(model, f"{tower}_model").encoder.layers
        for number, layer in enumerate(layers):
            for router in (module for module in layer.modules() if isinstance(module, CLIPMoERouter)):
                counter = RouterCounts(router.config.num_experts)
                counts.setdefault(tower, {})[number] = counter

                def count(router, inputs, outputs, tower=tower, counter=counter):
                    counter.add(*(select(tower, values) for values in (*outputs, inputs[1])))
                    if not at_output:
                        counter.num_overflowing += _num_overflowing(router.config, outputs[0], inputs[1])

                hooks.append(router.register_forward_hook(count))
    try:
        if not counts:
            raise ValueError("the model has no sparse layer, so there is no routing to look at")
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


def _num_overflowing(
    config: CLIPMoETextConfig | CLIPMoEVisionConfig, logits: torch.Tensor, mask: torch.Tensor | None
) -> int:
    """How many choices of a batch the capacity of training has no room for. A batch that its groups do not divide ends
    with a smaller one."""
    if config.capacity_factor is None:
        return 0
    ids = logits.topk(config.num_experts_per_tok, dim=-1).indices
    mask = torch.ones_like(ids[..., 0]) if mask is None else mask
    groups = (tensor.split(config.capacity_group_size or len(ids)) for tensor in (ids, mask))
    kept = sum(
        int(expert_capacity_mask(of_group, config.num_experts, config.capacity_factor, mask_of_group).sum())
        for of_group, mask_of_group in zip(*groups, strict=True)
    )
    return int(mask.sum()) * ids.shape[-1] - kept


class GateMean:
    """The mean of a fusion gate: how much of a layer's output comes from the base FFN, 1 for all of it."""

    def __init__(self):
        self.sum, self.num_values = 0.0, 0

    def add(self, gate: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Count the gate (B, S, D) of one call, and `mask` (B, S), 0 for padding."""
        gate = gate.double() if mask is None else gate.double() * mask[..., None]
        self.sum += gate.sum().item()
        self.num_values += (gate[..., 0].numel() if mask is None else int(mask.sum())) * gate.shape[-1]

    def mean(self) -> float:
        return self.sum / self.num_values


@contextmanager
def average_gates(model: CLIPMoEModel, at_output: bool = False) -> Iterator[dict[str, dict[int, GateMean]]]:
    """Average the fusion gates of a model over the tokens it sees within the block.

    Args:
        at_output: see `count_tokens`.

    Yields:
        tower ("text", "vision") -> layer, from 0 -> mean; nothing for a model without fusion gates.
    """
    gates: dict[str, dict[int, GateMean]] = {}
    select = _PooledTokens(model) if at_output else _all_tokens
    hooks = [select.hook] if at_output else []
    for tower in ("text", "vision"):
        for number, layer in enumerate(getattr(model, f"{tower}_model").encoder.layers):
            if not isinstance(layer.mlp, CLIPMoESparseMoeBlock) or layer.mlp.fusion_gate is None:
                continue
            gate = gates.setdefault(tower, {})[number] = GateMean()

            def average(block, inputs, output, tower=tower, gate=gate):
                hidden_states, mask = (select(tower, values) for values in inputs)
                gate.add(block.fusion_gate.proj(hidden_states).sigmoid(), mask)

            hooks.append(layer.mlp.register_forward_hook(average))
    try:
        yield gates
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def chosen_experts(model: CLIPMoEModel, num_experts_per_tok: int) -> Iterator[None]:
    """Within the block, every token is computed by so many experts (CLIP-FMoE Tables 18 and 19).

    Raises:
        ValueError: there are not as many.
    """
    configs = [config for config in (model.config.text_config, model.config.vision_config) if config.moe_layers]
    for config in configs:
        if not 1 <= num_experts_per_tok <= config.num_experts:
            raise ValueError(
                f"num_experts_per_tok={num_experts_per_tok} must be between 1 and num_experts={config.num_experts}"
            )
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
    """Within the block, every expert is the mean of its layer's experts: what is then lost is what the experts know
    apart from each other."""
    tensors = [
        tensor for module in model.modules() if isinstance(module, CLIPMoEExperts) for tensor in module.parameters()
    ]
    before = [tensor.clone() for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.copy_(tensor.mean(dim=0, keepdim=True).expand_as(tensor))
        yield
    finally:
        for tensor, value in zip(tensors, before, strict=True):
            tensor.copy_(value)
