"""A picture of clusters, for a person to judge them."""

import textwrap
from pathlib import Path

import datasets
import numpy as np
import PIL.Image

from data.images import decode_image
from data.pairs import first_caption

MAX_LINES = 32
# In inches: of an image with its caption, of the image alone, and of what stands left of a line
WIDTH, HEIGHT, SIDE, MARGIN = 2.0, 2.5, 1.7, 1.5
# A red square stands for an image that cannot be read
UNREADABLE = PIL.Image.new("RGB", (8, 8), "red")


def contact_sheet(
    path: Path,
    rows: datasets.Dataset,
    labels: np.ndarray,
    image_root: str | None,
    seed: int,
    columns: int = 8,
    names: np.ndarray | None = None,
) -> None:
    """Draw some images of each cluster with their captions, a cluster a line, for a person to judge.

    Args:
        rows: with the columns `image` and `caption`.
        labels: (samples,), the cluster of each row. Of more than `MAX_LINES` clusters, the largest are drawn.
        names: by the numbers of clusters, if labels are these; lines are in the order of names.
    """
    from evaluation.figures import plt

    clusters, sizes = np.unique(labels, return_counts=True)
    names = clusters if names is None else names[clusters]
    order = np.argsort(names, kind="stable")
    clusters, sizes, names = clusters[order], sizes[order], names[order]
    if len(clusters) > MAX_LINES:
        drawn = np.sort(np.argsort(-sizes, kind="stable")[:MAX_LINES])
        clusters, sizes, names = clusters[drawn], sizes[drawn], names[drawn]
    rng = np.random.default_rng(seed)
    size = MARGIN + WIDTH * columns, HEIGHT * len(clusters)
    figure = plt.figure(figsize=size)
    # One for all images, in inches: axes of their own would take most of the time
    axes = figure.add_axes((0, 0, 1, 1))
    axes.axis("off")
    for line, (cluster, number, name) in enumerate(zip(clusters, sizes, names, strict=True)):
        bottom = HEIGHT * (len(clusters) - 1 - line)
        axes.text(MARGIN - 0.1, bottom + SIDE / 2, f"{name}\n{number} samples", ha="right", va="center")
        chosen = rng.permutation(np.flatnonzero(labels == cluster))[:columns]
        for column, index in enumerate(chosen):
            row, left = rows[int(index)], MARGIN + WIDTH * column
            try:
                image = decode_image(row["image"], image_root)
            except OSError:  # nobody has looked at images of which only the captions were clustered
                image = UNREADABLE
            width, height = (SIDE * side / max(image.size) for side in image.size)
            axes.imshow(image, extent=(left, left + width, bottom, bottom + height))
            caption = row["caption"] if isinstance(row["caption"], str) else first_caption(row["caption"])
            title = textwrap.fill(textwrap.shorten(caption, 110), 26)
            # A caption may hold dollar signs
            axes.text(left, bottom + height + 0.05, title, fontsize=7, va="bottom", parse_math=False)
    axes.set(xlim=(0, size[0]), ylim=(0, size[1]))
    figure.savefig(path, dpi=70)
    plt.close(figure)
