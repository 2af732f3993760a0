"""Squares of photographs: which pixels are trained on, and their captions."""

import csv
from importlib.util import find_spec

import numpy as np
import pytest
from PIL import Image

from clip_moe.data.arguments import DataArguments
from clip_moe.data.pairs import load_pairs
from lab import photographs
from lab.photographs import CELLS, TEST_COLUMNS, main


@pytest.fixture(autouse=True)
def package(tmp_path, monkeypatch):
    """A package with two photographs, whose cells are gray, each in its own shade."""
    folder = tmp_path / "two_photographs"
    (folder / "images").mkdir(parents=True)
    (folder / "__init__.py").touch()
    shades = np.arange(CELLS**2, dtype=np.uint8).reshape(CELLS, CELLS).repeat(20, 0).repeat(30, 1) * 10
    for name in ("one.png", "two.png"):
        Image.fromarray(shades).save(folder / "images" / name)
    monkeypatch.syspath_prepend(tmp_path)
    captions = {"one.png": "a cat", "two.png": "a cup"}
    monkeypatch.setattr(photographs, "PHOTOGRAPHS", {folder.name: ("images", captions)})


def test_no_pixel_is_in_both_splits(tmp_path):
    assert main(tmp_path / "squares", image_size=8).startswith("wrote 96 and 32 squares of 2 photographs")
    for split in ("train", "test"):
        rows = load_pairs(DataArguments(source=str(tmp_path / "squares"), split=split))
        cells = {round(np.asarray(Image.open(path)).mean() / 10) for path in rows["image"]}
        assert cells == {
            CELLS * row + column
            for row in range(CELLS)
            for column in range(CELLS)
            if (TEST_COLUMNS[row] == column) == (split == "test")
        }
        assert set(rows["caption"]) == {"a cat", "a cup"}


def test_captions(tmp_path):
    main(tmp_path / "places", captions="places", num_photographs=1, per_cell=1)
    with (tmp_path / "places" / "train" / "metadata.csv").open(encoding="utf-8") as file:
        texts = [row["caption"] for row in csv.DictReader(file)]
    assert len(set(texts)) == 12 and texts[0].endswith(", top far left")
    main(tmp_path / "folders", captions="folders", per_cell=1)
    assert {path.name for path in (tmp_path / "folders" / "test").iterdir()} == {"a cat", "a cup"}


def test_what_cannot_be(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="--num_photographs 3: it is at least 1 and at most 2"):
        main(tmp_path / "squares", num_photographs=3)
    with pytest.raises(ValueError, match="--per_cell 0: it is at least 1"):
        main(tmp_path / "squares", per_cell=0)
    monkeypatch.setattr(photographs, "PHOTOGRAPHS", {"no_such_package": ("images", {})})
    with pytest.raises(ValueError, match="photographs need no_such_package: pip install -c constraints.txt mvtb-data"):
        main(tmp_path / "squares")
    assert not (tmp_path / "squares").exists()


@pytest.mark.skipif(
    not all(find_spec(name) for name in photographs.PHOTOGRAPHS), reason="mvtb-data and scikit-image are not installed"
)
def test_the_packages_have_all_photographs(monkeypatch):
    monkeypatch.undo()
    found = [*photographs._find()]
    assert len(found) == len({caption for _, caption in found}) == 64 and all(path.is_file() for path, _ in found)
