"""Layouts of images that lie as bytes one after another in a file: CIFAR, MNIST, STL-10."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import PIL.Image
from datasets import Dataset, Image

from clip_moe.evaluation.benchmarks.layouts import Layout
from clip_moe.records.files import read_text


@dataclass(frozen=True, kw_only=True)
class Pixels(Layout):
    """Images as bytes one after another in a file.

    Args:
        names: the file of the names of the classes, one a line.
    """

    names: str = ""

    @abstractmethod
    def arrays(self, folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
        """The images, (images, height, width) or with 3 colors, and the numbers of their classes."""

    def other_files(self, folder: Path, split: str) -> Iterable[Path]:
        return [folder / self.names] if self.names else []

    def class_names(self, folder: Path, split: str) -> list[str] | None:
        return list(filter(None, read_text(folder / self.names).replace("_", " ").split("\n"))) if self.names else None

    def rows(self, folder: Path, split: str) -> Dataset:
        pixels, labels = self.arrays(folder, split)
        rows = Dataset.from_dict({"image": list(map(PIL.Image.fromarray, pixels)), "label": labels.tolist()})
        return rows.cast_column("image", Image(decode=False))


@dataclass(frozen=True, kw_only=True)
class CIFAR(Pixels):
    """CIFAR's binary version.

    Args:
        labels: bytes before an image, the last of which is the number of its class.
    """

    files: Sequence[str] = ("SPLIT_batch.bin",)
    names: str = "batches.meta.txt"
    labels: int = 1

    @property
    def shape(self) -> str:
        return f"{self.files[0]} and {self.names} of the binary version (Python's has pickles, which are not read)"

    def arrays(self, folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
        (file,) = self.annotations(folder, split)
        images = np.fromfile(file, np.uint8).reshape(-1, self.labels + 3 * 32 * 32)
        return images[:, self.labels :].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), images[:, self.labels - 1]


@dataclass(frozen=True, kw_only=True)
class MNIST(Pixels):
    """MNIST's own files, unpacked."""

    files: Sequence[str] = ("SPLIT-images*idx3-ubyte", "SPLIT-labels*idx1-ubyte")
    test: str = "t10k"
    content: ClassVar[str] = "a header of 16 and of 8 bytes"

    def arrays(self, folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
        images, labels = self.annotations(folder, split)
        return _idx_array(images), _idx_array(labels)


def _idx_array(file: Path) -> np.ndarray:
    """The bytes of an idx file, in the shape that its header gives: 0, 0, 8, the number of dimensions, and their sizes
    in 4 bytes each."""
    content = np.fromfile(file, np.uint8)
    size = 4 + 4 * int(content[3])
    return content[size:].reshape(content[4:size].view(">i4"))


@dataclass(frozen=True, kw_only=True)
class STL10(Pixels):
    """STL-10's binary version, whose classes begin at 1."""

    files: Sequence[str] = ("SPLIT_X.bin", "SPLIT_y.bin")
    names: str = "class_names.txt"
    content: ClassVar[str] = "images of 96 x 96 pixels, column by column, and a byte each"

    def arrays(self, folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
        images, labels = self.annotations(folder, split)
        pixels = np.fromfile(images, np.uint8).reshape(-1, 3, 96, 96).transpose(0, 3, 2, 1)
        return pixels, np.fromfile(labels, np.uint8) - 1
