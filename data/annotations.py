"""Pairs in files that name images: csv and tsv tables, JSON lines, and JSONs in the layout of any list of objects,
ShareGPT4V, COCO or Karpathy.

Images are paths, and the captions of one are a text or several. Bad content is a ValueError that names the file and the
place.
"""

import codecs
import csv
import json
import logging
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from clip_moe.data.local_data import TABLES, suffix_of
from clip_moe.engine.files import read_json
from clip_moe.engine.messages import join_names, shortened, warn_once

logger = logging.getLogger(__name__)

# Name of a folder, or word in a column `split` -> split
SPLIT_OF_NAME = (
    dict.fromkeys(("train", "training"), "train")
    | dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
    | dict.fromkeys(("test", "testing", "eval", "evaluation"), "test")
    | {"restval": "restval"}  # Karpathy's
)
# Bytes that are not UTF-8, as `surrogateescape` keeps them
NOT_UTF8 = re.compile("[\udc80-\udcff]")

Columns = dict[str, list[Any]]


def open_tables(paths: Sequence[str], split: str) -> dict[str, datasets.Dataset]:
    """The rows of tables by split: by their column `split`, or without one all as the split that is asked for. A split
    may also be asked for as the column calls it: `val`."""
    columns, asked = read_tables(paths), split_names(split)
    rows = datasets.Dataset.from_dict(columns)
    return rows_by_split(rows, columns, paths[0], asked) or {asked[0]: rows}


def split_names(split: str) -> list[str]:
    """The splits in `train`, `train[:10%]` and `train+test`."""
    return [part.partition("[")[0].strip() for part in split.split("+")]


def rows_by_split(
    rows: datasets.Dataset, columns: Columns, path: str, asked: Collection[str] = ()
) -> dict[str, datasets.Dataset] | None:
    """The rows of each split where a column `split` names nothing else, or None. A split is called by a word that is
    asked for, or else in full. A row that could not be read has the split of the first one."""
    words = [str(word).strip().lower() for word in columns.get("split", ())]
    names = [word if word in asked and word in SPLIT_OF_NAME else SPLIT_OF_NAME.get(word) for word in words]
    first = next(filter(None, names), None)
    if first is None:
        return None
    if not all(names):
        is_read = [any(cell is not None for cell in cells) for cells in zip(*columns.values(), strict=True)]
        names = [name if is_there else first for name, is_there in zip(names, is_read, strict=True)]
    if not all(names):
        other = shortened(words[names.index(None)])
        warn_once(f"{path}: the column split is ignored, since it also holds {other}")
        return None
    split_of_row = np.array(names)
    return {name: rows.select(np.flatnonzero(split_of_row == name)) for name in dict.fromkeys(names)}


def read_tables(paths: Sequence[str]) -> Columns:
    """
    The columns of tables with the same header. A csv has texts, JSON has values of one kind in each column. Missing
    cells are None. So are all cells of a line or an entry that cannot be read, and a warning names it.

    JSON is lines or a list of objects. Those with `conversations` (ShareGPT4V: turns such as {"from": "gpt", "value":
    text}) and no `caption` get the first answer as theirs. COCO: {"images": [{"id", "file_name"}], "annotations":
    [{"image_id", "caption"}]}; images without a caption are left out. Karpathy: {"images": [{"filename", "filepath"
    (perhaps), "split", "sentences": [{"raw"}]}]}. Both have the columns `image` and `caption`, a list of texts.
    """
    columns: Columns = {}
    length = 0
    for path in paths:
        faults: dict[int | str, object] = {}  # line -> what is wrong
        rows = _objects(path, faults) if TABLES[suffix_of(path)] is None else _lines(path, columns, faults)
        for row in rows:
            for name in row:
                columns.setdefault(name, [None] * length)
            for name, values in columns.items():
                values.append(row.get(name))
            length += 1
        if faults:
            lines, (first, *_) = join_names(map(str, faults)), faults.values()
            kind = "entries" if suffix_of(path) == ".json" else "lines"
            warn_once(f"{path}: unreadable {kind} count as missing: {lines}; the first: {first}")
    return {name: _one_kind(values) for name, values in columns.items()}


def _lines(path: str, columns: Columns, faults: dict[int | str, object]) -> Iterator[dict[str, str | None]]:
    """The lines of a csv or tsv, whose header adds to the columns."""
    lines = _cells(path, faults)
    _, header = next(lines, (1, []))
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None or columns and header != list(columns):
        problem = f"differs from {shortened(list(columns))}"
        problem = problem if twice is None else f"has {twice!r} {header.count(twice)} times"
        raise ValueError(f"{path}: the header {shortened(header)} {problem}: rename its columns")
    columns |= {name: columns.get(name, []) for name in header}
    for number, cells in lines:
        if len(cells) != len(header):
            faults[number] = f"it has {len(cells)} cells for {len(header)} columns: {shortened(cells)}"
            cells = [""] * len(header)
        yield {name: cell if cell.strip() else None for name, cell in zip(header, cells, strict=True)}


def _one_kind(values: list[Any]) -> list[Any]:
    """Values of one kind for a column: all lists if one is a list, and None in place of other kinds among texts."""
    if any(isinstance(value, list) for value in values):
        values = [value if isinstance(value, list | None) else [value] for value in values]
        return [value and [text if isinstance(text, str) else None for text in value] for value in values]
    if any(isinstance(value, str) for value in values):
        return [value if isinstance(value, str) else None for value in values]
    return values


def _objects(path: str, faults: dict[int | str, object]) -> Iterator[dict[str, Any]]:
    """The objects of a JSON or of its lines, as columns."""
    is_whole = suffix_of(path) == ".json"
    entries, captions = _json_entries(Path(path), faults) if is_whole else (_json_lines(path, faults), None)
    for number, entry in entries:
        try:
            row = _row(entry, captions)
        except (KeyError, TypeError) as error:
            row = {}
            faults.setdefault(number, _fault(error, entry))
        if captions is None or row.get("caption") != []:  # COCO has images without captions
            yield row


def _row(entry: Any, captions: Mapping[str, list[str]] | None) -> dict[str, Any]:
    """The columns of an entry.

    Args:
        captions: those of COCO's annotations by the id of their image; None: the entry is no image of COCO or Karpathy.
    """
    entry = {**entry}  # a TypeError where it is no object
    if captions is None:
        if "conversations" not in entry or "caption" in entry:
            return entry
        answers = (turn["value"] for turn in entry["conversations"] if turn["from"] == "gpt")
        return entry | {"caption": next(answers, None)}
    if _is_coco(entry):
        return {"image": entry["file_name"], "caption": captions.get(_key(entry["id"]), [])}
    name = "/".join(filter(None, [entry.get("filepath"), entry["filename"]]))
    return {"image": name, "caption": [sentence["raw"] for sentence in entry["sentences"]], "split": entry["split"]}


def _json_lines(path: str, faults: dict[int | str, object]) -> Iterator[tuple[int, Any]]:
    """The lines that are not empty, with their numbers."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:  # also of letters
                faults[number] = error
                yield number, None


def _json_entries(
    path: Path, faults: dict[int | str, object]
) -> tuple[Iterable[tuple[int, Any]], dict[str, list[str]] | None]:
    """The entries of a JSON with their numbers; and where they are images, the captions of annotations by image."""
    content = read_json(path)
    images = content.get("images") if isinstance(content, dict) else content
    if not isinstance(images, list):
        raise ValueError(f"{path} is neither a list of entries nor an object with a list of images (COCO, Karpathy)")
    if images is content:
        return enumerate(images), None
    captions: dict[str, list[str]] = defaultdict(list)
    for number, annotation in enumerate(content.get("annotations") or ()):
        try:
            captions[_key(annotation["image_id"])].append(annotation["caption"])
        except (KeyError, TypeError) as error:
            faults[f"annotation {number}"] = _fault(error, annotation)
    ids = Counter(_key(image["id"]) for image in images if _is_coco(image))
    twice = next((f"{count} images have the id {key}" for key, count in ids.items() if count > 1), None)
    lost = [key for key in captions if key not in ids]
    if twice or lost and len(lost) == len(captions):
        raise ValueError(f"{path}: {twice or f'no image has the id {lost[0]} of an annotation'}: fix the ids")
    if lost:
        number = sum(len(captions[key]) for key in lost)
        logger.warning(f"{path}: {number} annotations have an image_id without an image, such as {lost[0]}")
    return enumerate(images), captions


def _is_coco(image: Any) -> bool:
    return isinstance(image, dict) and "file_name" in image and "id" in image


def _key(number: Any) -> str:
    """An id of COCO, which may be a number, a text, or a float where pandas wrote it."""
    return str(number).removesuffix(".0")


def _fault(error: Exception, entry: Any) -> str:
    return f"invalid entry ({error!r}): {shortened(entry)}"


def text_of(content: bytes, where: str) -> str | None:
    """The text of a file, or None with a warning if it is not UTF-8 or holds zeros."""
    try:
        text = content.decode(_encoding(content))
    except UnicodeDecodeError as error:
        warn_once(f"the text of {where} is skipped: {error}")
        return None
    if "\0" in text:
        warn_once(f"the text of {where} is skipped: it has zero bytes. Is it UTF-16? Save it as UTF-8")
        return None
    return text


def _encoding(start: bytes) -> str:
    """By the mark of byte order, with which Excel's "Unicode text" begins."""
    return "utf-16" if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"


def _cells(path: str, faults: dict[int | str, object]) -> Iterator[tuple[int, list[str]]]:
    """The rows of a table that are not empty, as cells, each with the number of the line in which it begins. A cell
    that is not UTF-8 is empty."""
    suffix = suffix_of(path)
    with open(path, "rb") as file:
        encoding = _encoding(file.read(2))
    csv.field_size_limit(sys.maxsize)
    with open(path, encoding=encoding, newline="", errors="surrogateescape") as file:
        lines = csv.reader(file, delimiter=TABLES[suffix], strict=True)
        start = 1
        try:
            for cells in lines:
                if suffix == ".tsv" and any("\n" in cell for cell in cells):
                    raise csv.Error("a quoted cell does not end on its line: double its quotes")
                for wrong in filter(NOT_UTF8.search, cells):
                    faults[start] = f"it is not UTF-8: {shortened(wrong)}"
                    cells = ["" if cell == wrong else cell for cell in cells]
                if cells:
                    yield start, cells
                start = lines.line_num + 1
        except csv.Error as error:
            raise ValueError(f"{path}: line {start} cannot be read: {error}") from error


class NoSplit(ValueError):
    """A source has other splits."""

    def __init__(self, source: str | Path, split: str, splits: Iterable[Any]):
        super().__init__(f"{source} has no split {split!r}, only {', '.join(map(str, splits))}: set split")
