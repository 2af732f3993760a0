"""Matplotlib as all pictures use it, without a screen."""

import io
import logging
import warnings
from pathlib import Path
from typing import Any, BinaryIO

import matplotlib
import numpy as np
from matplotlib import font_manager
from matplotlib.figure import Figure

from clip_moe.engine.messages import one_line

matplotlib.use("Agg")
# It prints an error for each font without the weight "normal"
logging.getLogger("matplotlib.font_manager").setLevel(logging.CRITICAL)
from matplotlib import pyplot as plt  # noqa: E402  after the choice of a backend that needs no screen

# Matplotlib's own font lacks Chinese, Japanese and Korean
OTHER_FONTS = ("Noto Sans CJK JP", "Noto Sans CJK SC", "WenQuanYi Zen Hei", "Hiragino Sans", "Microsoft YaHei")

# Text and axes: in an SVG, this color becomes that of the page
INK = "#012345"
PAPER = "<style>svg { color: #222 } @media (prefers-color-scheme: dark) { svg { color: #ddd } }</style>"

installed = {font.name for font in font_manager.fontManager.ttflist}
matplotlib.rcParams["font.family"] = ["DejaVu Sans", *(font for font in OTHER_FONTS if font in installed)]
for part in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"):
    matplotlib.rcParams[part] = INK
# A character that no font has is drawn as a box, which says it
warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)

LEAST_WIDTH = 8  # inches, for a title


def plot_text(text: str, length: int = 40) -> str:
    """A text of somebody else as one line that matplotlib shows as it is, cut in the middle to a length: names often
    differ at their ends."""
    text, half = one_line(text), length // 2
    text = text if len(text) <= length else f"{text[: half - 1]}…{text[-half:]}"
    # Between dollars would be mathematics; labels that begin with an underscore are left out of legends.
    return (f" {text}" if text.startswith("_") else text).replace("$", r"\$")


def grid(lines: int, columns: int, width: float, height: float, **options: Any) -> tuple[Figure, np.ndarray]:
    """A figure with panels of this size in inches, and its axes (lines, columns), with options of `add_subplot`."""
    size = max(LEAST_WIDTH, width * columns), height * lines + 0.6
    return plt.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained", subplot_kw=options)


def save(figure: Figure, output: Path | BinaryIO) -> None:
    """Write the figure as PNG, or to the path of an `.svg` as such: its text and axes are dark on light pages and light
    on dark ones. The notebook passes an open file."""
    # A new file has another ending until it is whole
    if isinstance(output, Path) and ".svg" in output.name:
        text = io.StringIO()
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "a picture is the same in every run"}):
            figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
        picture = text.getvalue().replace(INK, "currentColor")
        start = picture.index(">", picture.index("<svg")) + 1
        output.write_text(f"{picture[:start]}{PAPER}{picture[start:]}", encoding="utf-8")
    else:
        figure.savefig(output, dpi=130, format="png")
    plt.close(figure)
