"""Which tokens the routers of a sparse model send where, and what its fusion gates keep of the base FFN."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import matplotlib
import numpy as np
import torch

from modeling_clip_moe.modeling_clip_moe import CLIPMoEModel, CLIPMoERouter, CLIPMoESparseMoeBlock

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402  after the choice of a backend that needs no screen


class RouterCounts:
    """What one router did with the tokens it saw.

    Args:
        computed: (E,), the tokens that each expert computed, as any of their K choices.
        num_tokens: of all, without padding.
    """

    def __init__(self, num_experts: int):
        self.computed, self.num_tokens = np.zeros(num_experts, dtype=np.int64), 0

    def add(self, expert_ids: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Count the choices of one call: `expert_ids` (B, S, K), with E for none, and `mask` (B, S), 0 for padding."""
        num_experts = len(self.computed)
        counts = torch.bincount(expert_ids.flatten().cpu(), minlength=num_experts + 1)
        self.computed += counts[:num_experts].numpy()
        self.num_tokens += expert_ids[..., 0].numel() if mask is None else int(mask.sum())

    def shares(self) -> np.ndarray:
        """(E,), the share of the tokens that each expert computed. They sum to K where nothing is dropped.

        Raises:
            ValueError: no token was counted.
        """
        if self.num_tokens == 0:
            raise ValueError("the router has seen no token")
        return self.computed / self.num_tokens


@contextmanager
def count_tokens(model: CLIPMoEModel) -> Iterator[dict[str, dict[int, RouterCounts]]]:
    """Count what the routers of a model do within the block.

    Yields:
        tower ("text", "vision") -> layer, from 0 -> counts; a dense tower has none.

    Raises:
        ValueError: the model has no sparse layer.
    """
    counts: dict[str, dict[int, RouterCounts]] = {}
    hooks = []
    for tower in ("text", "vision"):
        layers = getattr(model, f"{tower}_model").encoder.layers
        for number, layer in enumerate(layers):
            for router in (module for module in layer.modules() if isinstance(module, CLIPMoERouter)):
                counter = RouterCounts(router.config.num_experts)
                counts.setdefault(tower, {})[number] = counter

                def count(module, inputs, outputs, counter=counter):
                    counter.add(outputs[2], inputs[1])

                hooks.append(router.register_forward_hook(count))
    if not hooks:
        raise ValueError("the model has no sparse layer, so there is no routing to look at")
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


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
def average_gates(model: CLIPMoEModel) -> Iterator[dict[str, dict[int, GateMean]]]:
    """Average the fusion gates of a model over the tokens it sees within the block.

    Yields:
        tower ("text", "vision") -> layer, from 0 -> mean; nothing for a model without fusion gates.
    """
    gates: dict[str, dict[int, GateMean]] = {}
    hooks = []
    for tower in ("text", "vision"):
        for number, layer in enumerate(getattr(model, f"{tower}_model").encoder.layers):
            if not isinstance(layer.mlp, CLIPMoESparseMoeBlock) or layer.mlp.fusion_gate is None:
                continue
            gate = gates.setdefault(tower, {})[number] = GateMean()

            def average(block, inputs, output, gate=gate):
                hidden_states, mask = inputs
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


def draw_gates(gates: dict[str, dict[int, float]], path: Path) -> None:
    """Bars of the mean gate of every layer, in both towers."""
    names = [f"{tower} {layer}" for tower, layers in gates.items() for layer in layers]
    values = [100 * value for layers in gates.values() for value in layers.values()]
    figure, axis = plt.subplots(figsize=(6, 1 + 0.4 * len(names)))
    axis.bar_label(axis.barh(names, values), fmt="%.0f", padding=2)
    axis.invert_yaxis()
    axis.set(xlim=(0, 100), xlabel="% of the base FFN in the layer's output", ylabel="layer")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_shares(shares: dict[str, dict[int, Sequence[float]]], path: Path, title: str) -> None:
    """A heat map of the share of tokens per expert and layer, one for each tower (CLIP-MoE Figure 3)."""
    height = 1.6 + 0.42 * max(len(layers) for layers in shares.values())
    width = 2.2 + 0.75 * max(len(row) for layers in shares.values() for row in layers.values())
    figure, axes = plt.subplots(1, len(shares), figsize=(width * len(shares), height), squeeze=False)
    for axis, (tower, layers) in zip(axes[0], shares.items(), strict=True):
        values = 100 * np.array(list(layers.values()))
        axis.imshow(values, vmin=0, vmax=100, cmap="viridis", aspect="auto")
        for (line, expert), value in np.ndenumerate(values):
            axis.text(expert, line, f"{value:.0f}", ha="center", va="center", color="black" if value > 60 else "white")
        axis.set_xticks(range(values.shape[1]), range(values.shape[1]))
        axis.set_yticks(range(len(layers)), list(layers))
        axis.set(xlabel="expert", ylabel="layer", title=f"{tower} tower")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
