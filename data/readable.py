"""Usable pairs: every image is decoded once, and unreadable ones are counted, named and judged."""

import logging
import sys
import textwrap
from collections.abc import Iterable
from typing import Any

import datasets
import numpy as np
import PIL.Image

from clip_moe.data.arguments import DataArguments
from clip_moe.data.columns import mapped
from clip_moe.data.identity import named_files_stamp
from clip_moe.data.images import decode_image
from clip_moe.data.local_data import reading
from clip_moe.data.texts import present_texts
from clip_moe.engine.program import is_first_process

logger = logging.getLogger(__name__)

# Samples that one reader of a stream sees before it judges the share of unreadable ones
STREAM_TRIAL = 1000
# Fewer rows are read in no time
MANY = 1000
# The outcome of a look at a pair: see `read_pair`, and `decode_image` on pixels
LOOK = datasets.Features({"problem": datasets.Value("string"), "pixels": datasets.List(datasets.Value("float64"))})


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
        if "caption" in row and not (row["caption"].strip() if is_label else present_texts(row["caption"])):
            return "its caption is empty", None
    except ValueError as error:
        return str(error), None
    if "image" not in row:
        return "", None
    image = row["image"]
    if arguments.indexed:
        is_there = image and (not isinstance(image, dict) or image.get("bytes") or image.get("path"))
        return "" if is_there else "it has no image", None
    try:
        return "", decode_image(image)
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

    if len(rows) == 0:
        raise ValueError(f"{arguments.source} has no pairs in split {arguments.split}")
    description = f"reading all {len(rows)} {'images' if images else 'captions'}"
    if len(rows) >= MANY and datasets.are_progress_bars_disabled() and is_first_process():
        print(f"{description} of {arguments.source}, split {arguments.split}", file=sys.stderr, flush=True)
    with reading(arguments.source):
        files = named_files_stamp(rows) if images else ""
        looked_at = rows if images else rows.select_columns("caption")
        looks = mapped(
            looked_at,
            look,
            fn_kwargs={"files": files + PIL.__version__},  # part of what the result is cached under
            is_kept=True,
            remove_columns=looked_at.column_names,
            features=LOOK,
            num_proc=arguments.num_workers or None,
            desc=description,
        )
    report_pixels(looks["pixels"], arguments)
    problems = list(looks["problem"])
    good = [index for index, problem in enumerate(problems) if not problem]
    if num_bad := len(rows) - len(good):
        first = next(index for index, problem in enumerate(problems) if problem)
        judge(num_bad, len(rows), f"pair {first} ({_where(rows[first])}): {problems[first]}", arguments)
        rows = rows.select(good)
    return rows, num_bad


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
            judge(self.bad, self.seen, self.first, self.arguments, self.quiet)
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
            judge(self.bad, self.seen, self.first, self.arguments, self.quiet)


def report_pixels(pixels: Iterable[list[float] | None], arguments: DataArguments) -> None:
    """Warns of the gaps in pictures of more than 8 bits, and of a range that they leave or hardly use."""
    deep = np.array([facts for facts in pixels if facts]).reshape(-1, 5)
    gaps, low, high, black, white = deep.T
    beyond, start = (low < black) | (high > white), f"{arguments.source}: of {len(deep)} pictures of more than 8 bits,"
    if gaps.any():
        share = f"on average {gaps[gaps > 0].mean():.2%} of their pixels, which become black"
        logger.warning(f"{start} {(gaps > 0).sum()} have gaps (NaN, infinite or no-data values), {share}")
    if beyond.any():
        values = f"from {low.min():g} to {high.max():g}, which become black or white"
        logger.warning(f"{start} {beyond.sum()} have values beyond pixel_range, {values}")
    elif len(deep) and high.max() < ((black + white) / 2).min():
        top = 2 ** np.ceil(np.log2(high.max() + 1)) - 1 if white.max() > 1 else high.max()
        advice = f"if that is the sensor's maximum, set pixel_range, such as [{black.min():g}, {top:g}]"
        logger.warning(f"{start} none has a value above {high.max():g} of {white.max():g}: {advice}")


def judge(bad: int, total: int, first: str, arguments: DataArguments, quiet: bool = False) -> None:
    """Report skipped pairs, or refuse them."""
    share = f"{bad} of {total} pairs of {arguments.source} cannot be used; the first is {' '.join(first.split())}"
    if bad > arguments.max_unreadable * total:
        raise ValueError(
            f"{share}. More than max_unreadable = {arguments.max_unreadable:.0%} is an error: fix or remove them, or "
            "for training raise data.max_unreadable"
        )
    if not quiet:
        logger.warning("%s. Skipping them", share)


def _where(row: dict[str, Any]) -> str:
    """The file of a pair's image, or else its caption."""
    image = row["image"]
    path = image if isinstance(image, str) else image.get("path") if isinstance(image, dict) else None
    return path[:1000] if path else textwrap.shorten(f"no path; caption: {row.get('caption')}", 90)  # base64 is longer
