"""Pairs of an image and a caption: the rows of any source, with columns of one name and images of one form."""

import logging
from collections.abc import Callable, Iterable
from typing import Any

import datasets

from clip_moe.data.arguments import DataArguments
from clip_moe.data.identity import data_fingerprint, image_digests
from clip_moe.data.images import from_base64
from clip_moe.data.local_data import file_in
from clip_moe.data.readable import readable_pairs
from clip_moe.data.sources import Rows, first_rows, is_text, mapped, no_column, open_rows, reading
from clip_moe.data.texts import all_captions, listed, present_captions, present_texts, same_words, structure
from clip_moe.data.worlds import is_world, world
from clip_moe.engine.context import Context
from clip_moe.engine.messages import shortened, warn_once

logger = logging.getLogger(__name__)

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


def load_pairs(arguments: DataArguments, images: bool = True) -> Rows:
    """The pairs of a dataset, as columns `image` and `caption`, or `image` alone where it has no captions.

    Every image is decoded once here (the result is cached by `datasets`), so that only readable pairs are left, in a
    fixed order. A stream has all pairs, and `indexed` data those that have an image and a caption: `training.loader`
    skips or replaces the unreadable.

    Args:
        images: whether they are used. If not, none is looked at, and all pairs with a caption are left.
    """
    if is_world(arguments.source):
        return _draw(arguments, arguments.captions)
    rows = with_class_names(select_columns(open_rows(arguments), arguments), arguments.source)
    return rows if arguments.streaming else readable_pairs(rows, arguments, images)[0]


def shared_pairs(context: Context, arguments: DataArguments, images: bool = True) -> Rows:
    """`load_pairs` for the stages of a run, with the last pairs kept. The source may be a stage. The main process opens
    them first and fills the caches that the others read, so every process has to call this."""
    arguments = context.resolve(arguments)
    key = f"{arguments} {context.identity(arguments)} {images}"
    rows = context.kept("pairs", key, lambda: load_pairs(arguments, images))
    if arguments.is_drawn:  # others are mapped from files
        context.held["drawn"] = rows.data.nbytes
    return rows


def shared_fingerprint(context: Context, rows: datasets.Dataset, images: bool = True) -> str:
    """`data.identity.data_fingerprint`, the main process first. Every process has to call it."""
    with context.main_process_first():
        return data_fingerprint(rows, images)


def pairs_with_images(arguments: DataArguments, decode: bool = False) -> datasets.Dataset:
    """Pairs with a caption whose images are bytes or whole paths, so that rows of several datasets can be mixed.

    Args:
        decode: leave out the images that cannot be read; else nothing is decoded.
    """
    rows = load_pairs(arguments, images=decode)
    feature = rows.features["image"]
    if isinstance(feature, dict):  # with a range
        return rows
    if isinstance(feature, datasets.Value):
        return mapped(
            rows,
            lambda batch: {"image": [path and {"bytes": None, "path": path} for path in batch["image"]]},
            batched=True,
            features=datasets.Features(rows.features | {"image": IMAGE}),
        )
    # Not as images: `datasets` would read those that are only named, and copy them
    return rows.cast_column("image", UNDECODED).cast_column("image", IMAGE)


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
                f"{source}: a class called {name!r} reads as a missing caption: rename it, such as no_object"
            )
        other = first.setdefault(same_words(caption), name)
        if other != name:
            warn_once(logger, f"{source}: the classes {other!r} and {name!r} have one caption, and count as one")

    def name_of(row: dict[str, Any]) -> dict[str, str | None]:
        label = row["caption"]
        return {"caption": None if label is None or label < 0 else captions[label]}

    return _with_column(rows, "caption", name_of, datasets.Value("string"))


def caption_columns(arguments: DataArguments, columns: Iterable[str]) -> datasets.Dataset:
    """The column `image` and these columns of any source.

    Built-in worlds have `caption` (detailed) and `raw_caption` (web).
    """
    if is_world(arguments.source):
        detailed, web = (_draw(arguments, style) for style in ("detailed", "web"))
        rows = detailed.add_column("raw_caption", list(web["caption"]))
    else:
        rows = open_rows(arguments, columns)
    image = "image" if is_world(arguments.source) else arguments.image_column
    wanted = {image: "image"} | {column: column for column in sorted(columns)}
    return rename_columns(rows, wanted, arguments)


def _draw(arguments: DataArguments, captions: str) -> datasets.Dataset:
    """Pairs of a world."""
    drawn = world(arguments.source)
    kinds = drawn.kinds(arguments.kinds)
    return drawn.load(arguments.split, captions, arguments.num_samples, kinds, arguments.seed or 0)


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
        with reading(arguments):
            columns = list(next(iter(rows), wanted))
    bases = {column: column.partition(".")[0] for column in wanted if column not in columns}
    bases = {column: base for column, base in bases.items() if base in columns and wanted[column] not in IMAGES}
    missing = [column for column in wanted if column not in columns and column not in bases]
    if missing:
        settings = "image_column, caption_column, label_column or the column of a policy"
        raise ValueError(f"{no_column(arguments.source, missing, columns)}. Name others by {settings}")
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
            logger,
            f"{source}: {count} captions are lists, such as {shortened(example)}, but stay texts, since "
            f"{shortened(other)} is none: make all captions lists, or none",
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


def one_row_an_image(rows: datasets.Dataset) -> datasets.Dataset:
    """Rows of the same image as one with all their captions, where the first of them is: apart, they would tie."""
    batches = rows.select_columns("image").iter(1000)
    numbers_of: dict[str, list[int]] = {}
    for number, digest in enumerate(digest for batch in batches for digest in image_digests(batch["image"])):
        numbers_of.setdefault(digest, []).append(number)
    if len(numbers_of) == len(rows):
        return rows
    captions = list(rows["caption"])
    merged: list[list[str]] = [[] for _ in captions]
    for numbers in numbers_of.values():
        merged[numbers[0]] = [text for number in numbers for text in present_captions(captions[number])]
    rows = rows.remove_columns("caption").add_column("caption", merged, feature=TEXTS)
    return rows.select([numbers[0] for numbers in numbers_of.values()])
