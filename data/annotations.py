"""Pairs in one file that names images: a csv or tsv table, or a JSON in the layout of ShareGPT4V, COCO or Karpathy.

Each reader returns paths of images and their captions, a text or several an image. Bad content is a ValueError that
names the file and the place.
"""

import csv
import json
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# Suffixes of tables, and what stands between their cells
TABLES = {".csv": ",", ".tsv": "\t"}

Columns = dict[str, list[str] | list[list[str]]]


def read_json(path: Path) -> Any:
    """Raises FileNotFoundError, and ValueError where it is no JSON."""
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    with path.open(encoding="utf-8-sig") as file:
        return json.load(file)


def holds_list(path: str | Path) -> bool:
    """Whether a JSON is a list, as ShareGPT4V's are, by its first character."""
    with open(path, encoding="utf-8") as file:
        return file.read(1000).lstrip("\ufeff \t\r\n").startswith("[")


def read_tables(paths: Sequence[str]) -> Columns:
    """All columns of tables with the same header. Cells are texts, as they stand there."""
    columns: Columns = {}
    for path in paths:
        lines = _lines(path)
        _, header = next(lines, (1, []))
        if len(set(header)) < len(header) or not header:
            raise ValueError(f"{path}: its first line names no columns, or one twice: {_short(header)}")
        columns = columns or {name: [] for name in header}
        if header != list(columns):
            raise ValueError(f"{path} has the columns {_short(header)}, but {paths[0]} {_short(list(columns))}")
        for number, cells in lines:
            if len(cells) != len(header):
                counts = f"{len(cells)} cells for {len(header)} columns"
                raise ValueError(f"{path}: line {number} has {counts}: {_short(cells)}")
            for name, cell in zip(header, cells, strict=True):
                columns[name].append(cell)
    return columns


def count_rows(path: str) -> int:
    """The rows of a table below its first line. Raises ValueError where it cannot be read."""
    return max(sum(1 for _ in _lines(path)) - 1, 0)


def _lines(path: str) -> Iterator[tuple[int, list[str]]]:
    """The rows of a table that are not empty, as cells, each with the number of the line in which it begins."""
    suffix = Path(path).suffix
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        lines = csv.reader(file, delimiter=TABLES[suffix], strict=True)
        start = 1
        try:
            for cells in lines:
                "".join(cells).encode()  # bytes that are no UTF-8 were read as surrogates
                if suffix == ".tsv" and any("\n" in cell for cell in cells):
                    raise csv.Error(
                        "a cell that begins with a quote goes on beyond the line. Where quotes are part of captions, "
                        "put such cells in quotes and double those within, as csv does"
                    )
                if cells:
                    yield start, cells
                start = lines.line_num + 1
        except UnicodeEncodeError as error:
            raise ValueError(f"{path}: line {start} cannot be read: it is no UTF-8") from error
        except csv.Error as error:
            raise ValueError(f"{path}: line {start} cannot be read: {error}") from error


def read_annotations(path: Path, split: str) -> tuple[list[str], list[list[str]]]:
    """The images of COCO's captions or of a Karpathy split, each with all its captions.

    COCO: {"images": [{"id", "file_name"}], "annotations": [{"image_id", "caption"}]}; images without a caption are left
    out. Karpathy: {"images": [{"filename", "filepath" (perhaps), "split", "sentences": [{"raw"}]}]}.

    Args:
        split: of COCO's, "train", which stands for the whole file; of Karpathy's, one of its own, or several with +.
    """
    content = read_json(path)
    images = content.get("images") if isinstance(content, dict) else None
    if not isinstance(images, list):
        raise ValueError(f"{path} is neither a list of entries (ShareGPT4V) nor has a list of images (COCO, Karpathy)")
    if "annotations" in content:
        if split != "train":
            raise ValueError(f"{path} has no split {split!r}, only train: set split (--split)")
        return _of_coco(path, images, content["annotations"])
    return _of_karpathy(path, images, split)


def _of_coco(path: Path, images: list[Any], annotations: Any) -> tuple[list[str], list[list[str]]]:
    names: dict[Any, str] = {}
    for number, image in enumerate(images):
        name, key = _text(image, "file_name", f"{path}: image {number}"), image.get("id")
        if not isinstance(key, int | str) or key in names:
            raise ValueError(f"{path}: image {number} has no id, or that of another: {_short(image)}")
        names[key] = name
    captions: dict[Any, list[str]] = {key: [] for key in names}
    for number, annotation in enumerate(annotations if isinstance(annotations, list) else [annotations]):
        where = f"{path}: annotation {number}"
        caption, key = _text(annotation, "caption", where), annotation.get("image_id")
        if not isinstance(key, int | str) or key not in captions:
            raise ValueError(f"{where} is of no image of the file: {_short(annotation)}")
        captions[key].append(caption)
    kept = [key for key in names if captions[key]]
    return [names[key] for key in kept], [captions[key] for key in kept]


def _of_karpathy(path: Path, images: list[Any], split: str) -> tuple[list[str], list[list[str]]]:
    wanted, known, names, captions = set(split.split("+")), set(), [], []
    for number, image in enumerate(images):
        where = f"{path}: image {number}"
        name, of_split = _text(image, "filename", where), _text(image, "split", where)
        known.add(of_split)
        sentences = image.get("sentences")
        if not isinstance(sentences, list):
            raise ValueError(f"{where} has no list of sentences: {_short(image)}")
        if of_split in wanted:
            folder = image.get("filepath", "")
            names.append(f"{folder}/{name}" if folder else name)
            captions.append([_text(sentence, "raw", where) for sentence in sentences])
    if not wanted <= known:
        raise ValueError(f"{path} has no split {split!r}, only {', '.join(sorted(known))}: set split (--split)")
    return names, captions


def _text(entry: Any, key: str, where: str) -> str:
    value = entry.get(key) if isinstance(entry, dict) else None
    if not isinstance(value, str):
        raise ValueError(f"{where} has no text {key}: {_short(entry)}")
    return value


def _short(value: Any) -> str:
    return textwrap.shorten(repr(value), 100)
