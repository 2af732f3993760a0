"""Layouts with MATLAB files: ImageNet's development kit, Flowers-102, Stanford Cars, SVHN."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from scipy.io import loadmat

from clip_moe.evaluation.benchmarks.layouts import LabelLines
from clip_moe.evaluation.benchmarks.pixel_files import Pixels
from clip_moe.records.files import read_text


@dataclass(frozen=True, kw_only=True)
class Devkit(LabelLines):
    """ImageNet's validation images in one folder, with the development kit that numbers their classes otherwise."""

    files: Sequence[str] = tuple(
        f"ILSVRC2012_devkit_t12/data/{name}" for name in ("ILSVRC2012_validation_ground_truth.txt", "meta.mat")
    )
    images: str = "val"
    content: ClassVar[str] = "the number of a class in each line, and its WordNet id"

    def labels(self, folder: Path, split: str) -> dict[str, str]:
        file, meta = self.annotations(folder, split)
        synsets = loadmat(str(meta), squeeze_me=True)["synsets"]
        synset_of = dict(zip(map(int, synsets["ILSVRC2012_ID"]), map(str, synsets["WNID"]), strict=True))
        numbers = map(int, read_text(file).split())
        return {f"ILSVRC2012_val_{place:08}.JPEG": synset_of[number] for place, number in enumerate(numbers, 1)}


@dataclass(frozen=True, kw_only=True)
class Flowers(LabelLines):
    """Flowers-102: the classes of all images in their order, and the numbers of those of a split, from 1 on."""

    files: Sequence[str] = ("imagelabels.mat", "setid.mat")
    images: str = "jpg"
    test: str = "tstid"
    content: ClassVar[str] = "labels and tstid"

    def labels(self, folder: Path, split: str) -> dict[str, str]:
        labels, sets = (loadmat(str(file)) for file in self.annotations(folder, split))
        label_of = dict(enumerate(labels["labels"].ravel().tolist(), 1))
        numbers = sets[self.of_split("SPLIT", split)].ravel().tolist()
        return {f"image_{number:05}.jpg": str(label_of[number]) for number in numbers}


@dataclass(frozen=True, kw_only=True)
class Cars(LabelLines):
    """Stanford Cars, as torchvision has it."""

    files: Sequence[str] = ("cars_SPLIT_annos_withlabels.mat",)
    images: str = "cars_SPLIT"
    content: ClassVar[str] = "annotations of fname and class"

    def labels(self, folder: Path, split: str) -> dict[str, str]:
        (file,) = self.annotations(folder, split)
        cars = loadmat(str(file), squeeze_me=True)["annotations"]
        return {str(name): str(int(label)) for name, label in zip(cars["fname"], cars["class"], strict=True)}


@dataclass(frozen=True, kw_only=True)
class SVHN(Pixels):
    """SVHN's cropped digits, of which 0 is the class 10."""

    files: Sequence[str] = ("SPLIT_32x32.mat",)
    content: ClassVar[str] = "X, the images, and y, their classes"

    def arrays(self, folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
        (file,) = self.annotations(folder, split)
        content = loadmat(str(file))
        return content["X"].transpose(3, 0, 1, 2), content["y"].ravel() % 10
