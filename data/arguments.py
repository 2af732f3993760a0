"""Settings of data. Importing them imports nothing heavy."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, FiniteFloat, model_validator
from pydantic.dataclasses import dataclass

from clip_moe.data.worlds import MOVED, is_world, world
from clip_moe.engine.settings import Reads, Source, refuse


@dataclass(config=ConfigDict(extra="forbid", defer_build=True), kw_only=True)
class DataArguments(Source):
    """The source of pairs, and the way to read them."""

    # "icons", "names" or "symbols", the built-in worlds, or a world of your own, `package.module:OBJECT`; a hub name; a
    # folder of images with a metadata.csv or .jsonl, with a .txt beside each, or in folders of classes; a folder of
    # parquet files or of webdataset shards; a dataset saved with `save_to_disk`; a pattern of .parquet, .arrow, .tar,
    # .tar.gz, .csv, .tsv, .jsonl or .json files. A .json holds a list of objects, ShareGPT4V, COCO's captions or a
    # Karpathy split.
    source: str
    # A missing split raises an error. A folder of images has those of its folders train, test and validation; parquet
    # files and shards those of their README.md or names (`test/0.tar`, `test-00000.parquet`); tables those of their
    # column `split`; a dataset saved to disk its own; all others are "train". A pattern is all that it names. A
    # Karpathy split may have several: "train+restval".
    split: str = "train"
    # Images, or paths of images. Of shards, the ending of their files, or several: `jpg;png`.
    image_column: str = "image"
    # Texts, or lists of texts, of which each epoch draws one. `json.caption` is the key `caption` of objects in `json`.
    # None: pictures alone, which an `embed` stage takes.
    caption_column: str | None = "caption"
    # Each line of a text is a caption, as in the retrieval shards of CLIP_benchmark.
    captions_per_line: bool = False
    # The folder of relative paths in the image column (and in a .json); None: the one in which the command runs.
    image_root: str | None = None
    # Black and white of gray pictures of more than 8 bits, such as [0, 1023] for a sensor of 10 bits in files of 16, or
    # [-1024, 3071] for CT. None: those of the format: all values of unsigned integers of up to 16 bits, 0 and 1 of
    # floats.
    pixel_range: list[FiniteFloat] | None = Field(default=None, min_length=2, max_length=2)
    # Read while training instead of loading first.
    streaming: bool = False
    # Skip the check of all images before training (for many shards). Unreadable images are replaced by the next pair
    # and counted.
    indexed: bool = False
    # Leave out the first `skip` pairs, for example for a test.
    skip: int | None = Field(default=None, gt=0)
    # Use the first `num_samples` pairs; in a world, draw that many.
    num_samples: int | None = Field(default=None, gt=0)
    # Process all images once and keep the tensors: for small datasets, whose processing takes longer than training.
    in_memory: bool = False
    # Processes that read data; 0: the training process reads.
    num_workers: int = Field(default=0, ge=0)
    # Pairs with an image that does not decode or an empty caption are skipped and counted; a larger share is an error.
    max_unreadable: float = Field(default=0.01, ge=0, lt=1)

    # Worlds only: which captions are drawn: "web" or "detailed". For symbols also "looks", everything but the kind, and
    # "classes", the kind alone, like captions of a folder of classes; for names also "facts", everything but the name.
    captions: str = "web"
    # Worlds only: a set of kinds: "all", symbols' "planet", names' "4096 half 1", icons' "brands".
    kinds: str = Field(default="all", coerce_numbers_to_str=True)  # YAML reads 4096 as a number
    # Worlds only: seed of the drawing. None: the recipe's seed, so that other seeds see other pictures; 0 outside a
    # recipe.
    seed: int | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _check(self):
        is_drawn, streaming = self.is_drawn, self.streaming
        black, white = self.pixel_range or (0, 1)
        refuse(
            (self.source in MOVED, f"the world {self.source} is {MOVED.get(self.source)}, in a checkout"),
            (is_drawn and self.num_samples is None, f"num_samples is required: how many {self.source} to draw"),
            (black >= white, f"pixel_range: black must be less than white, got {self.pixel_range}"),
            (streaming and (is_drawn or self.in_memory), "streaming excludes worlds and in_memory"),
            (
                self.indexed and (is_drawn or streaming or self.in_memory),
                "indexed excludes worlds, streaming and in_memory",
            ),
            (self.skip and (is_drawn or streaming), "skip excludes worlds and streaming"),
        )
        if is_drawn:
            drawn = world(self.source)
            drawn.require(self.split, self.captions)
            drawn.kinds(self.kinds)  # raises where there is none
        return self

    @property
    def is_drawn(self) -> bool:
        """Whether the source is a world."""
        return is_world(self.source)

    @property
    def incidental(self) -> Collection[str]:
        """Settings of reading ahead. The workers of a stream are none: they settle its order."""
        return () if self.streaming else ("num_workers",)

    def take_seed(self, seed: int) -> None:
        """Draw a world with the recipe's seed, unless it has its own."""
        if self.is_drawn and self.seed is None:
            self.seed = seed

    def faults(self, output_dir: Path) -> Iterator[tuple[str, str | None]]:
        from clip_moe.data.local_data import missing_data
        from clip_moe.engine.local_names import output_inside

        if self.image_root is not None and not Path(self.image_root).is_dir():
            yield "image_root", f"there is no folder {self.image_root}"
        yield "source", missing_data(self.source)
        yield "source", output_inside(output_dir, self.source)

    def identity(self) -> dict[str, Any] | None:
        from clip_moe.data.identity import identity

        return identity(self)

    def first(self, number: int, skips: bool = True) -> DataArguments:
        """The first pairs alone; a stream stays as it is."""
        if self.streaming:
            return self
        skip = self.skip if skips else None
        return replace(self, skip=skip, num_samples=min(number, self.num_samples or number))

    def count(self, ratio: float = 1) -> float | None:
        """The number of pairs, of a split that has `ratio` of the rows; None for a stream."""
        from clip_moe.data.sources import open_rows

        if self.streaming:
            return None
        if self.is_drawn:
            return self.num_samples
        if ratio == 1:
            return len(open_rows(self))
        whole = len(open_rows(replace(self, skip=None, num_samples=None)))
        return min(ratio * whole - (self.skip or 0), self.num_samples or math.inf)

    @property
    def taken_rows(self) -> slice:
        """The rows of a source that `skip` and `num_samples` leave."""
        start = self.skip or 0
        return slice(start, None if self.num_samples is None else start + self.num_samples)


def _captioned(data: DataArguments) -> DataArguments:
    refuse((data.caption_column is None, "caption_column: this stage needs captions: name their column"))
    return data


def _numbered(data: DataArguments) -> DataArguments:
    fault = "streaming: this stage needs numbered samples and a length, which a stream lacks: remove it"
    refuse((data.streaming, fault))
    return data


# The source may be a stage that makes a dataset
ReadData = Annotated[DataArguments, Reads("pairs", outside=False)]
Data = Annotated[ReadData, AfterValidator(_captioned)]
# Data with a length: labels and features belong to the numbers of their samples
NumberedPictures = Annotated[ReadData, AfterValidator(_numbered)]
NumberedData = Annotated[Data, AfterValidator(_numbered)]


@dataclass(config=ConfigDict(extra="forbid", defer_build=True), kw_only=True)
class Augmentation:
    """Random changes to training images, new in every epoch."""

    # Least and greatest share of the image's area in a random crop, such as open_clip's [0.9, 1.0]. The crop is resized
    # to the model's size.
    random_resized_crop: list[Annotated[float, Field(gt=0, le=1)]] = Field(min_length=2, max_length=2)


@dataclass(config=ConfigDict(extra="forbid", defer_build=True), kw_only=True)
class CaptionPolicy:
    """A rule that makes one or more captions of an image from a column of text."""

    # full: the text. first_sentence: its first one. packed: random combinations of its sentences that fit `max_tokens`,
    # none cut, no two alike.
    policy: Literal["full", "first_sentence", "packed"]
    # The column of the text.
    column: str
    # Number of packed captions per image.
    count: int = Field(default=1, gt=0)
    # With the first and the last token; None: the tokenizer's `model_max_length`.
    max_tokens: int | None = Field(default=None, gt=2)

    @model_validator(mode="after")
    def _check(self):
        has_size = self.count != 1 or self.max_tokens is not None
        refuse((has_size and self.policy != "packed", f"count and max_tokens need policy packed, got {self.policy}"))
        return self
