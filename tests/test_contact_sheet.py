"""The picture of clusters: what stands in which line."""

import numpy as np
from datasets import Dataset
from PIL import Image as PILImage

from data import symbols
from training.contact_sheet import contact_sheet


def test_contact_sheet_shows_the_images_of_a_cluster_in_its_line(tmp_path):
    """Every cluster has one flat color, and captions that are no formulas."""
    colors = [(250, 10, 10), (10, 250, 10), (10, 10, 250)]
    labels = np.array([2, 0, 1, 1, 0, 2, 2, 0, 1])
    rows = Dataset.from_dict(
        {
            "image": [PILImage.new("RGB", (8, 8), colors[label]) for label in labels],
            "caption": ["50% off: $#1$", "a ^_^ $^$", "from $5 to $10"] * 3,
        }
    )
    contact_sheet(tmp_path / "sheet.png", rows, labels, None, seed=0, columns=3)
    pixels = np.asarray(PILImage.open(tmp_path / "sheet.png").convert("RGB")).astype(int)
    lines = [np.flatnonzero((np.abs(pixels - color).sum(axis=-1) < 30).any(axis=1)) for color in colors]
    assert all(len(line) > 20 for line in lines)
    assert lines[0].max() < lines[1].min() and lines[1].max() < lines[2].min()


def test_contact_sheet(tmp_path):
    rows = symbols.load("train", "detailed", 20)
    labels = np.array(rows["kind"])
    contact_sheet(tmp_path / "sheet.png", rows, labels, None, seed=0, columns=3)
    contact_sheet(tmp_path / "again.png", rows, labels, None, seed=0, columns=3)
    contact_sheet(tmp_path / "other.png", rows, labels[::-1], None, seed=0, columns=3)
    sheet, again, other = (np.asarray(PILImage.open(tmp_path / f"{n}.png")) for n in ("sheet", "again", "other"))
    assert sheet.shape[0] > 100 * len(set(labels))  # a line for each cluster
    assert (sheet == again).all()
    assert sheet.shape != other.shape or (sheet != other).any()
