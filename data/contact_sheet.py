"""Pictures with their captions on a sheet, for a person to judge: the kinds of a world, or the clusters of pairs."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

import datasets
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from clip_moe.data.drawing import font_file
from clip_moe.data.images import decode_image
from clip_moe.data.texts import first_caption

FONT, LETTER, LINE = "DejaVuSans", 6, 12  # the width of a letter and the height of a line, in pixels
# At most MAX_LINES clusters, the largest, with at most COLUMNS images each
MAX_LINES, COLUMNS = 32, 8
# Drawn for an image that cannot be read
UNREADABLE = Image.new("RGB", (8, 8), "red")


def grid(cells: Sequence[tuple[Sequence[Image.Image], str]], columns: int, side: int, lines: int) -> Image.Image:
    """Cells line by line: pictures of the same longer side beside each other, and a text of several lines below. A cell
    without pictures is a heading."""
    font = ImageFont.truetype(font_file(FONT), 10)
    width = max(len(pictures) for pictures, _ in cells) * (side + 2) + LETTER
    height = side + LINE * lines + LETTER
    sheet = Image.new("RGB", (columns * width, -(-len(cells) // columns) * height), "white")
    drawing = ImageDraw.Draw(sheet)
    for number, (pictures, text) in enumerate(cells):
        x, y = number % columns * width, number // columns * height
        for picture in pictures:
            size = [max(1, round(side * length / max(picture.size))) for length in picture.size]
            enlarged = picture.resize(size, Image.Resampling.NEAREST if size[0] > picture.width else None)
            sheet.paste(enlarged, (x, y + side - size[1]))
            x += side + 2
        wrapped = "\n".join(textwrap.wrap(text, width // LETTER, max_lines=lines, placeholder=" ..."))
        drawing.multiline_text((number % columns * width, y + side), wrapped, "black", font, spacing=0)
    return sheet


def contact_sheet(
    path: Path,
    rows: datasets.Dataset,
    labels: np.ndarray,
    seed: int,
    names: np.ndarray | None = None,
) -> None:
    """Draw some images of each cluster with their captions, a cluster a line.

    Args:
        rows: with the columns `image` and `caption`.
        labels: (samples,), the cluster of each row. Of more than `MAX_LINES` clusters, the largest are drawn.
        names: by the numbers of clusters, if labels are these; lines are in the order of names.
    """
    clusters, sizes = np.unique(labels, return_counts=True)
    names = clusters if names is None else names[clusters]
    largest = np.argsort(-sizes, kind="stable")[:MAX_LINES]
    rng, cells = np.random.default_rng(seed), []
    for line in sorted(largest, key=lambda line: names[line]):
        cells.append(([], f"{names[line]}, {sizes[line]} samples"))
        chosen = rng.permutation(np.flatnonzero(labels == clusters[line]))[:COLUMNS]
        for row in rows.select(chosen):
            try:
                image = decode_image(row["image"])
            except OSError:  # nobody has looked at images of which only the captions were clustered
                image = UNREADABLE
            cells.append(([image], first_caption(row["caption"])))
        cells += [([], "")] * (COLUMNS - len(chosen))
    grid(cells, COLUMNS + 1, side=120, lines=5).save(path)
