"""Which tokens the routers of a sparse model send where, and what its fusion gates keep of the base FFN."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import matplotlib
import numpy as np
import torch

from evaluation.report import plot_text
from modeling_clip_moe.modeling_clip_moe import CLIPMoEModel, CLIPMoERouter, CLIPMoESparseMoeBlock

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402  after the choice of a backend that needs no screen


class RouterCounts:
    """What one router did with the tokens it saw.

    Args:
        computed: (E,), the tokens that each expert computed, as any of their K choices.
        num_tokens: of all, without padding.
        weight: the sum of all weights of all their choices.
    """

    def __init__(self, num_experts: int):
        self.computed, self.num_tokens, self.weight = np.zeros(num_experts, dtype=np.int64), 0, 0.0

    def add(self, expert_ids: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Count one call: `expert_ids`, with E for none, and `weights` (B, S, K), and `mask` (B, S), 0 for padding."""
        num_experts = len(self.computed)
        counts = torch.bincount(expert_ids.flatten().cpu(), minlength=num_experts + 1)
        self.computed += counts[:num_experts].numpy()
        self.num_tokens += expert_ids[..., 0].numel() if mask is None else int(mask.sum())
        self.weight += weights.sum(dtype=torch.float64).item()

    def shares(self) -> np.ndarray:
        """(E,), the share of the tokens that each expert computed. They sum to K where nothing is dropped.

        Raises:
            ValueError: no token was counted.
        """
        if self.num_tokens == 0:
            raise ValueError("the router has seen no token")
        return self.computed / self.num_tokens

    def mean_weight(self) -> float:
        """What a token's experts have together, in the mean; see `shares` for the error."""
        if self.num_tokens == 0:
            raise ValueError("the router has seen no token")
        return self.weight / self.num_tokens


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

                def count(module, inputs, outputs, tower=tower, counter=counter):
                    _, weights, ids = outputs
                    counter.add(*(select(tower, values) for values in (ids, weights, inputs[1])))

                hooks.append(router.register_forward_hook(count))
    try:
        if not counts:
            raise ValueError("the model has no sparse layer, so there is no routing to look at")
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


POOLED_TOKEN = {"text": "end token", "vision": "class token"}


def draw_gates(gates: dict[str, dict[int, float]], output_gates: dict[str, dict[int, float]], path: Path) -> None:
    """Bars of the mean gate of every layer, in both towers: over all tokens, and at the tokens that are pooled."""
    names = [f"{tower} {layer}" for tower, layers in gates.items() for layer in layers]
    figure, axis = plt.subplots(figsize=(6, 1.2 + 0.7 * len(names)))
    for offset, label, means in ((-0.2, "all tokens", gates), (0.2, "class and end tokens", output_gates)):
        values = [100 * value for layers in means.values() for value in layers.values()]
        bars = axis.barh(np.arange(len(names)) + offset, values, height=0.38, label=label)
        axis.bar_label(bars, fmt="%.0f", padding=2)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set(xlim=(0, 100), xlabel="% of the base FFN in the layer's output", ylabel="layer")
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=2, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=130, format="png")
    plt.close(figure)


def draw_shares(
    shares: dict[str, dict[int, Sequence[float]]],
    output_shares: dict[str, dict[int, Sequence[float]]],
    path: Path,
    title: str,
) -> None:
    """Heat maps of the share of tokens per expert and layer, a column for each tower (CLIP-MoE Figure 3): of all
    tokens, and below of those that are pooled."""
    height = 2 * (1.2 + 0.42 * max(len(layers) for layers in shares.values())) + 0.4
    width = 2.2 + 0.75 * max(len(row) for layers in shares.values() for row in layers.values())
    figure, axes = plt.subplots(2, len(shares), figsize=(width * len(shares), height), squeeze=False)
    for row, of_row in zip(axes, (shares, output_shares), strict=True):
        for axis, (tower, layers) in zip(row, of_row.items(), strict=True):
            values = 100 * np.array(list(layers.values()))
            axis.imshow(values, vmin=0, vmax=100, cmap="viridis", aspect="auto")
            for (line, expert), value in np.ndenumerate(values):
                color = "black" if value > 60 else "white"
                axis.text(expert, line, f"{value:.0f}", ha="center", va="center", color=color)
            axis.set_xticks(range(values.shape[1]), range(values.shape[1]))
            axis.set_yticks(range(len(layers)), list(layers))
            tokens = "all tokens" if of_row is shares else POOLED_TOKEN[tower]
            axis.set(xlabel="expert", ylabel="layer", title=f"{tower} tower, {tokens}")
    figure.suptitle(plot_text(title, 120))
    figure.tight_layout()
    figure.savefig(path, dpi=130, format="png")
    plt.close(figure)
