"""Pairs in one file that names images: a csv or tsv table, or a JSON in the layout of ShareGPT4V, COCO or Karpathy.

Images are paths, and the captions of one are a text or several. Bad content is a ValueError that names the file and the
place.
"""

import ast
import codecs
import csv
import io
import json
import logging
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import datasets

from records.files import read_json
from records.messages import shortened, warn_once

logger = logging.getLogger(__name__)

# Suffixes of tables, and what stands between their cells; None: each line is a JSON object
TABLES = {".csv": ",", ".tsv": "\t", ".jsonl": None}
# What stands for a missing cell of a csv, as pandas reads it
MISSING = {"", "NA", "N/A", "n/a", "NULL", "null", "None", "NaN", "nan", "-nan", "-NaN", "<NA>", "#N/A", "#NA"}

Columns = dict[str, list[Any]]
# Names in the lines of a table of JSON objects, which are as many columns
MOST_COLUMNS = 1000


def holds_list(path: str | Path) -> bool:
    """Whether a JSON is a list, as ShareGPT4V's are, by its first character."""
    with open(path, encoding="utf-8-sig") as file:
        while part := file.read(1000):  # not a line: a whole file may be one
            if part := part.lstrip():
                return part.startswith("[")
    return False


def open_json(path: Path, split: str, image_column: str, caption_column: str) -> datasets.Dataset:
    """The pairs of a JSON, see `read_annotations`, as columns of these names."""
    images, captions = read_annotations(path, split)
    text = datasets.Value("string")
    if len({*map(type, captions)}) > 1:
        raise ValueError(f"{path} mixes layouts: some images have one caption, others a list. Split it in two")
    of_texts = any(isinstance(caption, str) for caption in captions)
    features = {image_column: text, caption_column: text if of_texts else datasets.List(text)}
    return datasets.Dataset.from_dict({image_column: images, caption_column: captions}, datasets.Features(features))


def open_tables(paths: Sequence[str], split: str) -> datasets.Dataset:
    """The rows of tables, whatever the split is called; or a slice of them, as `train[:20%]`."""
    rows = datasets.Dataset.from_dict(read_tables(paths))
    if "[" in split:
        name = split.partition("[")[0]
        (part,) = datasets.ReadInstruction.from_spec(split).to_absolute({name: len(rows)})
        rows = rows.select(range(part.from_, part.to))
    elif "+" in split:
        raise ValueError("it is one table without splits: take it whole, or a slice as train[:20%]")
    return rows


def read_tables(paths: Sequence[str]) -> Columns:
    """The columns of tables with the same header. A cell is the text that stands there, or None if it is missing. If
    one is a list of texts, in JSON or Python, its column holds lists."""
    columns: Columns = {}
    for path in paths:
        if Path(path).suffix == ".jsonl":
            _add_objects(columns, path)
            continue
        lines = _lines(path)
        _, header = next(lines, (1, []))
        twice = next((name for name in header if header.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"{path} has the column {twice!r} {header.count(twice)} times: rename all but one")
        columns = columns or {name: [] for name in header}
        if header != list(columns):
            raise ValueError(f"{path} has the columns {shortened(header)}, but {paths[0]} {shortened(list(columns))}")
        for number, cells in lines:
            if len(cells) != len(header):
                counts = f"{len(cells)} cells for {len(header)} columns"
                raise ValueError(f"{path}: line {number} has {counts}: {shortened(cells)}")
            for name, cell in zip(header, cells, strict=True):
                columns[name].append(None if cell.strip() in MISSING else cell)
    return {name: _with_lists(cells) for name, cells in columns.items()}


def _with_lists(cells: list[Any]) -> list[Any]:
    """Cells as lists, if one of them is a list of texts."""
    lists = {cell: _list_of(cell) for cell in set(filter(_may_be_list, cells))}
    if not any(lists.values()):
        return cells
    plain = {cell: [cell] for cell, texts in lists.items() if texts is None}
    return [(lists | plain).get(cell, [cell]) if isinstance(cell, str) else cell for cell in cells]


def _may_be_list(cell: Any) -> bool:
    return isinstance(cell, str) and cell.strip().startswith("[") and cell.strip().endswith("]")


def _list_of(cell: str) -> list[str] | None:
    """The texts of a list as JSON, Python or numpy, which has no commas, writes it; None: it is none."""
    try:
        texts = json.loads(cell)
    except (ValueError, RecursionError):
        texts = _python_list(cell)
    if not isinstance(texts, list) or not all(isinstance(text, str | None) for text in texts):
        return None
    return [text for text in texts if text is not None]


def _python_list(cell: str) -> list[str | None] | None:
    try:
        tokens = [
            token for token in tokenize.generate_tokens(io.StringIO(cell.strip()).readline) if token.string.strip()
        ]
        if any(token.type != tokenize.STRING and token.string not in ("[", "]", ",", "None") for token in tokens):
            return None
        said = [token.string for token in tokens if token.string not in ("[", "]", ",")]
        return [ast.literal_eval(text) for text in said]
    except (ValueError, SyntaxError, tokenize.TokenError):
        return None


def _add_objects(columns: Columns, path: str) -> None:
    """Add the lines of a table of JSON objects. What one lacks is None."""
    length = len(next(iter(columns.values()), []))
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line.decode("utf-8-sig"))
            except ValueError as error:  # also of letters
                raise ValueError(f"{path}: line {number} cannot be read: {error}") from error
            if not isinstance(entry, dict):
                raise ValueError(f"{path}: line {number} is no object with names: {shortened(entry)}")
            for name in entry:
                columns.setdefault(name, [None] * length)
            if len(columns) > MOST_COLUMNS:
                raise ValueError(
                    f"{path} has more than {MOST_COLUMNS} names in its lines: name what a picture has alike"
                )
            for name, values in columns.items():
                values.append(entry.get(name))
            length += 1


def text_of(content: bytes, where: str) -> str | None:
    """The text of a file, or None where it is not UTF-8, which is told."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        warn_once(logger, f"the text of {where} is missing: {error}")
        return None


def _lines(path: str) -> Iterator[tuple[int, list[str]]]:
    """The rows of a table that are not empty, as cells, each with the number of the line in which it begins."""
    suffix = Path(path).suffix
    with open(path, "rb") as file:  # Excel's "Unicode text" begins with a mark of byte order
        encoding = "utf-16" if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"
    with open(path, encoding=encoding, newline="") as file:
        lines = csv.reader(file, delimiter=TABLES[suffix], strict=True)
        start = 1
        try:
            for cells in lines:
                if suffix == ".tsv" and any("\n" in cell for cell in cells):
                    raise csv.Error(
                        "a cell that begins with a quote goes on beyond the line. Where quotes are part of captions, "
                        "put such cells in quotes and double those within, as csv does"
                    )
                if cells:
                    yield start, cells
                start = lines.line_num + 1
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: line {_first_undecodable(path)} cannot be read: {error}") from error
        except csv.Error as error:
            raise ValueError(f"{path}: line {start} cannot be read: {error}") from error


def _first_undecodable(path: str) -> int:
    """The number of the first line that is not UTF-8: a reader decodes ahead of the line that it returns."""
    number = 0
    with open(path, "rb") as file, suppress(UnicodeDecodeError):
        for number, line in enumerate(file, start=1):  # noqa: B007  which line it was
            line.decode()
    return number


def read_annotations(path: Path, split: str | None) -> tuple[list[str], list[str] | list[list[str]]]:
    """The images of a JSON and their captions, a text each in ShareGPT4V's layout, else all of an image.

    ShareGPT4V: [{"image", "conversations": [{"from": "gpt", "value": caption}]}]. BLIP: [{"image", "caption"}], with a
    text or several.
    COCO: {"images": [{"id", "file_name"}], "annotations": [{"image_id", "caption"}]}; images without a caption are left
    out. Karpathy: {"images": [{"filename", "filepath" (perhaps), "split", "sentences": [{"raw"}]}]}.

    Args:
        split: Karpathy's, or several with +; None: all. The other layouts have "train" alone.
    """
    content = read_json(path)
    images = content.get("images") if isinstance(content, dict) else content
    if not isinstance(images, list):
        raise ValueError(f"{path} is neither a list of entries (ShareGPT4V) nor has a list of images (COCO, Karpathy)")
    captions: dict[Any, list[str]] = defaultdict(list)
    for number, annotation in enumerate(content.get("annotations", ()) if isinstance(content, dict) else ()):
        with _entry(path, f"annotation {number}", annotation):
            captions[annotation["image_id"]].append(_text(annotation["caption"]))
    pairs, splits, ids = [], set(), Counter()
    for number, image in enumerate(images):
        with _entry(path, f"image {number}", image):
            name, of_split, texts = _of_image(image, captions)
        if _is_coco(image):
            ids[image["id"]] += 1
        splits.add(of_split)
        # COCO has images without captions; an empty one is counted later
        if texts != [] and (split is None or of_split in split.split("+")):
            pairs.append((name, texts))
    if ids:
        _require_own_captions(path, ids, captions)
    splits = splits or {"train"}
    if split is not None and not splits.issuperset(split.split("+")):
        raise ValueError(no_split(path, split, sorted(splits)))
    return [name for name, _ in pairs], [texts for _, texts in pairs]


def no_split(source: str | Path, split: str, splits: Iterable[Any]) -> str:
    """An error's text."""
    return f"{source} has no split {split!r}, only {', '.join(map(str, splits))}: set split (--split)"


def _of_image(image: dict[str, Any], captions: Mapping[Any, list[str]]) -> tuple[str, str, str | list[str]]:
    """The path, the split and the captions of one."""
    if "conversations" in image:
        answer = next((turn["value"] for turn in image["conversations"] if turn["from"] == "gpt"), None)
        return _text(image["image"]), "train", _text(answer)
    if "image" in image and "caption" in image:
        texts = image["caption"]
        return _text(image["image"]), "train", [*map(_text, texts)] if isinstance(texts, list) else _text(texts)
    if _is_coco(image):
        return _text(image["file_name"]), "train", captions.get(image["id"], [])
    name = "/".join(filter(None, [image.get("filepath"), _text(image["filename"])]))
    return name, _text(image["split"]), [_text(sentence["raw"]) for sentence in image["sentences"]]


def _is_coco(image: dict[str, Any]) -> bool:
    return "file_name" in image and "conversations" not in image


def _require_own_captions(path: Path, ids: Mapping[Any, int], captions: Mapping[Any, list[str]]) -> None:
    """Raises a ValueError where COCO's images would get each other's captions, or none by the kind of their ids."""
    twice = next((key for key, count in ids.items() if count > 1), None)
    if twice is not None:
        raise ValueError(f"{path}: {ids[twice]} images have the id {twice!r}, hence the same captions: make ids unique")
    lost = [key for key in captions if key not in ids]
    by_text = {str(key): key for key in ids}
    wrong = next((key for key in lost if len(lost) == len(captions) or str(key) in by_text), None)
    if wrong is not None:
        like = by_text.get(str(wrong), next(iter(ids)))
        raise ValueError(f"{path}: no image has the id {wrong!r} of an annotation, only as {like!r}: make them agree")
    if lost:
        logger.warning(
            "%s: %d annotations have the image_id of no image, such as %s: they are not read",
            path, sum(len(captions[key]) for key in lost), shortened(lost[0]),
        )  # fmt: skip


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


@contextmanager
def _entry(path: Path, place: str, entry: Any) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: {place} is not as it should be ({error!r}): {shortened(entry)}") from error
