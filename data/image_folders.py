"""Folders of pictures: the split of a picture, and its caption or class, which are beside it."""

import functools
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import datasets
import PIL.Image
import pyarrow.parquet

from clip_moe.data.annotations import SPLIT_OF_NAME, read_tables, rows_by_split, text_of
from clip_moe.data.images import FORMATS, decode_image
from clip_moe.engine.digests import file_stamp
from clip_moe.engine.files import files_in, is_hidden
from clip_moe.engine.messages import join_names, warn_once

# Tables with a line for each picture, by their column `file_name`
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
# Endings of pictures, and of files of texts beside them
PICTURES = {ending for ending, name in PIL.Image.registered_extensions().items() if name in FORMATS}
TEXTS = (".txt", ".caption")
# Beginning of a note about folders that are no classes
NO_PICTURE = "without a picture that can be read"


def open_folder(folder: str) -> dict[str, datasets.Dataset]:
    """The pictures of a folder by split, as a column `image` of paths in their order, with columns of their captions or
    classes. Links are followed. Hidden files are not read, and a warning counts the pictures among them.

    Folders `train`, `test`, `validation` and the like at the top are splits if there are no others with pictures, or if
    `train` and another split, or such as `train_imgs`, are among them; else everything is "train", and a folder `test`
    is a class.

    A table, `metadata.csv`, `.jsonl` or `.parquet`, above all pictures or those of a split, has a line for each, which
    gives its columns. Without one, the column `caption` comes from a text file beside each picture, and `label` from
    its folder if all folders have one depth. Folders without a picture that can be read are no classes: a warning names
    them, and so does `info.description`. A warning counts the files that are not read.
    """
    folder = os.path.abspath(folder)
    paths = sorted(files_in(folder))
    pictures = [path for path in paths if is_picture(os.path.join(folder, path))]
    if not pictures:
        raise ValueError(f"{folder} has no pictures; formats: {', '.join(FORMATS)}")
    _warn_of_hidden(folder, pictures)
    split_of = {path: _split_of(path.partition("/")[0]) if "/" in path else None for path in paths}
    splits = _splits(folder, pictures, split_of)
    by_split = {name: [path for path in pictures if split_of[path] == name] for name in splits} or {"train": pictures}
    labels = _labels([path for part in by_split.values() for path in part], bool(splits), paths)
    labels, no_classes = _readable_classes(folder, labels, bool(splits))
    parts, used = {}, set()
    for name, part in by_split.items():
        beside = [path for path in paths if not splits or "/" not in path or split_of[path] == name]
        elsewhere = {os.path.join(folder, path) for path in set(pictures).difference(part)}
        parts[name], files = _read(folder, part, beside, elsewhere, labels)
        parts[name].info.description = no_classes if "label" in parts[name].column_names else ""
        used |= files
    warn_of_unread(folder, [path for path in paths if os.path.join(folder, path) not in used])
    if splits or "split" not in parts["train"].column_names:
        return parts
    return rows_by_split(parts["train"], {"split": parts["train"]["split"]}, folder) or parts


def _splits(folder: str, pictures: list[str], split_of: Mapping[str, str | None]) -> list[str]:
    """The splits that folders at the top are, as `open_folder` says; none if they are classes."""
    present = {split_of[path] for path in pictures}
    splits = [name for name in dict.fromkeys(SPLIT_OF_NAME.values()) if name in present]
    below = next((path for path in pictures if any(map(_split_of, path.split("/")[1:-1]))), None)
    if not splits and below is not None:
        warn_once(
            f"splits are top-level folders, but {below} is deeper: name the folder above its split",
        )
    others = sorted({path.partition("/")[0] for path in pictures if "/" in path and split_of[path] is None})
    if splits == ["train"] and others:
        raise ValueError(
            f"{folder} has a folder train, which is a split, and pictures in {', '.join(others[:3])}, which would be "
            "left out: rename train, or move these into it"
        )
    # Beside train_imgs, test is a split; beside dog, it is a class
    has_other_words = any(re.match("[a-z]*", name.lower())[0] in SPLIT_OF_NAME for name in others)
    if not splits or "train" in splits or not others or has_other_words:
        return splits
    words = sorted({path.partition("/")[0] for path in pictures if split_of[path]})
    warn_once(
        f"{folder}: read as classes, not splits: {join_names(words)}, beside {join_names(others)}. If they are splits, "
        "move the other folders into a folder train",
    )
    return []


def warn_of_unread(folder: str, paths: list[str]) -> None:
    """Warns of the files of a folder that are not read, with their number by ending."""
    if paths:
        endings = Counter(PurePath(path).suffix or "without an ending" for path in paths)
        kinds = ", ".join(f"{count} {ending}" for ending, count in endings.most_common(5))
        number = "1 file is" if len(paths) == 1 else f"{len(paths)} files are"
        warn_once(f"{folder}: {number} ignored ({kinds}), such as {paths[0]}")


def _warn_of_hidden(folder: str, pictures: list[str]) -> None:
    """Warns of the pictures in hidden folders, as thumbnails, unless links lead to them."""
    paths = [path for path in sorted(files_in(folder, hidden=True)) if any(map(is_hidden, path.split("/")))]
    files = {path: file for path in paths if is_picture(file := os.path.join(folder, path))}
    targets = {os.path.realpath(os.path.join(folder, path)) for path in pictures} if files else set()
    if hidden := [path for path, file in files.items() if os.path.realpath(file) not in targets]:
        number = "1 hidden picture is" if len(hidden) == 1 else f"{len(hidden)} hidden pictures are"
        warn_once(f"{folder}: {number} ignored, such as {hidden[0]}")


def is_picture(path: str) -> bool:
    """By its ending. A link to nothing is none."""
    return PurePath(path).suffix.lower() in PICTURES and os.path.exists(path)


def _split_of(name: str) -> str | None:
    """The split that a folder is called after, perhaps with a number: `train`, `val2017`."""
    word = re.fullmatch(r"([a-z]+)[-_. ]?[0-9]*", name.lower())
    return word and SPLIT_OF_NAME.get(word[1])


def _labels(pictures: list[str], has_splits: bool, paths: list[str]) -> dict[str, str]:
    """The class of each picture: the name of its folder, or its path from the split where two folders have one name.
    None have one unless all are in folders of one depth, and in several."""
    folders = {path: os.path.dirname(path.partition("/")[2] if has_splits else path) for path in pictures}
    depths = {path: folder.count("/") + bool(folder) for path, folder in folders.items()}
    names = {folder: os.path.basename(folder) for folder in folders.values()}
    first, last = min(pictures, key=depths.get), max(pictures, key=depths.get)
    if depths[first] < depths[last]:
        if not any(path.lower().endswith(TEXTS) or PurePath(path).name in METADATA for path in paths):
            warn_once(f"no labels: folders have different depths, such as those of {first} and {last}")
        return {}
    if len(names) == 1:
        return {}
    are_unique = len(set(names.values())) == len(names)
    return {path: _same(names[folder] if are_unique else folder) for path, folder in folders.items()}


def _readable_classes(folder: str, labels: dict[str, str], has_splits: bool) -> tuple[dict[str, str | None], str]:
    """The class of each picture, None where no picture of it can be read; and which folders are no classes so."""
    readable: set[str] = set()
    for path, label in labels.items():
        file = os.path.join(folder, path)
        if label not in readable and _can_be_read(file, file_stamp(file)):
            readable.add(label)
    names = set(labels.values()) - readable
    are_paths = any("/" in label for label in labels.values())
    for above in {os.path.dirname(os.path.dirname(path)) for path in labels}:
        for entry in os.scandir(os.path.join(folder, above)):
            if entry.is_dir() and not is_hidden(entry.name):
                path = os.path.join(above, entry.name)
                below = path.partition("/")[2] if has_splits else path
                names |= {_same(below if are_paths else entry.name)} - readable
    if not names:
        return labels, ""
    are = "is no class" if len(names) == 1 else "are no classes"
    note = f"{NO_PICTURE}, {join_names(sorted(names))} {are}"
    warn_once(f"{folder}: {note}")
    return {path: label if label in readable else None for path, label in labels.items()}, note


@functools.cache
def _can_be_read(file: str, stamp: str) -> bool:
    try:
        decode_image(file)
    except OSError:
        return False
    return True


def _read(
    folder: str, pictures: list[str], paths: list[str], elsewhere: set[str], labels: Mapping[str, str | None]
) -> tuple[datasets.Dataset, set[str]]:
    """The rows of pictures, and the files that these were read from."""
    tables = [os.path.join(folder, path) for path in paths if PurePath(path).name in METADATA]
    files = [os.path.join(folder, path) for path in pictures]
    if len(tables) > 1:
        raise ValueError(f"{folder} has several tables of the same pictures, {' and '.join(tables)}: merge them")
    if tables:
        columns, named = parse_table(tables[0], files, elsewhere)
        if len(named) < len(files):
            number = f"{len(files) - len(named)} of {len(files)} pictures"
            warn_once(f"{folder}: {number} have no row in {tables[0]}")
        return datasets.Dataset.from_dict(columns), {*tables, *named}
    by_name = {_same(os.path.splitext(path)[0]): path for path in paths if path.lower().endswith(TEXTS)}
    texts = [by_name.get(_same(os.path.splitext(path)[0])) for path in pictures]
    texts = [text and os.path.join(folder, text) for text in texts]
    columns: dict[str, list[Any]] = {"image": files}
    if any(texts):
        lacking = [file for file, text in zip(files, texts, strict=True) if not text]
        if lacking:
            number = f"{len(lacking)} of {len(files)} pictures"
            warn_once(f"{number} have no text file, such as {lacking[0]}")
        columns["caption"] = [text and text_of(Path(text).read_bytes(), text) for text in texts]
    if labels:
        columns["label"] = [labels[path] for path in pictures]
    rows = datasets.Dataset.from_dict(columns)
    if labels:
        rows = rows.cast_column("label", datasets.ClassLabel(names=sorted(set(labels.values()) - {None})))
    return rows, {*files, *filter(None, texts)}


def _same(path: str) -> str:
    """A file system may write letters with accents otherwise than another one, or a table."""
    return unicodedata.normalize("NFC", path)


def parse_table(table: str, pictures: list[str], elsewhere: set[str]) -> tuple[dict[str, list[Any]], set[str]]:
    """The columns of a table, with paths in place of names, in the order of the paths, and which pictures these name.

    A column `file_name` becomes `image`; without it, one as `left_file_name` becomes `left`. Lines of pictures of other
    splits are left out, and those of pictures that are nowhere, or hidden, stay as unreadable ones.
    """
    path_by_name = {_same(path): path for path in {*pictures, *elsewhere}}
    columns = pyarrow.parquet.read_table(table).to_pydict() if table.endswith(".parquet") else read_tables([table])
    named = {name: name.removesuffix("_file_name") for name in columns if name.endswith("_file_name")}
    named = {"file_name": "image"} if "file_name" in columns else named
    place, problem = os.path.dirname(table), "" if named else "has no column file_name with the names of the pictures"
    for column in named:
        paths = [name and os.path.normpath(os.path.join(place, name)) for name in columns[column]]
        if outside := [path for path in paths if path and not path.startswith(place + os.sep)]:
            problem = f"names {outside[0]}, which is outside its folder: move the picture or the table"
        paths = [None if path and any(map(is_hidden, path[len(place) :].split(os.sep))) else path for path in paths]
        columns[column] = [path and path_by_name.get(_same(path), path) for path in paths]
    lines = list(zip(*(columns[column] for column in named), strict=True))
    if mixed := [line for line in lines if len({path in elsewhere for path in line}) > 1]:
        problem = f"has pictures of two splits in one line: {', '.join(map(str, mixed[0]))}"
    if problem:
        raise ValueError(f"{table} {problem}")
    numbers = [number for number, line in enumerate(lines) if elsewhere.isdisjoint(line)]
    numbers.sort(key=lambda number: lines[number][0] or "")
    # A column of the same name as one of pictures gives way
    columns = {name: values for name, values in columns.items() if name not in named.values() or name in named}
    columns = {named.get(name, name): [values[number] for number in numbers] for name, values in columns.items()}
    return columns, set(pictures).intersection(path for number in numbers for path in lines[number])
