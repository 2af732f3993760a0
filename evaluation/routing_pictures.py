"""Pictures of routing."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np

from evaluation.preferences import RoutedImages, top_patches
from evaluation.report import plot_text

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402  after the choice of a backend that needs no screen
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.patches import Patch, Rectangle  # noqa: E402

LEAST_WIDTH = 8  # inches, for the title

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
    _save(figure, path)


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
    _save(figure, path)


def draw_coactivation(coactivation: dict[str, dict[int, Sequence[Sequence[float]]]], path: Path) -> None:
    """For every layer, the share of all tokens that each two experts both computed."""
    matrices = {
        f"{tower} tower, layer {layer}": 100 * np.array(m)
        for tower, layers in coactivation.items()
        for layer, m in layers.items()
    }
    side = 1.2 + 0.3 * max(len(matrix) for matrix in matrices.values())
    columns = min(len(matrices), max(1, int(24 / side)))
    lines = math.ceil(len(matrices) / columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(max(LEAST_WIDTH, side * columns), (side + 0.3) * lines + 0.5), squeeze=False
    )
    highest = max(1.0, *(matrix[~np.eye(len(matrix), dtype=bool)].max(initial=0) for matrix in matrices.values()))
    for axis, (name, matrix) in zip(axes.flat, matrices.items(), strict=False):
        np.fill_diagonal(matrix, np.nan)
        _matrix(axis, matrix, "{:.0f}", 0, highest)
        axis.set(title=name, xlabel="expert", ylabel="expert")
    for axis in axes.flat[len(matrices) :]:
        axis.axis("off")
    figure.suptitle("% of all tokens that two experts both compute")
    _save(figure, path)


def draw_agreement(agreement: Mapping[str, Mapping[str, Mapping[str, float | None]]], path: Path) -> None:
    """For images and texts, the linear CKA of the embeddings of each two columns: experts alone, and all routed."""
    side = 2.2 + 0.6 * max(len(of) for of in agreement.values())
    figure, axes = plt.subplots(1, len(agreement), figsize=(side * len(agreement), side), squeeze=False)
    for axis, (what, of) in zip(axes[0], agreement.items(), strict=True):
        matrix = np.array([[np.nan if value is None else value for value in row.values()] for row in of.values()])
        _matrix(axis, matrix, "{:.2f}", 0, 1)
        axis.set_xticks(range(len(of)), of, rotation=45, ha="right")
        axis.set_yticks(range(len(of)), of)
        axis.set(title=f"embeddings of {what}")
    figure.suptitle("Do experts embed alike? Linear CKA, 1 for alike")
    _save(figure, path)


def _matrix(axis: Axes, matrix: np.ndarray, form: str, low: float, high: float) -> None:
    axis.imshow(matrix, vmin=low, vmax=high, cmap="viridis")
    for (line, column), value in np.ndenumerate(matrix):
        if np.isfinite(value):
            color = "black" if value > low + 0.6 * (high - low) else "white"
            axis.text(column, line, form.format(value), ha="center", va="center", color=color, fontsize=8)
    axis.set_xticks(range(len(matrix)))
    axis.set_yticks(range(len(matrix)))


def draw_patches(routed: RoutedImages, path: Path, number: int = 8) -> None:
    """Some images, and below each the expert that the router likes best for every patch, and around it, for the class
    token."""
    chosen = np.linspace(0, len(routed.pixels) - 1, min(number, len(routed.pixels))).astype(int)
    first = routed.probabilities[chosen].argmax(axis=-1)  # (n, S)
    num_experts = routed.probabilities.shape[-1]
    figure, axes = plt.subplots(2, len(chosen), figsize=(max(LEAST_WIDTH, 1.7 * len(chosen) + 0.3), 4.6), squeeze=False)
    for above, below, image, experts in zip(*axes, chosen, first, strict=True):
        above.imshow(routed.pixels[image])
        _color_patches(below, routed.pixels[image], experts[1:].reshape(routed.grid), routed.patch_size, num_experts)
        for spine in below.spines.values():
            spine.set(color=_color(experts[0], num_experts), linewidth=5)
        for axis in (above, below):
            axis.set(xticks=[], yticks=[])
    colors = [Patch(color=_color(expert, num_experts), label=f"expert {expert}") for expert in range(num_experts)]
    figure.legend(handles=colors, loc="lower center", ncol=min(8, num_experts), frameon=False)
    figure.suptitle(f"Vision tower, layer {routed.layer}: the first choice of every patch; frame: of the class token")
    figure.tight_layout(rect=(0, 0.02 + 0.05 * math.ceil(num_experts / 8), 1, 1))
    _close(figure, path)


def _color_patches(axis: Axes, pixels: np.ndarray, experts: np.ndarray, patch: int, num_experts: int) -> None:
    axis.imshow(pixels.mean(axis=-1), cmap="gray", vmin=0, vmax=1)
    for (line, column), expert in np.ndenumerate(experts):
        place = (column * patch - 0.5, line * patch - 0.5)
        axis.add_patch(Rectangle(place, patch, patch, color=_color(expert, num_experts), alpha=0.55, linewidth=0))
        if len(experts) <= 8:
            middle = (column + 0.5) * patch - 0.5, (line + 0.5) * patch - 0.5
            axis.text(*middle, str(expert), ha="center", va="center", color="white", fontsize=9, fontweight="bold")


def _color(expert: int, num_experts: int) -> tuple[float, ...]:
    return (
        plt.get_cmap("tab10")(expert) if num_experts <= 10 else plt.get_cmap("gist_ncar")((expert + 0.5) / num_experts)
    )


def draw_expert_patches(routed: RoutedImages, path: Path) -> None:
    """A line for each expert: the patches that it takes with the highest probabilities, framed, and what is around."""
    found, patch = top_patches(routed), routed.patch_size
    columns = max(1, *map(len, found))
    side = min(*routed.pixels.shape[1:3], 7 * patch)  # of what is shown
    figure, axes = plt.subplots(
        len(found), columns, figsize=(max(LEAST_WIDTH, 1.2 * columns + 0.8), 1.35 * len(found) + 0.7), squeeze=False
    )
    for expert, (line, patches) in enumerate(zip(axes, found, strict=True)):
        for axis in line:
            axis.set(xticks=[], yticks=[], frame_on=False)
        line[0].set_ylabel(f"expert {expert}" + ("" if patches else ": none"))
        for axis, (image, place) in zip(line, patches, strict=False):
            row, column = (int(number) * patch for number in divmod(place, routed.grid[1]))
            axis.imshow(routed.pixels[image])
            for color, width in (("white", 3.5), ("red", 1.8)):  # seen on any ground
                frame = Rectangle((column - 0.5, row - 0.5), patch, patch, fill=False, color=color, linewidth=width)
                axis.add_patch(frame)
            left, top = (
                int(np.clip(start + patch / 2 - side / 2, 0, length - side))
                for start, length in ((column, routed.pixels.shape[2]), (row, routed.pixels.shape[1]))
            )
            axis.set(xlim=(left - 0.5, left + side - 0.5), ylim=(top + side - 0.5, top - 0.5))
            axis.set_title(f"{routed.probabilities[image, place + 1, expert]:.0%}", fontsize=8)
    figure.suptitle(
        f"Vision tower, layer {routed.layer}: the patches (red) that each expert is surest to get, and how sure"
    )
    _save(figure, path)


def draw_words(words: Sequence[Sequence[tuple[str, float, int]]], layer: int, path: Path) -> None:
    """For each expert, the words of which it computes the largest share: see `evaluation.preferences.top_words`."""
    columns = min(4, len(words))
    lines, most = math.ceil(len(words) / columns), max(1, *map(len, words))
    figure, axes = plt.subplots(
        lines, columns, figsize=(max(LEAST_WIDTH, 3 * columns), (1.1 + 0.24 * most) * lines + 0.5), squeeze=False
    )
    for axis in axes.flat[len(words) :]:
        axis.axis("off")
    for expert, (axis, of_expert) in enumerate(zip(axes.flat, words, strict=False)):
        bars = axis.barh(range(len(of_expert)), [100 * share for _, share, _ in of_expert])
        axis.bar_label(bars, fmt="%.0f", padding=2, fontsize=8)
        axis.set_yticks(range(len(of_expert)), [plot_text(f"{word} ({count})", 24) for word, _, count in of_expert])
        axis.set(ylim=(most - 0.5, -0.5), xlim=(0, 118), title=f"expert {expert}", xlabel="% of its occurrences")
    figure.suptitle(f"Text tower, layer {layer}: the words that each expert computes most (how often they occur)")
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    figure.tight_layout()
    _close(figure, path)


def _close(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=130, format="png")
    plt.close(figure)
