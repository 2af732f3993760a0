"""Pictures of routing: the share of tokens that each expert computes, and the expert of each patch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import PIL.Image
import torch
from matplotlib.patches import Patch, Rectangle

from clip_moe.data.preparation import Preparation
from clip_moe.evaluation.embedder import Embedder
from clip_moe.evaluation.figures import grid, plot_text, plt, save
from modeling_clip_moe.router_losses import router_probabilities

# Images that are drawn
NUM_SHOWN = 8


@dataclass(frozen=True)
class RoutedImages:
    """The decisions of a layer's router on the tokens of some images.

    Args:
        probabilities: (n, S, E), the router's distribution.
        pixels: (n, height, width, 3), the images from 0 to 1, as the processor makes them.
        patch_size: the side of a patch, in pixels.
    """

    layer: int
    probabilities: np.ndarray
    pixels: np.ndarray
    patch_size: int

    @property
    def grid(self) -> tuple[int, int]:
        """How many patches are below and beside each other. Those are the tokens from 1 on. What is left of an image at
        the right and below, the model does not see."""
        height, width = self.pixels.shape[1:3]
        return height // self.patch_size, width // self.patch_size


def route_images(embedder: Embedder, images: Sequence[PIL.Image.Image], layer: int) -> RoutedImages:
    """Send images through a sparse layer of the vision tower."""
    processor, config = embedder.processor.image_processor, embedder.model.config.vision_config
    prepare = Preparation(processor)
    inputs = torch.stack([prepare(image)["pixel_values"] for image in images])
    mean, std = (torch.tensor(values)[:, None, None] for values in (processor.image_mean, processor.image_std))
    pixels = (inputs * std + mean if processor.do_normalize else inputs).permute(0, 2, 3, 1).clamp(0, 1).numpy()
    number, probabilities = sorted(config.moe_layers).index(layer), []
    for batch in inputs.to(embedder.dtype).split(embedder.batch_size):
        with torch.no_grad():
            outputs = embedder.model.vision_model(pixel_values=batch.to(embedder.device), output_router_logits=True)
        probabilities.append(router_probabilities(outputs.router_logits[number], config.scoring_func).float().cpu())
    return RoutedImages(layer, torch.cat(probabilities).numpy(), pixels, config.patch_size)


def draw_shares(routing: Mapping[str, Mapping[int, Mapping[str, Any]]], path: Path, title: str) -> None:
    """Heat maps of the share of tokens per expert and layer, one for each tower (CLIP-MoE Figure 3). `routing`: tower
    -> layer -> means."""
    maps = {tower: 100 * np.array([means["shares"] for means in layers.values()]) for tower, layers in routing.items()}
    height, num_experts = max(map(len, maps.values())), max(values.shape[1] for values in maps.values())
    width = 2.2 + (0.75 if num_experts <= 8 else 0.5) * num_experts
    figure, axes = grid(1, len(maps), width, 1.2 + 0.42 * height)
    highest = max(values.max() for values in maps.values())
    for axis, (tower, values) in zip(axes.flat, maps.items(), strict=True):
        image = axis.imshow(values, vmin=0, vmax=highest, aspect="auto")
        for (line, expert), value in np.ndenumerate(values):
            color = "black" if np.mean(image.cmap(image.norm(value))[:3]) > 0.5 else "white"
            axis.text(expert, line, f"{value:.0f}", ha="center", va="center", color=color, fontsize=8)
        axis.set_xticks(range(values.shape[1]))
        axis.set_yticks(range(len(values)), list(routing[tower]))
        axis.set(xlabel="expert", ylabel="layer", title=f"{tower} tower")
    figure.suptitle(plot_text(title, 120))
    save(figure, path)


def expert_colors(num_experts: int) -> Sequence[Sequence[float]]:
    if num_experts <= 10:
        return plt.get_cmap("tab10").colors
    return plt.get_cmap("gist_ncar")(np.linspace(0, 0.95, num_experts))


def draw_patches(routed: RoutedImages, path: Path | IO[bytes]) -> None:
    """Images, and below each the expert that the router likes best for every patch, and around it, for the class
    token."""
    number, num_experts = len(routed.pixels), routed.probabilities.shape[-1]
    first = routed.probabilities.argmax(axis=-1)  # (n, S)
    colors, side = expert_colors(num_experts), routed.patch_size
    figure, axes = grid(2, number, 1.7, 2.1, xticks=[], yticks=[])
    for above, below, pixels, experts in zip(axes[0], axes[1], routed.pixels, first, strict=True):
        above.imshow(pixels)
        below.imshow(pixels.mean(axis=-1), cmap="gray", vmin=0, vmax=1)
        for patch, expert in enumerate(experts[1:]):
            line, column = divmod(patch, routed.grid[1])
            left, top = column * side - 0.5, line * side - 0.5
            square = Rectangle((left, top), side, side, color=colors[expert], alpha=0.55, linewidth=0)
            below.add_patch(square)
            if routed.grid[0] <= 8:
                style = {"ha": "center", "va": "center", "color": "white", "fontsize": 9, "fontweight": "bold"}
                below.text(left + side / 2, top + side / 2, str(expert), **style)
        below.spines[:].set(color=colors[experts[0]], linewidth=5)
    handles = [Patch(color=colors[expert], label=f"expert {expert}") for expert in range(num_experts)]
    figure.legend(handles=handles, loc="outside lower center", ncol=min(8, num_experts, 1 + number), frameon=False)
    figure.suptitle(f"Vision tower, layer {routed.layer}: the first choice of every patch; frame: of the class token")
    save(figure, path)
