"""How the data of benchmarks lie: a class a layout, each of which gives rows.

Rows have a column `image`, and `label` (the number of the class) or `caption` (a list of texts); pairs have `image_0`,
`image_1`, `caption_0`, `caption_1` and `attribute`. No image is decoded here.
"""

import csv
import glob
import json
import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from datasets import Dataset
from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder

from data.pairs import rename_columns, select_columns
from data.sources import DataArguments, open_rows
from evaluation.own_data import read_text
from evaluation.results import content_hash
from records.files import read_json

# Beside the data, as CLIP_benchmark has them
CLASSES, TEMPLATES = "classnames.txt", "zeroshot_classification_templates.txt"
IMAGE_SUFFIXES = (*ImageFolder.EXTENSIONS, ".avif")
SHARD_IMAGES = ("webp", "png", "jpg", "jpeg")  # suffixes of images in CLIP_benchmark's shards


class Layout(ABC):
    """One way in which a data set lies in a folder."""

    # What lies there, with SPLIT for the name of the split
    shape: str
    # What sets it apart from the protocol of its benchmark, in words
    note: str = ""

    @abstractmethod
    def fits(self, folder: Path, split: str) -> bool:
        """Whether a folder has this layout, as far as its names tell."""

    @abstractmethod
    def rows(self, folder: Path, split: str) -> Dataset:
        """Raises a ValueError that names the file for what cannot be read or is missing."""

    def class_names(self, folder: Path, split: str) -> list[str] | None:
        """The names of classes that the data carry besides those in a file of names, by the number of the class."""
        return None

    @abstractmethod
    def annotations(self, folder: Path, split: str) -> Iterable[Path]:
        """The files that say what a split holds."""

    def stamp(self, folder: Path, split: str) -> str:
        """A hash that tells copies apart, wherever they lie: of what is said about a split. Images are not read."""
        return content_hash([read_text(file) for file in self.annotations(folder, split)])


def _by_stem(files: Iterable[Path]) -> dict[str, Path]:
    """The images among files, by their names without suffixes. Raises a ValueError if two have one name."""
    images: dict[str, Path] = {}
    for file in sorted(files):
        if not file.name.startswith(".") and file.suffix.lower() in IMAGE_SUFFIXES:
            if file.stem in images:
                raise ValueError(f"{images[file.stem]} and {file} have one name: remove one of them")
            images[file.stem] = file
    return images


def _stamp_of_sizes(folder: Path, files: Iterable[Path]) -> str:
    """A hash of the names and sizes of files that are too large to be read for it."""
    return content_hash(sorted([file.relative_to(folder).as_posix(), file.stat().st_size] for file in files))


@dataclass(frozen=True)
class Shards(Layout):
    """Webdataset shards, as CLIP_benchmark exports them (clip_benchmark/webdataset_builder.py).

    Args:
        captions: whether they have captions, one a line, and not the numbers of classes.
    """

    captions: bool = False

    @property
    def text(self) -> str:
        return "txt" if self.captions else "cls"

    @property
    def shape(self) -> str:
        names = "" if self.captions else f", {CLASSES} and {TEMPLATES}"
        return f"SPLIT/0.tar, SPLIT/1.tar, ... with a webp, png or jpg and a {self.text} each{names}"

    def fits(self, folder: Path, split: str) -> bool:
        return any((folder / split).glob("*.tar"))

    def rows(self, folder: Path, split: str) -> Dataset:
        self._require_all(folder / split)
        arguments = DataArguments(source=f"{glob.escape(str(folder / split))}/*.tar", split=split)
        rows = open_rows(arguments)
        image = next((name for name in SHARD_IMAGES if name in rows.column_names), None)
        if image is None or self.text not in rows.column_names:
            found = ", ".join(name for name in rows.column_names if not name.startswith("__"))
            raise ValueError(
                f"the shards in {folder / split} have {found}, but need a webp, png or jpg and a {self.text}"
            )
        if self.captions:
            columns = {"image_column": image, "caption_column": self.text, "captions_per_line": True}
            return select_columns(rows, DataArguments(source=arguments.source, split=split, **columns))
        return rename_columns(rows, {image: "image", self.text: "label"}, arguments)

    def annotations(self, folder: Path, split: str) -> Iterable[Path]:
        return (folder / split).glob("*.tar")

    def stamp(self, folder: Path, split: str) -> str:
        return _stamp_of_sizes(folder, self.annotations(folder, split))

    def _require_all(self, folder: Path) -> None:
        """Raises a ValueError if there are not as many shards as the file that counts them says; it may be missing."""
        count, found = folder / "nshards.txt", len(list(folder.glob("*.tar")))
        wanted = read_text(count).strip() if count.is_file() else f"{found}"
        if wanted != f"{found}":
            raise ValueError(f"{count} says {wanted[:20]!r}, but there are {found} shards: copy all of them")


@dataclass(frozen=True)
class ClassFolders(Layout):
    """A folder of images for each class. Classes have the numbers of their folders in order.

    Args:
        folder: that holds the folders; None: that of the split.
        listed: the layout of the list of a split's images; None: all images are of the split.
            food101: `meta/SPLIT.txt` has CLASS/NAME in each line.
            cub: `images.txt` has NUMBER CLASS/NAME.jpg in each line, and `train_test_split.txt` has NUMBER 1 for what
            is trained on, else NUMBER 0.
    """

    folder: str | None = None
    listed: str | None = None
    LISTS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "food101": ("meta/SPLIT.txt",),
        "cub": ("images.txt", "train_test_split.txt"),
    }

    @property
    def shape(self) -> str:
        lists = "".join(f" and {name}" for name in self.LISTS.get(self.listed, ()))
        return f"{self.folder or 'SPLIT'}/CLASS/NAME.jpg{lists} (classes in the order of their folders)"

    def fits(self, folder: Path, split: str) -> bool:
        lists = self.annotations(folder, split)
        return bool(self._classes(folder, split)) and all(file.is_file() for file in lists)

    def _classes(self, folder: Path, split: str) -> list[Path]:
        root = folder / (self.folder or split)
        folders = sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
        return [path for path in folders if not path.name.startswith(".") and path.name != "__MACOSX"]

    def class_names(self, folder: Path, split: str) -> list[str]:
        """Names of folders as words: `001.Black_footed_Albatross` and `ApplyEyeMakeup` have three each."""
        names = (re.sub(r"^\d+\.", "", path.name).replace("_", " ") for path in self._classes(folder, split))
        return [re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name) for name in names]

    def annotations(self, folder: Path, split: str) -> list[Path]:
        return [folder / name.replace("SPLIT", split) for name in self.LISTS.get(self.listed, ())]

    def stamp(self, folder: Path, split: str) -> str:
        images = (image for path in self._classes(folder, split) for image in self._images(path).values())
        return content_hash([super().stamp(folder, split), _stamp_of_sizes(folder, images)])

    def _images(self, folder: Path) -> dict[str, Path]:
        """Those of a class, by their names without suffixes. Raises a ValueError for what is none and in no list."""
        files = [path for path in folder.iterdir() if not path.name.startswith(".")]
        images = _by_stem(files)
        others = sorted(set(files) - set(images.values()))
        if self.listed is None and (others or not images):
            what = f"{others[0]} is no image" if others else f"{folder} has no images"
            raise ValueError(f"{what}: the folder of a class must hold its images and nothing else")
        return images

    def rows(self, folder: Path, split: str) -> Dataset:
        found = {}  # CLASS/NAME -> the image and the number of its class
        for label, path in enumerate(self._classes(folder, split)):
            found |= {f"{path.name}/{name}": (str(image), label) for name, image in self._images(path).items()}
        chosen = found.keys() if self.listed is None else self._listed(folder, split)
        missing = sorted(chosen - found.keys())
        if missing:
            raise ValueError(f"{len(missing)} images of the split {split} are not in {folder}; one is {missing[0]}")
        images, labels = zip(*(found[name] for name in found if name in chosen), strict=True) if chosen else ((), ())
        return Dataset.from_dict({"image": list(images), "label": list(labels)})

    def _listed(self, folder: Path, split: str) -> set[str]:
        """CLASS/NAME of the images of a split, without suffixes."""
        files = self.annotations(folder, split)
        try:
            if self.listed == "food101":
                return set(read_text(files[0]).split())
            names, flags = (dict(line.split() for line in read_text(file).splitlines()) for file in files)
            return {
                str(Path(name).with_suffix(""))
                for key, name in names.items()
                if (flags[key] == "1") == (split == "train")
            }
        except (KeyError, ValueError) as error:
            raise ValueError(f"{' or '.join(map(str, files))} is not as it should be: {error!r}") from error


@dataclass(frozen=True)
class Records(Layout):
    """Annotations in JSON. Captions of one image may be in several entries.

    Args:
        files: patterns of files -> the folder that the names of their images start from. A file holds an object, a list
            of objects or, if its suffix is none of .json, an object a line.
        image: keys of which one has the name of the image.
        texts: keys of captions. `a.b` is the key b of each object in the list a.
        label: key of the number of the class, in place of captions.
        entries: key of the list within a file.
        split_key: whose value is the split; None: all is.
        suffix: of images whose names have none.
        pieces: what becomes of the pieces of an entry's texts, see `cut`. None: texts are not cut. "joined": they are
            one caption, with ". " between them. "apart": each is a caption.
        note: see `Layout`.
    """

    files: Mapping[str, str]
    image: Sequence[str]
    texts: Sequence[str] = ()
    label: str | None = None
    entries: str | None = None
    split_key: str | None = None
    suffix: str = ""
    pieces: Literal["joined", "apart"] | None = None
    note: str = ""

    @property
    def shape(self) -> str:
        places = (f"{pattern} with images in {folder or 'the same folder'}" for pattern, folder in self.files.items())
        keys = [" or ".join(self.image), *self.texts, *filter(None, [self.label, self.split_key])]
        return f"{', '.join(places)}, and in every entry the keys {', '.join(keys)}"

    def fits(self, folder: Path, split: str) -> bool:
        return all(any(folder.glob(pattern)) for pattern in self.files)

    def annotations(self, folder: Path, split: str) -> Iterator[Path]:
        return (file for pattern in self.files for file in sorted(folder.glob(pattern)))

    def rows(self, folder: Path, split: str) -> Dataset:
        found: dict[str, Any] = {}  # image -> its captions, or the number of its class
        for entry, file, root in self._entries(folder):
            try:
                if self.split_key is None or entry[self.split_key] == split:
                    name = next(str(entry[key]) for key in self.image if key in entry)
                    image = str(root / (name if Path(name).suffix else f"{name}{self.suffix}"))
                    if self.label is None:
                        found[image] = found.get(image, []) + self._captions(entry)
                    elif found.setdefault(image, _whole(entry[self.label])) != _whole(entry[self.label]):
                        raise ValueError(f"{image} has two labels")
            except (KeyError, TypeError, ValueError, StopIteration) as error:
                raise ValueError(
                    f"an entry of {file} is not as it should be ({error!r}); there must be {self.shape}"
                ) from error
        column = "caption" if self.label is None else "label"
        return Dataset.from_dict({"image": list(found), column: list(found.values())})

    def _entries(self, folder: Path) -> Iterator[tuple[dict[str, Any], Path, Path]]:
        """Objects, with their files and the folders of their images."""
        for pattern, images in self.files.items():
            for file in sorted(folder.glob(pattern)):
                content = read_json(file) if file.suffix == ".json" else _read_json_lines(file)
                if self.entries is not None:
                    content = content.get(self.entries) if isinstance(content, dict) else None
                for entry in content if isinstance(content, list) else [content]:
                    if not isinstance(entry, dict):
                        raise ValueError(f"{file} holds no objects; there must be {self.shape}")
                    yield entry, file, folder / images

    def _captions(self, entry: dict[str, Any]) -> list[str]:
        texts = [text for key in self.texts for text in _reach(entry, key)]
        if self.pieces is None:
            return texts
        pieces = cut("\n".join(texts))
        return pieces if self.pieces == "apart" else [". ".join(pieces)]


def _whole(label: Any) -> int:
    """The number of a class. Raises a ValueError for any other: 0.7 is not 0."""
    if not isinstance(label, int | str) or isinstance(label, bool):
        raise ValueError(f"the label {label!r} is no whole number")
    return int(label)


def cut(text: str) -> list[str]:
    """The pieces of a description, as FLAIR cuts it, at every full stop and end of a line (`split_caption` in
    src/flair/data.py of ExplainableML/flair)."""
    return [piece.strip() for piece in re.split(r"\n|</s>|[.]", text) if piece.strip()]


def _read_json_lines(file: Path) -> list[Any]:
    entries = []
    for number, line in enumerate(read_text(file).split("\n"), start=1):
        try:
            entries += [json.loads(line)] if line.strip() else []
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number} of {file} is no JSON: {error}") from error
    return entries


def _reach(entry: dict[str, Any], key: str) -> list[str]:
    """The texts under a key, see `Records.texts`."""
    name, _, rest = key.partition(".")
    value = entry[name]
    found = [item[rest] for item in value] if rest else [value]
    if not all(isinstance(text, str) for text in found):
        raise TypeError(f"{key} holds no text")
    return found


@dataclass(frozen=True)
class CocoCaptions(Layout):
    """COCO's annotations, of which the first captions of each image count."""

    file: str = "annotations/captions_val2017.json"
    images: str = "val2017"
    captions: int = 5

    @property
    def shape(self) -> str:
        return f"{self.file} with images and annotations, and {self.images}/FILE_NAME"

    def fits(self, folder: Path, split: str) -> bool:
        return (folder / self.file).is_file()

    def annotations(self, folder: Path, split: str) -> list[Path]:
        return [folder / self.file]

    def rows(self, folder: Path, split: str) -> Dataset:
        file, captions = folder / self.file, defaultdict(list)
        content = read_json(file)
        try:
            names = {image["id"]: str(folder / self.images / image["file_name"]) for image in content["images"]}
            for annotation in content["annotations"]:
                captions[annotation["image_id"]] += _reach(annotation, "caption")
        except (KeyError, TypeError) as error:
            raise ValueError(f"{file} is not as it should be ({error!r}); there must be {self.shape}") from error
        numbers = sorted(names)
        first = [captions[number][: self.captions] for number in numbers]
        return Dataset.from_dict({"image": [names[number] for number in numbers], "caption": first})


@dataclass(frozen=True)
class CaptionLines(Layout):
    """A line for each caption: the name of its image, # and a number, a tab, and the caption (Flickr30k)."""

    file: str = "results_20130124.token"
    images: str = "flickr30k-images"

    @property
    def shape(self) -> str:
        return f"{self.file} with NAME.jpg#NUMBER, a tab and a caption in each line, and {self.images}/NAME.jpg"

    def fits(self, folder: Path, split: str) -> bool:
        return (folder / self.file).is_file()

    def annotations(self, folder: Path, split: str) -> list[Path]:
        return [folder / self.file]

    def rows(self, folder: Path, split: str) -> Dataset:
        captions = defaultdict(list)
        for number, line in enumerate(read_text(folder / self.file).split("\n"), start=1):
            name, tab, caption = line.partition("\t")
            image, mark, _ = name.rpartition("#")
            if line and not (tab and mark):
                where = f"line {number} of {folder / self.file}"
                raise ValueError(f"{where} is not as it should be; there must be {self.shape}")
            if line:
                captions[str(folder / self.images / image)].append(caption.strip())
        return Dataset.from_dict({"image": list(captions), "caption": list(captions.values())})


@dataclass(frozen=True)
class CaptionFiles(Layout):
    """A text file for each image, under the same name in another folder, of which the first line counts (Urban-1k,
    eval/retrieval/Urban1k.py of beichenzbc/Long-CLIP)."""

    images: str = "image"
    captions: str = "caption"

    @property
    def shape(self) -> str:
        return f"{self.images}/NAME.jpg and {self.captions}/NAME.txt"

    def fits(self, folder: Path, split: str) -> bool:
        return any((folder / self.captions).glob("*.txt")) and (folder / self.images).is_dir()

    def annotations(self, folder: Path, split: str) -> list[Path]:
        return sorted((folder / self.captions).glob("*.txt"))

    def rows(self, folder: Path, split: str) -> Dataset:
        files = self.annotations(folder, split)
        images = _by_stem((folder / self.images).iterdir())
        alone = sorted(images.keys() ^ {file.stem for file in files})
        if alone:
            raise ValueError(f"{len(alone)} images in {folder} have no caption or captions no image; one is {alone[0]}")
        captions = [[read_text(file).partition("\n")[0].strip()] for file in files]
        return Dataset.from_dict({"image": [str(images[file.stem]) for file in files], "caption": captions})


@dataclass(frozen=True)
class ImagePairs(Layout):
    """Statements of which two that follow each other are of a pair of images (MMVP-VLM, scripts/evaluate_vlm.py of
    tsb0601/MMVP).

    Args:
        template: makes a caption of a statement.
    """

    template: str = "a photo of {}"
    shape: str = "Questions.csv with number, type and statement in each row, and MLLM_VLM Images/TYPE/NUMBER.jpg"

    def fits(self, folder: Path, split: str) -> bool:
        return (folder / "Questions.csv").is_file()

    def annotations(self, folder: Path, split: str) -> list[Path]:
        return [folder / "Questions.csv"]

    def rows(self, folder: Path, split: str) -> Dataset:
        (file,) = self.annotations(folder, split)
        lines = [line for line in read_text(file).split("\n") if line.strip()] or [""]
        _, *statements = rows = list(csv.reader(lines, strict=True))
        pairs = list(zip(statements[::2], statements[1::2], strict=False))
        are_whole = all(len(row) == 3 and all(map(str.strip, row)) for row in statements)
        # A quote that is not closed makes one row of several lines
        if len(rows) < len(lines) or not are_whole or len(statements) != 2 * len(pairs):
            raise ValueError(
                f"{file} must have pairs of rows with three cells each, none blank or of several lines: {self.shape}"
            )
        columns: dict[str, list[str]] = {"attribute": [first[1] for first, _ in pairs]}
        for side in range(2):
            # The second statement's image is in the folder of the first's type, too
            images = (folder / "MLLM_VLM Images" / pair[0][1] / f"{pair[side][0]}.jpg" for pair in pairs)
            columns[f"image_{side}"] = [str(image) for image in images]
            columns[f"caption_{side}"] = [self.template.format(pair[side][2]) for pair in pairs]
        return Dataset.from_dict(columns)
