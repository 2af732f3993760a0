"""Which tokens the routers of a sparse model send where."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import matplotlib
import numpy as np
import torch

from modeling_clip_moe.modeling_clip_moe import CLIPMoEModel, CLIPMoERouter

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
