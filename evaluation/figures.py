"""Matplotlib as all pictures use it: without a screen, and with fonts of other scripts, where they are installed."""

import warnings

import matplotlib
from matplotlib import font_manager

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402, F401  after the choice of a backend that needs no screen

# Matplotlib's own font lacks Chinese, Japanese and Korean
OTHER_FONTS = ("Noto Sans CJK JP", "Noto Sans CJK SC", "WenQuanYi Zen Hei", "Hiragino Sans", "Microsoft YaHei")

installed = {font.name for font in font_manager.fontManager.ttflist}
matplotlib.rcParams["font.family"] = ["DejaVu Sans", *(font for font in OTHER_FONTS if font in installed)]
# A character that no font has is drawn as a box, which says it
warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
