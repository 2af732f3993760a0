"""Pictures of routing: what each expert computes, of which layer, word and patch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from clip_moe.evaluation.figures import grid, heat_map, plot_text, plt, save
from clip_moe.evaluation.preferences import RoutedImages, top_patches


def draw_shares(routing: Mapping[str, Mapping[int, Mapping[str, Any]]], path: Path, title: str) -> None:
    """Heat maps of the share of tokens per expert and layer, one for each tower (CLIP-MoE Figure 3). `routing`: tower
    -> layer -> means."""
    maps = {tower: 100 * np.array([means["shares"] for means in layers.values()]) for tower, layers in routing.items()}
    height, num_experts = max(map(len, maps.values())), max(values.shape[1] for values in maps.values())
    width = 2.2 + (0.75 if num_experts <= 8 else 0.5) * num_experts
    figure, axes = grid(len(maps), len(routing), width, 1.2 + 0.42 * height)
    highest = max(values.max() for values in maps.values())
    for axis, (tower, values) in zip(axes.flat, maps.items(), strict=True):
        heat_map(axis, values, list(routing[tower]), range(values.shape[1]), highest)
        axis.set(xlabel="expert", ylabel="layer", title=f"{tower} tower")
    figure.suptitle(plot_text(title, 120))
    save(figure, path)


def _some(number: int) -> np.ndarray:
    return np.linspace(0, number - 1, min(8, number)).astype(int)


def _show(axis: Axes, pixels: np.ndarray, **options: Any) -> None:
    axis.imshow(pixels, **options)
    axis.set(xticks=[], yticks=[])


def _mark(axis: Axes, routed: RoutedImages, patch: int, **style: Any) -> tuple[float, float]:
    """A square on a patch, counted from 0 without the class token. Returns its middle."""
    line, column = divmod(int(patch), routed.grid[1])
    side = routed.patch_size
    axis.add_patch(Rectangle((column * side - 0.5, line * side - 0.5), side, side, **style))
    return (column + 0.5) * side - 0.5, (line + 0.5) * side - 0.5


def expert_colors(num_experts: int) -> Sequence[Sequence[float]]:
    return (
        plt.get_cmap("tab10").colors
        if num_experts <= 10
        else plt.get_cmap("gist_ncar")(np.linspace(0, 0.95, num_experts))
    )


def draw_patches(routed: RoutedImages, path: Path | IO[bytes]) -> None:
    """Some images, and below each the expert that the router likes best for every patch, and around it, for the class
    token."""
    chosen, num_experts = _some(len(routed.pixels)), routed.probabilities.shape[-1]
    first = routed.probabilities[chosen].argmax(axis=-1)  # (n, S)
    colors = expert_colors(num_experts)
    figure, axes = grid(2 * len(chosen), len(chosen), 1.7, 2.1)
    for above, below, image, experts in zip(*axes, chosen, first, strict=True):
        _show(above, routed.pixels[image])
        _show(below, routed.pixels[image].mean(axis=-1), cmap="gray", vmin=0, vmax=1)
        for patch, expert in enumerate(experts[1:]):
            middle = _mark(below, routed, patch, color=colors[expert], alpha=0.55, linewidth=0)
            if routed.grid[0] <= 8:
                style = {"ha": "center", "va": "center", "color": "white", "fontsize": 9, "fontweight": "bold"}
                below.text(*middle, str(expert), **style)
        below.spines[:].set(color=colors[experts[0]], linewidth=5)
    handles = [Patch(color=colors[expert], label=f"expert {expert}") for expert in range(num_experts)]
    figure.legend(handles=handles, loc="outside lower center", ncol=min(8, num_experts, 1 + len(chosen)), frameon=False)
    figure.suptitle(f"Vision tower, layer {routed.layer}: the first choice of every patch; frame: of the class token")
    save(figure, path)


def draw_expert_patches(routed: RoutedImages, path: Path) -> None:
    """A line for each expert: the patches that it takes with the highest probabilities, framed, and what is around."""
    best, (height, width) = top_patches(routed), routed.pixels.shape[1:3]
    columns = max(1, *map(len, best))
    half = min(height, width, 7 * routed.patch_size) / 2  # of what is shown
    figure, axes = grid(len(best) * columns, columns, 1.2, 1.35)
    for expert, (line, patches) in enumerate(zip(axes, best, strict=True)):
        for axis in line:
            axis.set(xticks=[], yticks=[], frame_on=False)
        line[0].set_ylabel(f"expert {expert}" + ("" if patches else ": none"))
        for axis, (image, patch) in zip(line, patches, strict=False):
            _show(axis, routed.pixels[image])
            for color, linewidth in (("white", 3.5), ("red", 1.8)):  # seen on any ground
                x, y = _mark(axis, routed, patch, fill=False, color=color, linewidth=linewidth)
            x, y = np.clip(x, half - 0.5, width - half - 0.5), np.clip(y, half - 0.5, height - half - 0.5)
            axis.set(xlim=(x - half, x + half), ylim=(y + half, y - half))
            axis.set_title(f"{routed.probabilities[image, patch + 1, expert]:.0%}", fontsize=8)
    figure.suptitle(
        f"Vision tower, layer {routed.layer}: the patches (red) that each expert is surest to get, and how sure"
    )
    save(figure, path)
