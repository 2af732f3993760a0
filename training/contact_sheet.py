"""A picture of clusters, for a person to judge them."""

import textwrap
from pathlib import Path

import datasets
import numpy as np

from data.images import decode_image
from data.pairs import first_caption

MAX_LINES = 32


def contact_sheet(
    path: Path, rows: datasets.Dataset, labels: np.ndarray, image_root: str | None, seed: int, columns: int = 8
) -> None:
    """Draw some images of each cluster with their captions, a cluster a line, for a person to judge.

    Args:
        rows: with the columns `image` and `caption`.
        labels: (samples,), the cluster of each row. Of more than `MAX_LINES` clusters, the largest are drawn.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    clusters, sizes = np.unique(labels, return_counts=True)
    if len(clusters) > MAX_LINES:
        drawn = np.sort(np.argsort(-sizes, kind="stable")[:MAX_LINES])
        clusters, sizes = clusters[drawn], sizes[drawn]
    rng = np.random.default_rng(seed)
    figure, axes = plt.subplots(
        len(clusters), columns, figsize=(2 * columns, 2.5 * len(clusters)), squeeze=False, layout="constrained"
    )
    for line, cluster, size in zip(axes, clusters, sizes, strict=True):
        for axis in line:
            axis.axis("off")
        chosen = rng.permutation(np.flatnonzero(labels == cluster))[:columns]
        for axis, index in zip(line, chosen, strict=False):
            row = rows[int(index)]
            axis.imshow(decode_image(row["image"], image_root))
            caption = row["caption"] if isinstance(row["caption"], str) else first_caption(row["caption"])
            title = textwrap.fill(textwrap.shorten(caption, 110), 26)
            axis.set_title(title, fontsize=7, parse_math=False)  # a caption may hold dollar signs
        line[0].text(-0.1, 0.5, f"{cluster}\n{size} samples", transform=line[0].transAxes, ha="right", va="center")
    figure.savefig(path, dpi=70)
    plt.close(figure)
