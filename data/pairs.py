"""Pairs of an image and a caption: the rows of any source, and which of them can be used."""

import ast
import html
import io
import json
import logging
import re
import sys
import textwrap
import tokenize
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import PIL.Image
import pyarrow
import pyarrow.compute

from clip_moe.data.identity import image_digests
from clip_moe.data.images import decode_image, decoding_code, from_base64
from clip_moe.data.local_data import file_in
from clip_moe.data.sources import (
    DataArguments,
    Rows,
    first_rows,
    is_text,
    named_files_hash,
    no_column,
    open_rows,
    reading,
)
from clip_moe.data.worlds import is_world, world
from clip_moe.engine.messages import join_names, shortened, warn_once
from clip_moe.engine.processes import is_first_process

logger = logging.getLogger(__name__)

# Samples that one reader sees before it judges the share of unreadable ones.
STREAM_TRIAL = 1000
# By which columns are named, in a recipe and as options of a command
COLUMN_SETTINGS = "image_column and caption_column or label_column"
# Columns that hold images, by the names that they get here
IMAGES = ("image", "image_0", "image_1")
# Fewer rows are read in no time
MANY = 1000
# Captions of a stream that tell whether they are lists
LISTS_LOOKED_AT = 100
TEXTS = datasets.List(datasets.Value("string"))
# An image as an image column holds it: its bytes, or where they are; and with black and white of more than 8 bits
IMAGE = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
RANGED = IMAGE | {"pixel_range": datasets.List(datasets.Value("float64"))}
UNDECODED = datasets.Image(decode=False)
# Features of images that need not be made whole
KNOWN = dict | datasets.Image | None
# Characters that are written alike, or not seen; and what is around a text
ALIKE = str.maketrans("‘’‚‛“”„«»–—_", "'" * 4 + '"' * 5 + "-- ", "\u200b\u200c\u200d\u00ad\ufeff")
AROUND = " '`.,;:!?。、" + '"'
# Columns of images as plain bytes
BYTES = [datasets.Value(kind) for kind in ("binary", "large_binary")]
# What a look at a pair finds: see `read_pair`, and `decode_image` on pixels
LOOK = datasets.Features({"problem": datasets.Value("string"), "pixels": datasets.List(datasets.Value("float64"))})
# What stands for a missing caption, as pandas reads a table
MISSING = {"NA", "N/A", "n/a", "NULL", "null", "None", "NaN", "nan", "-nan", "-NaN", "<NA>", "#N/A", "#NA"}


def load_pairs(arguments: DataArguments, images: bool = True) -> Rows:
    """The pairs of a dataset, as columns `image` and `caption`.

    Unless it is streamed, every image is decoded once here (the result is cached by `datasets`), so that only readable
    pairs are left, in a fixed order. A stream has all of them: `training.loader` skips the unreadable as they come. Of
    indexed shards those are left that have an image and a caption: `training.loader` replaces the unreadable.

    Args:
        images: whether they are used. If not, none is looked at, and all pairs with a caption are left.
    """
    if is_world(arguments.source):
        return _draw(arguments, arguments.captions)
    rows = select_columns(open_rows(arguments), arguments)
    classes = getattr((rows.features or {}).get("caption"), "names", None) or []
    if lost := [name for name in classes if not present_captions(name.replace("_", " "))]:
        raise ValueError(
            f"{arguments.source}: a class called {lost[0]!r} reads as a missing caption: rename it, such as no_object"
        )
    last = {same_words(name.replace("_", " ")): name for name in classes}
    if both := [(name, last[words]) for name in classes if last[words := same_words(name.replace("_", " "))] != name]:
        names = " and ".join(map(repr, both[0]))
        warn_once(logger, f"{arguments.source}: the classes {names} have one caption, and count as one")
    rows = with_class_names(rows)
    if arguments.streaming:
        return rows
    return readable_pairs(rows, arguments, images)[0]


def with_class_names(rows: Rows) -> Rows:
    """Rows whose captions are the names of classes where they were their numbers, with blanks for underscores. Where
    the class is missing, None or -1, so is the caption."""
    feature = (rows.features or {}).get("caption")
    if not isinstance(feature, datasets.ClassLabel):
        return rows
    names = [name.replace("_", " ") for name in feature.names]

    def name_of(row: dict[str, Any]) -> dict[str, str | None]:
        label = row["caption"]
        return {"caption": None if label is None or label < 0 else names[label]}

    return _with_captions(rows, name_of, datasets.Value("string"))


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
    return rename_columns(rows, wanted, arguments, "image_column, or in the stage's policies")


def _draw(arguments: DataArguments, captions: str) -> datasets.Dataset:
    """Pairs of a world."""
    seed = arguments.seed or 0
    return _drawn(arguments.source, arguments.split, captions, arguments.num_samples, arguments.kinds, seed)


@lru_cache(maxsize=2)  # for the next stages of a recipe
def _drawn(source: str, split: str, captions: str, num_samples: int, kinds: str, seed: int) -> datasets.Dataset:
    drawn = world(source)
    return drawn.load(split, captions, num_samples, drawn.kind_set(kinds), seed)


def present_captions(captions: Any) -> list[str]:
    """The caption or captions of an image without what surrounds them, and without those that are missing: blank, a
    word for what is missing, or no text."""
    captions = captions if isinstance(captions, list) else [captions]
    texts = map(trimmed, (caption for caption in captions if isinstance(caption, str)))
    return [text for text in texts if text and text not in MISSING]


def trimmed(text: str) -> str:
    """A text without white space and marks of byte order at its ends."""
    return text.strip().strip("\ufeff\u200b\0").strip()


def same_words(text: str) -> str:
    """Equal for texts that differ only in case and white space, as most tokenizers read them."""
    return " ".join(text.lower().split())


def plain_words(text: str) -> str:
    """Equal for texts that say the same: also for those that differ in HTML entities, forms of Unicode, kinds of
    quotes, and quotes and punctuation around them."""
    text = unicodedata.normalize("NFKC", html.unescape(html.unescape(text))).translate(ALIKE)
    words = same_words(text.casefold())
    return words.strip(AROUND) or words


def present_texts(captions: Any) -> list[str]:
    """As `present_captions`; raises a ValueError where one is neither a text nor missing, or a text that holds objects
    or lists of lists."""
    for caption in captions if isinstance(captions, list) else [captions]:
        content = _structure(caption)
        if isinstance(content, dict):
            keys = join_names(map(str, content)) or "none"
            raise ValueError(f"its caption is an object with the keys {keys}: set caption_column to COLUMN.KEY")
        if isinstance(content, list) and any(isinstance(item, dict | list) for item in content):
            raise ValueError(f"its caption is a list of objects or lists: {shortened(caption)}")
        if not isinstance(caption, str | None) and caption == caption:  # NaN is missing
            raise ValueError(f"its caption is no text but {shortened(caption)}")
    return present_captions(captions)


def first_caption(captions: str | Sequence[str | None]) -> str:
    """The caption of an image, or the first of several that is not missing."""
    return present_captions(captions)[0]


def all_captions(rows: Rows) -> Iterator[str]:
    """All captions of rows but those that are missing."""
    for batch in rows.select_columns("caption").iter(100):
        for captions in batch["caption"]:
            yield from present_captions(captions)


def select_columns(rows: Rows, arguments: DataArguments) -> Rows:
    """The image and the caption column alone, under those names; images are not decoded yet."""
    rows = rename_columns(rows, {arguments.image_column: "image", arguments.caption_column: "caption"}, arguments)
    rows = _with_lists(rows, arguments.source)
    return _split_lines(rows) if arguments.captions_per_line else rows


def rename_columns(
    rows: Rows, wanted: dict[str, str], arguments: DataArguments, settings: str = COLUMN_SETTINGS
) -> Rows:
    """These columns alone, under their new names. Images are not decoded yet, their paths begin with `image_root`, and
    those of more than 8 bits have the `pixel_range`. A list of one image is this image, and base64 becomes bytes.

    A column COLUMN.KEY that is not there is the key of the objects in COLUMN, perhaps as JSON.

    Args:
        settings: by which others are named, for errors.
    """
    columns = rows.column_names
    if columns is None:  # a stream of unknown features tells with its first row
        with reading(arguments):
            columns = list(next(iter(rows), wanted))
    bases = {column: column.partition(".")[0] for column in wanted if column not in columns}
    bases = {column: base for column, base in bases.items() if base in columns and wanted[column] not in IMAGES}
    missing = [column for column in wanted if column not in columns and column not in bases]
    if missing:
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
    rows = _with_keys(rows, bases, arguments).select_columns(list(wanted)) if bases else rows
    rows = rows.rename_columns({old: new for old, new in wanted.items() if old != new})
    return _with_whole_images(rows, [name for name in IMAGES if name in wanted.values()], arguments)


def _with_keys(rows: Rows, bases: dict[str, str], arguments: DataArguments) -> Rows:
    """Rows with columns COLUMN.KEY, texts or lists of texts as the first one is, from objects in COLUMN."""

    def value(row: dict[str, Any], column: str) -> str | list[str] | None:
        content = row[bases[column]]
        for key in column.split(".")[1:]:
            content = _structure(content)
            content = content.get(key) if isinstance(content, dict) else None
        return present_captions(content) if isinstance(content, list) else content

    features = datasets.Features()
    for column, base in bases.items():
        head = list(_head(rows.select_columns(base)))
        kind = next((type(found) for found in (value(row, column) for row in head) if found is not None), None)
        if kind is None:
            keys = dict.fromkeys(f"{base}.{key}" for row in head for key in _structure(row[base]) or ())
            raise ValueError(no_column(arguments.source, [column], [base, *keys]))
        features[column] = TEXTS if kind is list else datasets.Value("string")

    def values(row: dict[str, Any]) -> dict[str, Any]:
        found = {column: value(row, column) for column in bases}
        return {
            column: present_captions(text) if features[column] == TEXTS else text if isinstance(text, str) else None
            for column, text in found.items()
        }

    if isinstance(rows, datasets.IterableDataset):
        return rows.map(values, features=rows.features and datasets.Features(rows.features | features))
    held = sorted(set(bases.values()))
    texts = mapped(rows.select_columns(held), values, features=features, remove_columns=held)
    return datasets.concatenate_datasets([rows, texts], axis=1)  # without copying images


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


def _split_lines(rows: Rows) -> Rows:
    """Rows whose captions are the lines of what they were."""

    def split(row: dict[str, Any]) -> dict[str, list[str]]:
        lines = [line for text in present_texts(row["caption"]) for line in text.splitlines()]
        return {"caption": present_captions(lines)}

    return _with_captions(rows, split)


def _with_lists(rows: Rows, source: str) -> Rows:
    """Rows whose captions are lists, if all captions are texts such as `["a cat", "a dog"]`, or missing. Among others,
    such a text stays what it is, as a title in brackets. A stream is judged by its first rows."""
    feature = (rows.features or {}).get("caption", datasets.Value("string"))
    if not (isinstance(feature, datasets.Value) and is_text(feature())):
        return rows
    if isinstance(rows, datasets.IterableDataset):
        texts = pyarrow.chunked_array([[row["caption"] for row in rows.take(LISTS_LOOKED_AT)]], pyarrow.large_string())
    else:
        texts = rows.data.column("caption").cast(pyarrow.large_string())
    is_bracketed = pyarrow.compute.match_substring_regex(texts, r"(?s)^\s*\[.*\]\s*$")
    bracketed = texts.filter(is_bracketed).to_pylist()
    lists = [text for text in bracketed if listed(text) is not None]
    if not any(map(listed, lists)):
        return rows
    others = (text.as_py() for text in texts.filter(pyarrow.compute.invert(is_bracketed)))
    other = next((text for text in others if present_captions(text)), None)
    other = next((text for text in bracketed if listed(text) is None), other)
    if other is not None:
        warn_once(
            logger,
            f"{source}: {len(lists)} captions are lists, such as {shortened(lists[0])}, but stay texts, since "
            f"{shortened(other)} is none: make all captions lists, or none",
        )
        return rows

    def as_list(row: dict[str, Any]) -> dict[str, Any]:
        texts = listed(row["caption"])
        return {"caption": [row["caption"]] if texts is None else texts}

    return _with_captions(rows, as_list)


def _with_captions(rows: Rows, function: Callable[[dict[str, Any]], dict[str, Any]], feature: Any = TEXTS) -> Rows:
    """Rows with other captions."""
    captions = datasets.Features({"caption": feature})
    if isinstance(rows, datasets.IterableDataset):
        return rows.map(function, features=rows.features and datasets.Features(rows.features | captions))
    texts = mapped(rows.select_columns("caption"), function, features=captions)
    return datasets.concatenate_datasets([rows.select_columns("image"), texts], axis=1)  # without copying images


def listed(caption: Any) -> list[str] | None:
    """The texts of a list that JSON, Python or numpy, which has no commas, wrote into a text; None: it is no list."""
    if not isinstance(caption, str) or not re.fullmatch(r"\s*\[.*\]\s*", caption, re.DOTALL):
        return None
    try:
        texts = json.loads(caption)
    except (ValueError, RecursionError):
        texts = _python_list(caption)
    if not isinstance(texts, list) or not all(isinstance(text, str | None) or text != text for text in texts):
        return None
    return [text for text in texts if isinstance(text, str)]


def _structure(value: Any) -> dict[str, Any] | list[Any] | None:
    """An object or a list, perhaps one that JSON or Python wrote into a text; None: it is neither."""
    if not isinstance(value, str) or not re.match(r"\s*[\[{]", value):
        return value if isinstance(value, dict | list) else None
    for read in (json.loads, ast.literal_eval):
        try:
            content = read(value.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            continue
        return content if isinstance(content, dict | list) else None
    return None


def _python_list(caption: str) -> list[Any] | None:
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(caption.strip()).readline))
        words = [token.string for token in tokens if token.string.strip() and token.string not in "[],"]
        return [None if word == "nan" else ast.literal_eval(word) for word in words]
    except (ValueError, SyntaxError, tokenize.TokenError):
        return None


def read_pair(
    row: dict[str, Any], arguments: DataArguments, is_label: bool = False
) -> tuple[str, PIL.Image.Image | None]:
    """The problem that keeps a pair from being used, empty if there is none; and its image.

    Args:
        is_label: whether its caption is the name of a class, which may be "NA" or "None".
        row: without an `image`, only the caption counts. The image of an indexed shard has to be there, and is not
            decoded.
    """
    try:
        if not (row["caption"].strip() if is_label else present_texts(row["caption"])):
            return "its caption is empty", None
    except ValueError as error:
        return str(error), None
    if "image" not in row:
        return "", None
    if arguments.indexed:
        return "" if _is_there(row["image"]) else "it has no image", None
    try:
        return "", decode_image(row["image"])
    except OSError as error:
        return f"its image cannot be read: {error}", None


def readable_pairs(
    rows: datasets.Dataset, arguments: DataArguments, images: bool = True, are_labels: bool = False
) -> tuple[datasets.Dataset, int]:
    """The rows of `select_columns` without the unreadable ones, and how many those were.

    Args:
        are_labels: see `read_pair`.
        images: see `load_pairs`. Every image is decoded, or none.
    """

    def look(row: dict[str, Any], files: str) -> dict[str, Any]:
        problem, image = read_pair(row, arguments, are_labels)
        return {"problem": problem, "pixels": image and image.info.get("pixels")}

    nothing = f"{arguments.source} has no pairs in split {arguments.split}"
    if len(rows) == 0:
        raise ValueError(nothing)
    what = f"reading all {len(rows)} {'images' if images else 'captions'}"
    if len(rows) >= MANY and datasets.are_progress_bars_disabled() and is_first_process():
        print(f"{what} of {arguments.source}, split {arguments.split}", file=sys.stderr, flush=True)
    with reading(arguments):
        files = named_files_hash(rows) if images else ""
        looked_at = rows if images else rows.select_columns("caption")
        looks = mapped(
            looked_at,
            look,
            fn_kwargs={"files": files + decoding_code(__file__)},  # part of what the result is cached under
            is_kept=True,
            remove_columns=looked_at.column_names,
            features=LOOK,
            num_proc=arguments.num_workers or None,
            desc=what,
        )
    report_pixels(looks["pixels"], arguments)
    problems = list(looks["problem"])
    bad = [index for index, problem in enumerate(problems) if problem]
    if bad:
        judge(len(bad), len(rows), f"pair {bad[0]} ({_where(rows[bad[0]])}): {problems[bad[0]]}", arguments)
        rows = rows.select([index for index, problem in enumerate(problems) if not problem])
    if len(rows) == 0:
        raise ValueError(nothing)
    return rows, len(bad)


def _is_there(image: str | dict[str, Any] | None) -> bool:
    return bool(image.get("bytes") or image.get("path")) if isinstance(image, dict) else bool(image)


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
    feature = datasets.List(datasets.Value("string"))
    rows = rows.remove_columns("caption").add_column("caption", merged, feature=feature)
    return rows.select([numbers[0] for numbers in numbers_of.values()])


def mapped(rows: Rows, function: Callable, is_kept: bool = False, **options: Any) -> Rows:
    """As `rows.map`, whose result is kept where `datasets` keeps its own, and not beside rows that the user saved.

    Args:
        is_kept: whether it is kept for rows in memory, too.
    """
    folder = Path(datasets.config.HF_DATASETS_CACHE).absolute()
    if isinstance(rows, datasets.IterableDataset):
        return rows.map(function, **options)
    is_saved = any(folder not in Path(file["filename"]).absolute().parents for file in rows.cache_files)
    if is_saved or is_kept and not rows.cache_files:
        try:
            (folder / "looks").mkdir(parents=True, exist_ok=True)
        except OSError:  # a cache that cannot be written
            return rows.map(function, keep_in_memory=True, **options)
        key = datasets.fingerprint.Hasher.hash([rows._fingerprint, function, options])
        options["cache_file_name"] = str(folder / "looks" / f"{key}.arrow")
    return rows.map(function, **options)


class StreamReport:
    """Counts the pairs of a stream that cannot be used, and judges their share. Every worker has its own."""

    def __init__(self, arguments: DataArguments, quiet: bool):
        self.arguments, self.quiet = arguments, quiet
        self.seen, self.bad, self.first, self.pixels = 0, 0, "", []

    def add(self, row: dict[str, Any], problem: str, image: PIL.Image.Image | None = None) -> None:
        self.seen += 1
        if image is not None and image.info.get("pixels"):
            self.pixels.append(image.info["pixels"])
        if not problem:
            return
        self.bad += 1
        self.first = self.first or f"pair {self.seen - 1} in the order of the stream ({_where(row)}): {problem}"
        if self.seen >= STREAM_TRIAL:
            self._judge()
        elif not self.quiet:
            logger.warning(
                "%s: %d of %d pairs skipped so far, now %s: %s",
                self.arguments.source, self.bad, self.seen, _where(row), problem,
            )  # fmt: skip

    def end_of_epoch(self, readers: int) -> None:
        """A short stream is judged as a whole; one reader's share of it only if nothing is left of it, or if it has
        more bad pairs than all shares together may have."""
        if not self.quiet:
            report_pixels(self.pixels, self.arguments)
        too_many = self.bad > self.arguments.max_unreadable * self.seen * readers
        if self.bad and (readers == 1 or self.bad == self.seen or too_many):
            self._judge()

    def _judge(self) -> None:
        judge(self.bad, self.seen, self.first, self.arguments, self.quiet)


def report_pixels(pixels: Iterable[list[float] | None], arguments: DataArguments) -> None:
    """Warns of the gaps in pictures of more than 8 bits, and of a range that they leave or hardly use."""
    deep = np.array([facts for facts in pixels if facts]).reshape(-1, 5)
    gaps, low, high, black, white = deep.T
    beyond, start = (low < black) | (high > white), f"{arguments.source}: of {len(deep)} pictures of more than 8 bits,"
    if gaps.any():
        share = f"on average {gaps[gaps > 0].mean():.2%} of their pixels, which are black"
        logger.warning(f"{start} {(gaps > 0).sum()} have gaps (NaN, infinite or no-data values), {share}")
    if beyond.any():
        values = f"from {low.min():g} to {high.max():g}, which are black or white"
        logger.warning(f"{start} {beyond.sum()} have values beyond pixel_range, {values}")
    elif len(deep) and high.max() < ((black + white) / 2).min():
        top = 2 ** np.ceil(np.log2(high.max() + 1)) - 1 if white.max() > 1 else high.max()
        advice = f"if the sensor gives no more, set pixel_range, such as [{black.min():g}, {top:g}]"
        logger.warning(f"{start} none has a value above {high.max():g} of {white.max():g}: {advice}")


def judge(bad: int, total: int, first: str, arguments: DataArguments, quiet: bool = False) -> None:
    """Report skipped pairs, or refuse them."""
    share = f"{bad} of {total} pairs of {arguments.source} cannot be used; the first is {' '.join(first.split())}"
    if bad > arguments.max_unreadable * total:
        raise ValueError(
            f"{share}. More than max_unreadable = {arguments.max_unreadable:.0%} is an error: mend or remove them, or "
            "for training raise data.max_unreadable"
        )
    if not quiet:
        logger.warning("%s. They are skipped", share)


def _where(row: dict[str, Any]) -> str:
    """The file of a pair's image, or else its caption."""
    image = row["image"]
    path = image if isinstance(image, str) else image.get("path") if isinstance(image, dict) else None
    return path[:1000] if path else textwrap.shorten(f"no path; caption: {row['caption']}", 90)  # base64 is longer
