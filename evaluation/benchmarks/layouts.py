"""Layouts of benchmarks on disk: one class each, which gives rows.

Rows have a column `image`, and `label` (the number of the class) or `caption` (a list of texts); pairs have `image_0`,
`image_1`, `caption_0`, `caption_1` and `attribute`. No image is decoded here.
"""

import csv
import glob
import json
import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, ClassVar, Literal

from datasets import Dataset

from clip_moe.data.annotations import read_tables
from clip_moe.data.arguments import DataArguments
from clip_moe.data.columns import rename_columns, select_columns
from clip_moe.data.image_folders import PICTURES
from clip_moe.data.sources import open_rows
from clip_moe.engine.digests import file_digests, short_digest
from clip_moe.engine.files import files_in, read_json, read_text
from clip_moe.evaluation.class_names import in_order

# Beside the data, as CLIP_benchmark has them
CLASSES, TEMPLATES = "classnames.txt", "zeroshot_classification_templates.txt"
SHARD_IMAGES = ("webp", "png", "jpg", "jpeg")  # suffixes of images in CLIP_benchmark's shards
# Errors that a damaged copy may raise
FAULTS = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError, OSError, csv.Error)


@dataclass(frozen=True, kw_only=True)
class Layout(ABC):
    """One way in which a data set lies in a folder.

    Args:
        files: patterns of the files that say what a split holds, with SPLIT for its name.
        images: the folder of the images.
        test: what the test split is called in it.
    """

    files: Sequence[str] = ()
    images: str = ""
    test: str = "test"
    content: ClassVar[str] = ""  # of the files, in words

    @property
    def shape(self) -> str:
        """The layout in words."""
        files = " and ".join(self.files) if len(self.files) < 3 else f"{self.files[0]} to {self.files[-1]}"
        return f"{files} with {self.content}, and images in {self.images or 'the same folder'}"

    def for_split(self, text: str, split: str) -> str:
        """A pattern or a text with the name of a split in the place of SPLIT."""
        return text.replace("SPLIT", self.test if split == "test" else split)

    def annotations(self, folder: Path, split: str) -> list[Path]:
        """The files that say what a split holds."""
        return [file for pattern in self.files for file in sorted(folder.glob(self.for_split(pattern, split)))]

    def fits(self, folder: Path, split: str) -> bool:
        """Whether a folder has this layout, as far as its names tell."""
        return all(any(folder.glob(self.for_split(pattern, split))) for pattern in self.files)

    def stamp(self, folder: Path, split: str) -> str:
        """The digest that tells copies apart, wherever they lie: of the names and contents of files."""
        files = sorted({*self.annotations(folder, split), *self.other_files(folder, split)})
        return short_digest([[file.relative_to(folder).as_posix() for file in files], file_digests(files)])

    def other_files(self, folder: Path, split: str) -> Iterable[Path]:
        """The files of a split beside its annotations: its images."""
        try:
            rows = self.rows(folder, split)
        except FAULTS:  # told when it is loaded
            return ()
        values = [value for name in rows.column_names if name.startswith("image") for value in rows[name]]
        paths = {value["path"] if isinstance(value, dict) else value for value in values}
        return filter(Path.is_file, map(Path, filter(None, paths)))

    def class_names(self, folder: Path, split: str) -> list[str] | None:
        """The names or the ids of classes that the data carry themselves, by the number of the class."""
        return None

    @abstractmethod
    def rows(self, folder: Path, split: str) -> Dataset:
        """The rows of a split."""

    @contextmanager
    def reading(self, folder: Path, split: str) -> Iterator[None]:
        """Whatever a copy that is not as it should be raises is a ValueError of one line that says how it should be."""
        try:
            yield
        except FAULTS as error:
            if isinstance(error, ValueError | OSError) and str(folder) in str(error):
                raise
            files = self.annotations(folder, split)
            file = files[0] if len(files) == 1 else folder
            raise ValueError(f"{file} is invalid ({error!r}); expected {self.shape}") from error


def images_in(folder: Path) -> list[Path]:
    """The images in a folder and in those within it, in order, as torchvision walks."""
    return sorted(folder / path for path in files_in(folder) if PurePath(path).suffix.lower() in PICTURES)


def _captioned(folder: Path, captions: dict[str, list[str]]) -> Dataset:
    """Rows of images in a folder, by their names."""
    images = [str(folder / name) for name in captions]
    return Dataset.from_dict({"image": images, "caption": list(captions.values())})


@dataclass(frozen=True, kw_only=True)
class Shards(Layout):
    """Webdataset shards, as CLIP_benchmark exports them (clip_benchmark/webdataset_builder.py).

    Args:
        text: the suffix of what is said about an image: the number of its class (cls), or captions, one a line (txt).
    """

    files: Sequence[str] = ("SPLIT/*.tar",)
    text: Literal["cls", "txt"] = "cls"

    @property
    def shape(self) -> str:
        names = "" if self.text == "txt" else f", {CLASSES} and {TEMPLATES}"
        return f"SPLIT/0.tar, SPLIT/1.tar, ... with a webp, png or jpg and a {self.text} each{names}"

    def rows(self, folder: Path, split: str) -> Dataset:
        count, number = folder / split / "nshards.txt", len(self.annotations(folder, split))
        if count.is_file() and read_text(count).strip() != f"{number}":
            raise ValueError(f"{count} says {read_text(count)[:20]!r}, but there are {number} shards: copy them all")
        arguments = DataArguments(
            source=f"{glob.escape(str(folder / split))}/*.tar",
            split=split,
            image_column=";".join(SHARD_IMAGES),
            caption_column=self.text,
            captions_per_line=self.text == "txt",
        )
        rows = open_rows(arguments)
        if self.text == "txt":
            return select_columns(rows, arguments)
        return rename_columns(rows, {arguments.image_column: "image", self.text: "label"}, arguments)

    def other_files(self, folder: Path, split: str) -> Iterable[Path]:
        return ()  # all images are within


@dataclass(frozen=True, kw_only=True)
class ClassFolders(Layout):
    """A folder of images for each class, all within `images`, called by the class or its id, such as WordNet's. Classes
    have the numbers of their folders in order."""

    images: str = "SPLIT"

    @property
    def shape(self) -> str:
        return f"{self.images and f'{self.images}/'}CLASS/NAME.jpg (classes in the order of their folders)"

    def fits(self, folder: Path, split: str) -> bool:
        return bool(self._classes(folder, split))

    def _classes(self, folder: Path, split: str) -> list[Path]:
        root = folder / self.for_split(self.images, split)
        names = [path.name for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
        return [root / name for name in in_order(names) if not name.startswith((".", "__MACOSX"))]

    def class_names(self, folder: Path, split: str) -> list[str]:
        """Names of folders as words: `001.Black_footed_Albatross` and `ApplyEyeMakeup` have three each."""
        names = (re.sub(r"^\d+\.", "", path.name).replace("_", " ") for path in self._classes(folder, split))
        return [re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name) for name in names]

    def rows(self, folder: Path, split: str) -> Dataset:
        images, labels = [], []
        for label, path in enumerate(self._classes(folder, split)):
            class_images = images_in(path)
            if not class_images:
                raise ValueError(f"{path} has no images: each folder in {path.parent} must hold the images of a class")
            images += map(str, class_images)
            labels += [label] * len(class_images)
        return Dataset.from_dict({"image": images, "label": labels})


@dataclass(frozen=True, kw_only=True)
class Records(Layout):
    """Annotations in JSON. Captions of one image may be in several entries. A file holds an object, a list of objects
    or, if its suffix is none of .json, an object a line.

    Args:
        image: key of the name of the image.
        texts: keys of captions.
        entries: key of the list within a file.
        split_key: whose value is the split; None: all is.
        suffix: ending of image files, where names have none.
        joined: whether an entry's texts are one caption, the pieces of all with ". " between them, see `_joined`.
    """

    image: str = "image"
    texts: Sequence[str] = ()
    entries: str | None = None
    split_key: str | None = None
    suffix: str = ""
    joined: bool = False

    @property
    def content(self) -> str:
        return f"the keys {', '.join(filter(None, [self.image, *self.texts, self.split_key]))} in an entry"

    def rows(self, folder: Path, split: str) -> Dataset:
        captions = defaultdict(list)
        for file in self.annotations(folder, split):
            for entry in self._entries(file):
                if self.split_key is None or entry[self.split_key] == split:
                    texts = [entry[key] for key in self.texts]
                    captions[entry[self.image] + self.suffix] += [_joined(texts)] if self.joined else texts
        return _captioned(folder / self.images, captions)

    def _entries(self, file: Path) -> list[dict[str, Any]]:
        if file.suffix != ".json":
            return [json.loads(line) for line in read_text(file).split("\n") if line.strip()]
        content = read_json(file)
        content = content if self.entries is None else content[self.entries]
        return content if isinstance(content, list) else [content]


def _joined(texts: Sequence[str]) -> str:
    """The pieces of a description as one text. FLAIR cuts it at every full stop and end of a line (`split_caption` in
    src/flair/data.py of ExplainableML/flair)."""
    pieces = re.split(r"\n|</s>|[.]", "\n".join(texts))
    return ". ".join(piece.strip() for piece in pieces if piece.strip())


class Annotations(Layout):
    """COCO's captions (`clip_moe.data.annotations.read_tables`), the first five of each image."""

    content: ClassVar[str] = "images and their captions"

    def rows(self, folder: Path, split: str) -> Dataset:
        (file,) = self.annotations(folder, split)
        columns = read_tables([str(file)])
        pairs = zip(columns["image"], columns["caption"], strict=True)
        return _captioned(folder / self.images, {name: texts[:5] for name, texts in pairs})


class CaptionLines(Layout):
    """A line for each caption: the name of its image, # and a number, a tab, and the caption (Flickr30k)."""

    content: ClassVar[str] = "NAME.jpg#NUMBER, a tab and a caption in each line"

    def rows(self, folder: Path, split: str) -> Dataset:
        (file,) = self.annotations(folder, split)
        captions = defaultdict(list)
        for line in filter(None, read_text(file).split("\n")):
            name, caption = line.split("\t", 1)
            captions[name[: name.rindex("#")]].append(caption.strip())
        return _captioned(folder / self.images, captions)


class CaptionFiles(Layout):
    """A text file for each image, under the same name in another folder, of which the first line counts (Urban-1k,
    eval/retrieval/Urban1k.py of beichenzbc/Long-CLIP)."""

    content: ClassVar[str] = "a caption each"

    def rows(self, folder: Path, split: str) -> Dataset:
        texts = {file.stem: read_text(file).partition("\n")[0].strip() for file in self.annotations(folder, split)}
        images = {image.stem: image for image in images_in(folder / self.images)}
        alone = sorted(images.keys() ^ texts.keys())
        if alone:
            raise ValueError(f"{folder}: {len(alone)} images or captions have no partner, such as {alone[0]}")
        return _captioned(folder / self.images, {images[name].name: [text] for name, text in texts.items()})


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
            raise ValueError(f"{file} must have pairs of rows without blank or multi-line cells")
        columns = defaultdict(list)
        for first, second in zip(statements[::2], statements[1::2], strict=True):
            columns["attribute"].append(first[1])
            for side, (number, _, statement) in enumerate((first, second)):
                # The second statement's image is in the folder of the first's type, too
                columns[f"image_{side}"].append(str(folder / self.images / first[1] / f"{number}.jpg"))
                columns[f"caption_{side}"].append(f"a photo of {statement}")
        return Dataset.from_dict(columns)
