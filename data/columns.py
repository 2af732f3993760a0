"""Columns of rows: those of pairs under one name, with images of one form, texts, or lists of texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import pyarrow

from clip_moe.data.images import from_base64
from clip_moe.data.local_data import file_in, reading
from clip_moe.data.texts import all_captions, listed, present_captions, present_texts, same_words, structure
from clip_moe.engine.digests import file_digests
from clip_moe.engine.messages import shortened, warn_once

if TYPE_CHECKING:
    from clip_moe.data.arguments import DataArguments

Rows = datasets.Dataset | datasets.IterableDataset
# Columns that hold images, by the names that they get here
IMAGES = ("image", "image_0", "image_1")
# Captions of a stream that tell whether they are lists
LISTS_LOOKED_AT = 100
TEXTS = datasets.List(datasets.Value("string"))
# An image as an image column holds it: its bytes, or where they are; and with black and white of more than 8 bits
IMAGE = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
RANGED = IMAGE | {"pixel_range": datasets.List(datasets.Value("float64"))}
UNDECODED = datasets.Image(decode=False)
# Features of images that need not be made whole
KNOWN = dict | datasets.Image | None
# Columns of images as plain bytes
BYTES = [datasets.Value(kind) for kind in ("binary", "large_binary")]


def with_class_names(rows: Rows, source: str) -> Rows:
    """Rows whose captions are the names of classes where they were their numbers, with blanks for underscores. Where
    the class is missing, None or -1, so is the caption.

    A class whose name reads as a missing caption is a ValueError. A warning names two that get the same caption.
    """
    feature = (rows.features or {}).get("caption")
    if not isinstance(feature, datasets.ClassLabel):
        return rows
    captions = [name.replace("_", " ") for name in feature.names]
    first: dict[str, str] = {}
    for name, caption in zip(feature.names, captions, strict=True):
        if not present_captions(caption):
            raise ValueError(
                f"{source}: a class called {name!r} reads as a missing caption: rename it, for example to no_object"
            )
        other = first.setdefault(same_words(caption), name)
        if other != name:
            warn_once(f"{source}: the classes {other!r} and {name!r} have the same caption and count as one")

    def name_of(row: dict[str, Any]) -> dict[str, str | None]:
        label = row["caption"]
        return {"caption": None if label is None or label < 0 else captions[label]}

    return _with_column(rows, "caption", name_of, datasets.Value("string"))


def select_columns(rows: Rows, arguments: DataArguments) -> Rows:
    """The image and the caption column alone, under those names; images are not decoded yet."""
    if arguments.caption_column is None:
        return rename_columns(rows, {arguments.image_column: "image"}, arguments)
    rows = rename_columns(rows, {arguments.image_column: "image", arguments.caption_column: "caption"}, arguments)
    rows = _with_lists(rows, arguments.source)
    if not arguments.captions_per_line:
        return rows

    def split(row: dict[str, Any]) -> dict[str, list[str]]:
        lines = [line for text in present_texts(row["caption"]) for line in text.splitlines()]
        return {"caption": present_captions(lines)}

    return _with_column(rows, "caption", split, TEXTS)


def rename_columns(rows: Rows, wanted: dict[str, str], arguments: DataArguments) -> Rows:
    """These columns alone, under their new names. Images are not decoded yet, their paths begin with `image_root`, and
    those of more than 8 bits have the `pixel_range`. A list of one image is this image, and base64 becomes bytes.

    A column COLUMN.KEY that is not there is the key of the objects in COLUMN, perhaps as JSON.
    """
    columns = rows.column_names
    if columns is None:  # a stream of unknown features tells with its first row
        with reading(arguments.source):
            columns = list(next(iter(rows), wanted))
    bases = {column: column.partition(".")[0] for column in wanted if column not in columns}
    bases = {column: base for column, base in bases.items() if base in columns and wanted[column] not in IMAGES}
    missing = [column for column in wanted if column not in columns and column not in bases]
    if missing:
        advice = "Set image_column or caption_column, or label_column or column where a task or a policy has it"
        raise ValueError(f"{no_column(arguments.source, missing, columns)}. {advice}")
    # Decoded later, where an image that is broken can be skipped. First of all: a stream that selects columns decodes.
    # Images may also be plain bytes, or have no path beside them
    for column, name in wanted.items():
        feature = (rows.features or {}).get(column)
        is_plain = name in IMAGES and (feature in BYTES or isinstance(feature, dict) and "pixel_range" not in feature)
        if isinstance(feature, datasets.Image) or is_plain:
            rows = rows.cast_column(column, UNDECODED)
        elif isinstance(getattr(feature, "feature", None), datasets.Image):
            rows = rows.cast_column(column, datasets.List(UNDECODED))
    used = [column for column in wanted if column not in bases]
    rows = rows.select_columns(list(dict.fromkeys([*used, *bases.values()])))
    for column in bases:
        rows = _with_key(rows, column, arguments)
    rows = rows.select_columns(list(wanted))
    rows = rows.rename_columns({old: new for old, new in wanted.items() if old != new})
    return _with_whole_images(rows, [name for name in IMAGES if name in wanted.values()], arguments)


def _with_key(rows: Rows, column: str, arguments: DataArguments) -> Rows:
    """Rows with a column COLUMN.KEY, texts or lists of texts as the first one is, from the objects in COLUMN."""
    base, *keys = column.split(".")

    def value(row: dict[str, Any]) -> Any:
        content = row[base]
        for key in keys:
            content = structure(content)
            content = content.get(key) if isinstance(content, dict) else None
        return content

    head = list(_head(rows.select_columns(base)))
    kind = next((type(text) for text in map(value, head) if text is not None), None)
    if kind is None:
        known = dict.fromkeys(f"{base}.{key}" for row in head for key in structure(row[base]) or ())
        raise ValueError(no_column(arguments.source, [column], [base, *known]))

    def text(row: dict[str, Any]) -> dict[str, Any]:
        content = value(row)
        if kind is list:
            return {column: present_captions(content)}
        return {column: content if isinstance(content, str) else None}

    return _with_column(rows, column, text, TEXTS if kind is list else datasets.Value("string"), base)


def _head(rows: Rows) -> Rows:
    """The first rows, by which a column is judged; of a stream, one, since it is read twice."""
    return first_rows(rows, 1 if isinstance(rows, datasets.IterableDataset) else 100)


def _with_whole_images(rows: Rows, names: list[str], arguments: DataArguments) -> Rows:
    """Rows whose images are not lists or base64, with `image_root` and `pixel_range`."""
    root, pixel_range, kinds = arguments.image_root, arguments.pixel_range, {}
    for name in names:
        feature = (rows.features or {}).get(name)
        is_named = isinstance(feature, datasets.Value) and is_text(feature())
        texts = (row[name] for row in _head(rows.select_columns(name))) if is_named else ()
        if pixel_range is not None:
            kinds[name] = RANGED
        elif any(text and from_base64(text) for text in texts) or not (is_named or isinstance(feature, KNOWN)):
            kinds[name] = UNDECODED
        elif root is not None:
            kinds[name] = feature

    def whole(image: Any, kind: Any) -> str | dict[str, Any]:
        image = image[0] if isinstance(image, list) and len(image) == 1 else image
        content = from_base64(image) if isinstance(image, str) else image if isinstance(image, bytes) else None
        if not isinstance(image, dict):
            image = {"bytes": content, "path": image if isinstance(image, str) and content is None else None}
        image = {"bytes": None, "path": None} | image
        if root is not None and image["path"] is not None and image["bytes"] is None:
            image = image | {"path": file_in(root, image["path"])}
        ranged = image if pixel_range is None else image | {"pixel_range": pixel_range}
        return image["path"] if isinstance(kind, datasets.Value) else ranged

    def with_whole(batch: dict[str, list]) -> dict[str, list]:
        return {name: [whole(image, kind) for image in batch[name]] for name, kind in kinds.items()}

    features = rows.features and datasets.Features(rows.features | kinds)
    return mapped(rows, with_whole, batched=True, features=features) if kinds else rows


def _with_lists(rows: Rows, source: str) -> Rows:
    """Rows whose captions are lists, if all captions are texts such as `["a cat", "a dog"]`, or missing. Among others,
    such a text stays what it is, as a title in brackets. A stream is judged by its first rows."""
    feature = (rows.features or {}).get("caption", datasets.Value("string"))
    if not (isinstance(feature, datasets.Value) and is_text(feature())):
        return rows
    count, example, other = 0, "", ""
    is_stream = isinstance(rows, datasets.IterableDataset)
    for text in all_captions(rows.take(LISTS_LOOKED_AT) if is_stream else rows):
        items = listed(text)
        count += items is not None
        example = example or (text if items else "")
        other = other or (text if items is None else "")
    if not example:
        return rows
    if other:
        warn_once(
            f"{source}: {count} captions are lists, such as {shortened(example)}, but are read as text, since "
            f"{shortened(other)} is not a list: make all captions lists, or none",
        )
        return rows

    def as_list(row: dict[str, Any]) -> dict[str, Any]:
        texts = listed(row["caption"])
        return {"caption": [row["caption"]] if texts is None else texts}

    return _with_column(rows, "caption", as_list, TEXTS)


def _with_column(
    rows: Rows, name: str, function: Callable[[dict[str, Any]], dict[str, Any]], feature: Any, source: str | None = None
) -> Rows:
    """Rows with a column that a function computes from a column, its own by default; images are not copied."""
    source = source or name
    if isinstance(rows, datasets.IterableDataset):
        return rows.map(function, features=rows.features and datasets.Features(rows.features | {name: feature}))
    features = datasets.Features({name: feature})
    column = mapped(rows.select_columns(source), function, features=features, remove_columns=source)
    rows = rows.remove_columns(name) if name in rows.column_names else rows
    return datasets.concatenate_datasets([rows, column], axis=1)


def mapped(rows: Rows, function: Callable, is_kept: bool = False, **options: Any) -> Rows:
    """`rows.map`, with its result in the cache of `datasets` and never beside rows that the user saved.

    Args:
        is_kept: whether it is kept for rows in memory, too.
    """
    folder = Path(datasets.config.HF_DATASETS_CACHE).absolute()
    if isinstance(rows, datasets.IterableDataset):
        return rows.map(function, **options)
    # The hash of a function does not hold what it calls
    code = file_digests(sorted(Path(__file__).parent.glob("*.py")))
    key = datasets.fingerprint.Hasher.hash([rows._fingerprint, function, options, code])
    is_saved = any(folder not in Path(file["filename"]).absolute().parents for file in rows.cache_files)
    if is_saved or is_kept and not rows.cache_files:
        try:
            (folder / "looks").mkdir(parents=True, exist_ok=True)
        except OSError:  # a cache that cannot be written
            return rows.map(function, keep_in_memory=True, new_fingerprint=key, **options)
        options["cache_file_name"] = str(folder / "looks" / f"{key}.arrow")
    return rows.map(function, new_fingerprint=key, **options)


def first_rows(rows: Rows, number: int) -> Rows:
    """At most `number` rows: `take` of datasets 5.0 fails where there are fewer."""
    if isinstance(rows, datasets.IterableDataset):
        return rows.take(number)
    return rows.select(range(min(number, len(rows))))


def no_column(source: str, missing: Iterable[str], columns: Iterable[str]) -> str:
    """An error's text. Names are in quotes, since they may begin or end with a space."""
    missing, columns = (", ".join(map(repr, names)) for names in (missing, columns))
    return f"{source} has no column {missing}; its columns are {columns}"


def is_text(kind: pyarrow.DataType) -> bool:
    kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    return pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind) or pyarrow.types.is_string_view(kind)
