"""Folders of pictures: which split a picture belongs to, and what is said of it beside it."""

import logging
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import datasets
import numpy as np
import PIL.Image
import pyarrow.parquet

from data.annotations import SPLIT_OF_NAME, read_tables, split_column, text_of
from data.images import FORMATS
from records.files import files_in, is_hidden
from records.messages import warn_once

logger = logging.getLogger(__name__)

# Tables of what is said of pictures, by their column `file_name`
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
# Endings of pictures, and of files of texts beside them
PICTURES = {ending for ending, name in PIL.Image.registered_extensions().items() if name in FORMATS}
TEXTS = (".txt", ".caption")


class Pictures(NamedTuple):
    """The pictures of one split.

    Args:
        rows: column `image`, of paths, and what is said of them.
        files: all that `rows` was read from: pictures, tables and texts.
    """

    rows: datasets.Dataset
    files: list[str]


def open_folder(folder: str) -> dict[str, Pictures]:
    """The pictures of a folder by split, in the order of their paths. Links are followed, hidden files are not read.

    Folders `train`, `test`, `validation` and the like at the top are splits; without them, everything is "train". So is
    everything where one of several folders of pictures happens to be called so, as a class of VOC is.

    A table, `metadata.csv`, `.jsonl` or `.parquet`, beside the pictures or above them, has a line for each, which gives
    its columns. Without one, the column `caption` comes from a text file beside each picture, and `label` from its
    folder if all folders have one depth. A warning counts the files that are not read.
    """
    folder, paths = _top(folder)
    pictures = [path for path in paths if is_picture(os.path.join(folder, path))]
    if not pictures:
        raise ValueError(f"{folder} has no pictures of the formats {', '.join(FORMATS)}")
    parts, by_split = {}, _by_split(pictures, paths)
    own = {
        name: [path for path in pictures if tops is None or "/" in path and path.partition("/")[0] in tops]
        for name, tops in by_split.items()
    }
    has_splits = None not in by_split.values()
    labels = _labels([path for of_split in own.values() for path in of_split], has_splits, paths)
    for name, tops in by_split.items():
        within = [path for path in paths if tops is None or "/" not in path or path.partition("/")[0] in tops]
        elsewhere = {os.path.join(folder, path) for path in {*pictures}.difference(own[name])}
        parts[name] = _read(folder, own[name], within, elsewhere, labels)
    if not has_splits:
        parts = _by_column(parts["train"])
    read = {file for part in parts.values() for file in part.files}
    warn_of_unread(folder, [path for path in paths if os.path.join(folder, path) not in read])
    return parts


def warn_of_unread(folder: str, paths: list[str]) -> None:
    """Warns of the files of a folder that are not read, with their number by ending."""
    if paths:
        endings = Counter(PurePath(path).suffix or "without an ending" for path in paths)
        kinds = ", ".join(f"{count} {ending}" for ending, count in endings.most_common(5))
        number = "1 file is" if len(paths) == 1 else f"{len(paths)} files are"
        warn_once(logger, f"{folder}: {number} not read ({kinds}), such as {paths[0]}")


def is_picture(path: str) -> bool:
    """By its ending, or without one by its first bytes. A link to nothing is none."""
    suffix = PurePath(path).suffix.lower()
    if suffix:
        return suffix in PICTURES and os.path.exists(path)
    try:
        with PIL.Image.open(path, formats=FORMATS[:-1]):  # TGA takes anything
            return True
    except (OSError, ValueError, PIL.Image.DecompressionBombError):
        return False


def _top(folder: str) -> tuple[str, list[str]]:
    """The folder at which splits are looked for, below folders that have nothing beside one other; and the paths of all
    files below it, in their order, from there."""
    folder = os.path.abspath(folder)
    while True:
        entries = [entry for entry in os.scandir(folder) if not is_hidden(entry.name)]
        if len(entries) != 1 or not entries[0].is_dir() or _split_of(entries[0].name):
            break
        folder = entries[0].path
    return folder, sorted(files_in(folder))


def _split_of(name: str) -> str | None:
    """The split that a folder is called after, perhaps with a number: `train`, `val2017`."""
    word = re.fullmatch(r"([a-z]+)[-_. ]?[0-9]*", name.lower())
    return word and SPLIT_OF_NAME.get(word[1])


def _by_split(pictures: list[str], paths: list[str]) -> dict[str, set[str] | None]:
    """The folders at the top of each split; None: everything."""
    depths = {path: path.count("/") for path in pictures}
    tops = {path.partition("/")[0] for path in pictures if depths[path]}
    splits = {
        split: {top for top in tops if _split_of(top) == split} for split in dict.fromkeys(SPLIT_OF_NAME.values())
    }
    splits = {split: named for split, named in splits.items() if named}
    has_table = any(path.startswith("train/") and PurePath(path).name in METADATA for path in paths)
    is_class = splits == {"train": {"train"}} and len(tops) > 1 and set(depths.values()) == {1} and not has_table
    if splits and not is_class:
        return splits
    if is_class:
        warn_once(
            logger,
            "train is a class like the folders of pictures beside it: for a split, move these away or add "
            "train/metadata.csv",
        )
    below = next((path for path in pictures if any(map(_split_of, path.split("/")[1:-1]))), None)
    if below is not None:
        warn_once(
            logger,
            f"splits are looked for at the top of a folder, and {below} is below it: name the folder above its split",
        )
    return {"train": None}


def _labels(pictures: list[str], has_splits: bool, paths: list[str]) -> dict[str, str]:
    """The class of each picture: the name of its folder, or its path from the split where two folders have one name.
    None have one unless all are in folders of one depth, and in several."""
    folders = {path: os.path.dirname(path.partition("/")[2] if has_splits else path) for path in pictures}
    depths = {path: folder.count("/") + bool(folder) for path, folder in folders.items()}
    names = {folder: os.path.basename(folder) for folder in folders.values()}
    first, last = min(pictures, key=depths.get), max(pictures, key=depths.get)
    if depths[first] < depths[last]:
        if not any(path.lower().endswith(TEXTS) or PurePath(path).name in METADATA for path in paths):
            warn_once(logger, f"no labels: folders have several depths, as those of {first} and {last}")
        return {}
    if len(names) == 1:
        return {}
    if len(set(names.values())) < len(names):
        twice = next(name for name, count in Counter(names.values()).items() if count > 1)
        warn_once(logger, f"classes are called by their paths, since several folders are called {twice}")
        names = {folder: folder for folder in names}
    return {path: _same(names[folder]) for path, folder in folders.items()}


def _by_column(part: Pictures) -> dict[str, Pictures]:
    """The pictures by the column `split` of their table, if it names splits."""
    columns = part.rows.to_dict() if "split" in part.rows.column_names else {}
    splits = split_column(columns, part.files[-1])
    if splits is None:
        return {"train": part}
    parts = {}
    for name in dict.fromkeys(splits.tolist()):
        rows = part.rows.select(np.flatnonzero(splits == name))
        others = {*part.rows["image"]}.difference(rows["image"])
        parts[name] = Pictures(rows, [file for file in part.files if file not in others])
    return parts


def _read(
    folder: str, pictures: list[str], paths: list[str], elsewhere: set[str], labels: Mapping[str, str]
) -> Pictures:
    tables = [path for path in paths if PurePath(path).name in METADATA]
    files = [os.path.join(folder, path) for path in pictures]
    columns: dict[str, list[Any]] = {"image": files.copy()}
    if tables:
        columns, files = _of_tables([os.path.join(folder, path) for path in tables], files, elsewhere)
        if len(files) < len(pictures):
            number = len(pictures) - len(files)
            warn_once(logger, f"{folder}: {number} of {len(pictures)} pictures have no line in {', '.join(tables)}")
    else:
        by_name = _texts(folder, paths)
        texts = [by_name.get(_same(os.path.splitext(file)[0])) for file in files]
        if any(texts):
            if not all(texts):
                lacking = [file for file, text in zip(files, texts, strict=True) if not text]
                number = f"{len(lacking)} of {len(files)} pictures"
                warn_once(logger, f"{number} have no text beside them, such as {lacking[0]}")
            columns["caption"] = [text and text_of(Path(text).read_bytes(), text) for text in texts]
        if labels:
            columns["label"] = [labels[path] for path in pictures]
        files += filter(None, texts)
    rows = datasets.Dataset.from_dict(columns)
    if not tables and labels:
        rows = rows.cast_column("label", datasets.ClassLabel(names=sorted(set(labels.values()))))
    return Pictures(rows, files + [os.path.join(folder, path) for path in tables])


def _texts(folder: str, paths: Iterable[str]) -> dict[str, str]:
    """Files of texts by their paths without the ending."""
    texts = [os.path.join(folder, path) for path in paths if path.lower().endswith(TEXTS)]
    return {_same(os.path.splitext(path)[0]): path for path in texts}


def _same(path: str) -> str:
    """A file system may write letters with accents otherwise than another one, or a table."""
    return unicodedata.normalize("NFC", path)


def _of_tables(tables: list[str], pictures: list[str], elsewhere: set[str]) -> tuple[dict[str, list[Any]], list[str]]:
    """The columns of tables, with paths in place of names, in the order of the paths, and which pictures these name.

    A column `file_name` becomes `image`; without it, one as `left_file_name` becomes `left`. Lines of pictures of other
    splits are left out, and those of pictures that are nowhere stay, as unreadable ones.
    """
    path_by_name = {_same(path): path for path in {*pictures, *elsewhere}}
    rows, names, raw = [], [], []
    twice = [place for place, count in Counter(map(os.path.dirname, tables)).items() if count > 1]
    if twice:
        raise ValueError(f"{twice[0]} has several tables, {' and '.join(map(os.path.basename, tables))}: keep one")
    for table in tables:
        columns = pyarrow.parquet.read_table(table).to_pydict() if table.endswith(".parquet") else read_tables([table])
        named = {name: name.removesuffix("_file_name") for name in columns if name.endswith("_file_name")}
        named = {"file_name": "image"} if "file_name" in columns else named
        if not named:
            raise ValueError(f"{table} has no column file_name, which names the picture of each line")
        place = os.path.dirname(table)
        for column in named:
            paths = [name and os.path.normpath(os.path.join(place, name)) for name in columns[column]]
            outside = next((path for path in paths if path and not path.startswith(place + os.sep)), None)
            if outside is not None:
                raise ValueError(f"{table} names {outside}, which is not below it: move the picture or the table")
            columns[column] = [path and path_by_name.get(_same(path), path) for path in paths]
        raw, names = raw or list(columns), names or [named.get(name, name) for name in columns]
        if len(set(names)) < len(names):
            raise ValueError(f"{table} has two columns for one of {', '.join(columns)}: rename one")
        if columns.keys() != set(raw):
            raise ValueError(f"{table} has the columns {', '.join(columns)}, but {tables[0]} {', '.join(raw)}")
        columns = {named.get(name, name): values for name, values in columns.items()}
        rows += zip(*(columns[name] for name in names), strict=True)
    of_images = [number for number, name in enumerate(names) if name in named.values()]
    across = [row for row in rows if 0 < sum(row[number] in elsewhere for number in of_images) < len(of_images)]
    if across:
        raise ValueError(f"{tables[0]} has a line whose pictures are of two splits: {across[0][of_images[0]]}")
    rows = [row for row in rows if elsewhere.isdisjoint(row[number] for number in of_images)]
    rows.sort(key=lambda row: row[of_images[0]] or "")
    named_here = set(pictures).intersection(row[number] for row in rows for number in of_images)
    return {name: [row[number] for row in rows] for number, name in enumerate(names)}, sorted(named_here)
