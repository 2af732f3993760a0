"""Layouts of images with right and wrong captions: ARO, SugarCrepe, MMVP-VLM."""

import csv
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from datasets import Dataset

from clip_moe.engine.files import read_json, read_text
from clip_moe.evaluation.benchmarks.layouts import Layout, Records


@dataclass(frozen=True, kw_only=True)
class Choices(Records):
    """An image with a right caption and wrong ones in each entry of JSON (ARO, SugarCrepe), under the keys `texts`.

    Args:
        attribute: the key of what the wrong captions change, which is a text or a list; None: the name of the file.
        least: an attribute that fewer entries have counts for nothing.
        numbered: whether a file holds an object of entries by their numbers, and not a list.
        boxed: whether the image is a box of another one: bbox_x, bbox_y, bbox_w and bbox_h.
    """

    attribute: str | None = None
    least: int = 1
    numbered: bool = False
    boxed: bool = False

    @property
    def content(self) -> str:
        keys = filter(None, [self.image, *self.texts, self.attribute, "bbox_x, bbox_y, bbox_w, bbox_h" * self.boxed])
        return f"the keys {', '.join(keys)} in an entry"

    def rows(self, folder: Path, split: str) -> Dataset:
        columns = defaultdict(list)
        for file in self.annotations(folder, split):
            content = read_json(file)
            for entry in content.values() if self.numbered else content:
                image = str(folder / self.images / entry[self.image])
                if self.boxed:
                    left, top, width, height = (entry[f"bbox_{side}"] for side in "xywh")
                    image = {"path": image, "bytes": None, "box": [left, top, left + width, top + height]}
                columns["image"].append(image)
                columns["caption"].append([entry[key] for key in self.texts])
                attribute = entry[self.attribute] if self.attribute else file.stem
                columns["attribute"].append(attribute if isinstance(attribute, str) else "_".join(attribute))
        times = Counter(columns["attribute"])
        columns["attribute"] = [name if times[name] >= self.least else None for name in columns["attribute"]]
        return Dataset.from_dict(columns)


@dataclass(frozen=True, kw_only=True)
class ImagePairs(Layout):
    """Statements; two that follow each other belong to a pair of images (MMVP-VLM, scripts/evaluate_vlm.py of
    tsb0601/MMVP)."""

    files: Sequence[str] = ("Questions.csv",)
    images: str = "MLLM_VLM Images"
    content: ClassVar[str] = "number, type and statement in each row"

    def rows(self, folder: Path, split: str) -> Dataset:
        (file,) = self.annotations(folder, split)
        lines = [line for line in read_text(file).split("\n") if line.strip()]
        _, *statements = rows = list(csv.reader(lines, strict=True))
        # A quote that is not closed makes one row of several lines
        if len(rows) < len(lines) or len(statements) % 2 or not all(map(str.strip, sum(statements, []))):
            raise ValueError(f"{file} must have pairs of rows, no cell of which is blank or has several lines")
        columns = defaultdict(list)
        for first, second in zip(statements[::2], statements[1::2], strict=True):
            columns["attribute"].append(first[1])
            for side, (number, _, statement) in enumerate((first, second)):
                # The second statement's image is in the folder of the first's type, too
                columns[f"image_{side}"].append(str(folder / self.images / first[1] / f"{number}.jpg"))
                columns[f"caption_{side}"].append(f"a photo of {statement}")
        return Dataset.from_dict(columns)
