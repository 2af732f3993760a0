"""Pictures of routing."""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from evaluation.figures import plt
from evaluation.preferences import Caption, RoutedImages, top_patches
from evaluation.report import plot_text

MOST_EXPERTS = 16  # whose captions are drawn
LEAST_WIDTH = 8  # inches, for the title
# Of captions: characters in a line, and their size in points; inches of a line, and of a character of matplotlib's
# monospaced font
LINE_LENGTH, FONT_SIZE = 110, 9
LINE, CHARACTER = 0.21, 0.602 * FONT_SIZE / 72

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
    num_experts = max(len(row) for layers in shares.values() for row in layers.values())
    width = 2.2 + (0.75 if num_experts <= 8 else 0.5) * num_experts
    highest = 100 * max(max(row) for of in (shares, output_shares) for layers in of.values() for row in layers.values())
    figure, axes = plt.subplots(2, len(shares), figsize=(width * len(shares), height), squeeze=False)
    for row, of_row in zip(axes, (shares, output_shares), strict=True):
        for axis, (tower, layers) in zip(row, of_row.items(), strict=True):
            values = 100 * np.array(list(layers.values()))
            axis.imshow(values, vmin=0, vmax=highest, cmap="viridis", aspect="auto")
            for (line, expert), value in np.ndenumerate(values):
                color = "black" if value > 0.6 * highest else "white"
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


def draw_dropped(routed: RoutedImages, dropped: Mapping[float, np.ndarray], path: Path, number: int = 8) -> None:
    """Images that share a capacity, with a line for each capacity factor, and in red the patches that it drops (CLIP-UP
    Figure 7). `dropped`: factor -> what `evaluation.preferences.dropped_patches` gives."""
    num_images = len(next(iter(dropped.values())))
    chosen = np.linspace(0, num_images - 1, min(number, num_images)).astype(int)
    size = max(LEAST_WIDTH, 1.7 * len(chosen) + 0.3), 2.2 * len(dropped) + 0.6
    figure, patch = plt.figure(figsize=size, layout="constrained"), routed.patch_size
    lines = figure.subfigures(len(dropped), 1, squeeze=False)[:, 0]
    for line, (factor, of_factor) in zip(lines, dropped.items(), strict=True):
        share = f"{of_factor.mean():.1%} of the patches dropped"
        line.suptitle(f"capacity factor {factor:g}: {share}", x=0.01, ha="left", fontweight="bold", fontsize="medium")
        for axis, image in zip(line.subplots(1, len(chosen), squeeze=False)[0], chosen, strict=True):
            axis.imshow(routed.pixels[image])
            for row, column in np.argwhere(of_factor[image].reshape(routed.grid)):
                place = (column * patch - 0.5, row * patch - 0.5)
                axis.add_patch(Rectangle(place, patch, patch, facecolor=(1, 0, 0, 0.6), edgecolor="red"))
            axis.set(xticks=[], yticks=[], xlabel=f"image {image + 1}: {of_factor[image].mean():.0%}")
    figure.suptitle(
        f"Vision tower, layer {routed.layer}: the patches (red) that find no room at any expert\n"
        f"{num_images} images share the capacity, in the order of their numbers"
    )
    _close(figure, path)


def draw_captions(captions: Sequence[Sequence[Caption]], layer: int, path: Path, number: int = 4) -> None:
    """For each expert, or the first of many, texts with what it computes of them in red: see
    `evaluation.preferences.top_captions`."""
    shown = [of_expert[:number] for of_expert in captions[:MOST_EXPERTS]]
    which = "each expert computes" if len(shown) == len(captions) else f"the first {len(shown)} experts compute"
    heights = [_height(of_expert) for of_expert in shown]
    gap = 0.35  # inches above each expert, for its name
    width, height = LINE_LENGTH * CHARACTER + 0.4, sum(heights) + gap * len(heights) + 0.5
    figure, top = plt.figure(figsize=(width, height)), height - 0.5
    for expert, (of_expert, of_height) in enumerate(zip(shown, heights, strict=True)):
        top -= gap + of_height
        _write(figure, 0.2, top, of_expert).set_title(f"expert {expert}" + ("" if of_expert else ": none"), loc="left")
    figure.suptitle(f"Text tower, layer {layer}: what {which} (red) of some texts", y=1 - 0.2 / height)
    _close(figure, path)


def draw_expert(
    expert: int,
    routed: RoutedImages | None,
    captions: tuple[int, Sequence[Caption]] | None,
    path: Path,
) -> None:
    """One expert large: all that it computes (framed) of the images of its top patches, and below of texts (CLIP-UP
    Figure 11). `captions`: the layer and its texts. What a dense tower has not is None."""
    images = [] if routed is None else [image for image, _ in top_patches(routed)[expert]]
    columns, side = 5, LINE_LENGTH * CHARACTER / 5
    above = 0.5 + side * math.ceil(len(images) / columns) if routed is not None else 0
    below = 0.5 + _height(captions[1]) if captions is not None else 0
    width, height = LINE_LENGTH * CHARACTER + 0.4, above + below + 0.6
    figure = plt.figure(figsize=(width, height))
    figure.suptitle(f"What expert {expert} computes (framed)", y=1 - 0.2 / height)
    if routed is not None:
        none = "" if images else ": none"
        figure.text(0.2 / width, 1 - 0.7 / height, f"vision tower, layer {routed.layer}{none}", fontsize=12)
    for number, image in enumerate(images):
        left, bottom = 0.2 + side * (number % columns), height - 0.8 - side * (number // columns + 1)
        axis = figure.add_axes((left / width, bottom / height, 0.97 * side / width, 0.97 * side / height))
        axis.imshow(routed.pixels[image])
        axis.set(xticks=[], yticks=[])
        patch = routed.patch_size
        for (row, column), computed in np.ndenumerate(routed.computed[image, 1:, expert].reshape(routed.grid)):
            place = (column * patch - 0.5, row * patch - 0.5)
            if computed:
                axis.add_patch(Rectangle(place, patch, patch, fill=False, edgecolor="red", linewidth=2))
            else:
                axis.add_patch(Rectangle(place, patch, patch, facecolor=(1, 1, 1, 0.75), linewidth=0))
    if captions is not None:
        layer, of_expert = captions
        axis = _write(figure, 0.2, 0.2, of_expert)
        axis.set_title(f"text tower, layer {layer}" + ("" if of_expert else ": none"), loc="left")
    _close(figure, path)


def _height(captions: Sequence[Caption]) -> float:
    """In inches."""
    return LINE * (0.5 + sum(0.5 + len(_lines(caption.text)) for caption in captions))


def _write(figure: Figure, left: float, bottom: float, captions: Sequence[Caption]) -> Axes:
    """Write texts into a figure, at a place in inches."""
    (width, height), of_width, of_height = figure.get_size_inches(), LINE_LENGTH * CHARACTER, _height(captions)
    axis = figure.add_axes((left / width, bottom / height, of_width / width, of_height / height))
    axis.set(xlim=(0, LINE_LENGTH), ylim=(of_height / LINE, 0))
    axis.axis("off")
    middle = 1.0  # of a line
    for caption in captions:
        for start, end in _lines(caption.text):
            # Word for word, so that rounded widths of characters do not add up
            for (_, computed), run in groupby(
                range(start, end), key=lambda place: (caption.text[place] == " ", caption.computed[place])
            ):
                first, *rest = run
                length = len(rest) + 1
                if computed:
                    colors = {"facecolor": (1, 0, 0, 0.2), "edgecolor": "red"}
                    axis.add_patch(Rectangle((first - start, middle - 0.42), length, 0.84, **colors))
                text = caption.text[first : first + length]
                font = {"family": "monospace", "fontsize": FONT_SIZE, "parse_math": False}
                axis.text(first - start, middle, text, va="center_baseline", **font)
            middle += 1
        middle += 0.5
    return axis


def _lines(text: str) -> list[tuple[int, int]]:
    """Where the lines of a text begin and end, broken at spaces where there are some."""
    lines, start = [], 0
    while start < len(text):
        end = start + LINE_LENGTH
        if end < len(text):
            end = text.rfind(" ", start, end) + 1 or end
        lines.append((start, min(end, len(text))))
        start = end
    return lines


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
