"""Pairs of an image and a caption: the rows of any source."""

from collections.abc import Iterable

import datasets

from clip_moe.data.arguments import DataArguments
from clip_moe.data.columns import (
    IMAGE,
    TEXTS,
    UNDECODED,
    Rows,
    mapped,
    rename_columns,
    select_columns,
    with_class_names,
)
from clip_moe.data.identity import data_fingerprint, image_digests
from clip_moe.data.readable import readable_pairs
from clip_moe.data.sources import open_rows
from clip_moe.data.texts import present_captions
from clip_moe.data.worlds import is_world, world
from clip_moe.engine.context import Context


def load_pairs(arguments: DataArguments, images: bool = True) -> Rows:
    """The pairs of a dataset, as columns `image` and `caption`, or `image` alone where it has no captions.

    Every image is decoded once here (the result is cached by `datasets`), so that only readable pairs are left, in a
    fixed order. A stream has all pairs, and `indexed` data those that have an image and a caption:
    `clip_moe.training.loader` skips or replaces the unreadable.

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
        context.sample_bytes["drawn"] = rows.data.nbytes
    return rows


def shared_fingerprint(context: Context, rows: datasets.Dataset, images: bool = True) -> str:
    """`clip_moe.data.identity.data_fingerprint`, the main process first. Every process has to call it."""
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


def caption_columns(arguments: DataArguments, columns: Iterable[str]) -> datasets.Dataset:
    """The column `image` and these columns of any source.

    Worlds have `caption` (detailed) and `raw_caption` (web); one without such captions has those of `data.captions`.
    """
    if is_world(arguments.source):
        styles = world(arguments.source).caption_styles
        detailed, web = (
            _draw(arguments, style if style in styles else arguments.captions) for style in ("detailed", "web")
        )
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
