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
import PIL.Image
import pyarrow
import pyarrow.compute

from data.identity import image_digests
from data.images import decode_image
from data.local_data import file_in
from data.sources import DataArguments, Rows, is_text, named_files_hash, no_column, open_rows, reading
from data.worlds import WORLDS, world
from records.messages import shortened
from records.processes import is_first_process

logger = logging.getLogger(__name__)

# Samples that one reader sees before it judges the share of unreadable ones.
STREAM_TRIAL = 1000
# By which columns are named, in a recipe and as options of a command
COLUMN_SETTINGS = "image_column and caption_column or label_column"
# Columns that hold images, by the names that they get here
IMAGES = ("image", "image_0", "image_1")
# Fewer rows are read in no time
MANY = 1000
TEXTS = datasets.List(datasets.Value("string"))
# Columns of images as plain bytes
BYTES = [datasets.Value(kind) for kind in ("binary", "large_binary", "binary_view")]
# Characters that are written alike, or not seen; and what is around a text
ALIKE = str.maketrans("‘’‚‛“”„«»–—_", "'" * 4 + '"' * 5 + "-- ", "\u200b\u200c\u200d\u00ad\ufeff")
AROUND = " '`.,;:!?。、" + '"'
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
    if arguments.source in WORLDS:
        return _draw(arguments, arguments.captions)
    rows = with_class_names(select_columns(open_rows(arguments), arguments))
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
    if arguments.source in WORLDS:
        detailed, web = (_draw(arguments, style) for style in ("detailed", "web"))
        rows = detailed.add_column("raw_caption", list(web["caption"]))
    else:
        rows = open_rows(arguments, columns)
    image = "image" if arguments.source in WORLDS else arguments.image_column
    wanted = {image: "image"} | {column: column for column in sorted(columns)}
    return rename_columns(rows, wanted, arguments, "image_column, or in the stage's policies")


def _draw(arguments: DataArguments, captions: str) -> datasets.Dataset:
    """Pairs of a built-in world."""
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
    """As `present_captions`; raises a ValueError where one is neither a text nor missing."""
    for caption in captions if isinstance(captions, list) else [captions]:
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
    rows = _with_lists(rows)
    return _split_lines(rows) if arguments.captions_per_line else rows


def rename_columns(
    rows: Rows, wanted: dict[str, str], arguments: DataArguments, settings: str = COLUMN_SETTINGS
) -> Rows:
    """These columns alone, under their new names. Images are not decoded yet, and their paths begin with `image_root`.

    Args:
        settings: by which others are named, for errors.
    """
    columns = rows.column_names
    if columns is None:  # a stream of unknown features tells with its first row
        with reading(arguments):
            columns = list(next(iter(rows), wanted))
    missing = [column for column in wanted if column not in columns]
    if missing:
        raise ValueError(f"{no_column(arguments.source, missing, columns)}. Name others by {settings}")
    # Decoded later, where an image that is broken can be skipped. First of all: a stream that selects columns decodes.
    # Images may also be plain bytes, or have no path beside them
    for column, name in wanted.items():
        feature = (rows.features or {}).get(column)
        is_plain = name in IMAGES and (isinstance(feature, dict) or feature in BYTES)
        if isinstance(feature, datasets.Image) or is_plain:
            rows = rows.cast_column(column, datasets.Image(decode=False))
    rows = rows.select_columns(list(wanted))
    rows = rows.rename_columns({old: new for old, new in wanted.items() if old != new})
    root, images = arguments.image_root, [name for name in IMAGES if name in wanted.values()]
    if root is None:
        return rows

    def whole(image: str | dict | None) -> str | dict | None:
        if isinstance(image, str):
            return file_in(root, image)
        missing = image is None or image["path"] is None
        return image if missing or image["bytes"] is not None else {**image, "path": file_in(root, image["path"])}

    def with_root(batch: dict[str, list]) -> dict[str, list]:
        return {name: [*map(whole, batch[name])] for name in images}

    return mapped(rows, with_root, batched=True, features=rows.features)


def _split_lines(rows: Rows) -> Rows:
    """Rows whose captions are the lines of what they were."""

    def split(row: dict[str, Any]) -> dict[str, list[str]]:
        lines = [line for text in present_texts(row["caption"]) for line in text.splitlines()]
        return {"caption": present_captions(lines)}

    return _with_captions(rows, split)


def _with_lists(rows: Rows) -> Rows:
    """Rows whose captions are lists, if one caption is a text such as `["a cat", "a dog"]`. A stream is judged by its
    first row."""
    feature = (rows.features or {}).get("caption", datasets.Value("string"))
    if not (isinstance(feature, datasets.Value) and is_text(feature())):
        return rows
    if isinstance(rows, datasets.IterableDataset):
        captions = [row["caption"] for row in rows.take(1)]
    else:
        texts = rows.data.column("caption").cast(pyarrow.large_string())
        captions = texts.filter(pyarrow.compute.match_substring_regex(texts, r"^\s*\[.*\]\s*$")).to_pylist()
    if not any(map(listed, captions)):
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
        return {"problem": read_pair(row, arguments, are_labels)[0]}

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
            fn_kwargs={"files": files},  # part of what the result is cached under
            is_kept=True,
            remove_columns=looked_at.column_names,
            num_proc=arguments.num_workers or None,
            desc=what,
        )
    problems = list(looks["problem"])
    bad = [index for index, problem in enumerate(problems) if problem]
    if bad:
        judge(len(bad), len(rows), f"pair {bad[0]} ({_where(rows[bad[0]])}): {problems[bad[0]]}", arguments)
        rows = rows.select([index for index, problem in enumerate(problems) if not problem])
    if len(rows) == 0:
        raise ValueError(nothing)
    return rows, len(bad)


def _is_there(image: str | dict[str, Any] | None) -> bool:
    return any(image.values()) if isinstance(image, dict) else bool(image)


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
        self.seen, self.bad, self.first = 0, 0, ""

    def add(self, row: dict[str, Any], problem: str) -> None:
        self.seen += 1
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
        too_many = self.bad > self.arguments.max_unreadable * self.seen * readers
        if self.bad and (readers == 1 or self.bad == self.seen or too_many):
            self._judge()

    def _judge(self) -> None:
        judge(self.bad, self.seen, self.first, self.arguments, self.quiet)


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
