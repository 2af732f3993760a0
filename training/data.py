"""Pairs of images and captions: from where they lie to the batches of a process."""

import glob
import io
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
import PIL.Image
import torch
from datasets.distributed import split_dataset_by_node
from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass
from torch.utils.data import DataLoader
from transformers import CLIPProcessor

from training import glyphs
from training.samplers import ClusterBatchSampler, GlobalBatchSampler

logger = logging.getLogger(__name__)

# Samples of a stream to see before its share of unreadable ones is judged.
STREAM_TRIAL = 1000
SHUFFLE_BUFFER = 10_000


@dataclass(config=ConfigDict(extra="forbid"), kw_only=True)
class DataArguments:
    """Where the pairs are and how they are read."""

    # "glyphs"; a hub name; a folder of images with metadata.csv or metadata.jsonl, of parquet files or of webdataset
    # shards; a dataset saved with `save_to_disk`; a pattern of .parquet, .arrow or .tar files; a ShareGPT4V-style
    # .json.
    source: str
    split: str = "train"
    image_column: str = "image"
    # Texts, or lists of texts, of which each epoch draws one.
    caption_column: str = "caption"
    # What relative paths in the image column (and in a ShareGPT4V .json) start from.
    image_root: str | None = None
    # Read while training instead of loading first.
    streaming: bool = False
    # Only the first so many pairs; for glyphs, how many are drawn.
    num_samples: int | None = Field(default=None, gt=0)
    # Process all images once and keep the tensors: for small datasets, whose processing takes longer than training.
    in_memory: bool = False
    num_workers: int = Field(default=0, ge=0)
    # Pairs with an image that does not decode or an empty caption are skipped and counted; a larger share is an error.
    max_unreadable: float = Field(default=0.01, ge=0, lt=1)

    # Of the glyphs only.
    captions: Literal["web", "detailed"] = "web"
    kinds: Literal[tuple(glyphs.KIND_SETS)] = "all"
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _check(self):
        if self.source == "glyphs" and self.num_samples is None:
            raise ValueError("num_samples must say how many glyphs to draw")
        if self.streaming and (self.source == "glyphs" or self.in_memory):
            raise ValueError("streaming neither goes with the source glyphs nor with in_memory")
        return self


def load_pairs(arguments: DataArguments) -> datasets.Dataset | datasets.IterableDataset:
    """The readable pairs of a dataset, as columns `image` and `caption`.

    Unless it is streamed, every image is decoded once here (the result is cached by `datasets`), so that what is left
    has a fixed order and length. A streamed dataset skips unreadable pairs as they come.

    Raises:
        FileNotFoundError: a local source is not there.
        ValueError: a column is missing, or more than `max_unreadable` of the pairs cannot be read; names the first.
    """
    if arguments.source == "glyphs":
        kinds = glyphs.KIND_SETS[arguments.kinds]
        return glyphs.load(arguments.split, arguments.captions, arguments.num_samples, kinds, arguments.seed)
    rows = select_columns(open_rows(arguments), arguments)
    if arguments.streaming:
        return rows.filter(_StreamFilter(arguments))
    return readable_pairs(rows, arguments)[0]


def caption_columns(arguments: DataArguments, columns: Iterable[str]) -> datasets.Dataset:
    """The column `image` and these columns of any source. The glyphs have `caption` (detailed) and `raw_caption` (web).

    Raises:
        FileNotFoundError: a local source is not there.
        ValueError: a column is missing.
    """
    if arguments.source == "glyphs":
        kinds, number, seed = glyphs.KIND_SETS[arguments.kinds], arguments.num_samples, arguments.seed
        detailed, web = (glyphs.load(arguments.split, style, number, kinds, seed) for style in ("detailed", "web"))
        rows = detailed.add_column("raw_caption", list(web["caption"]))
    else:
        rows = open_rows(arguments)
    image = "image" if arguments.source == "glyphs" else arguments.image_column
    missing = sorted({image, *columns} - set(rows.column_names))
    if missing:
        raise ValueError(
            f"{arguments.source} has no column {', '.join(missing)}; its columns are {', '.join(rows.column_names)}"
        )
    rows = rows.select_columns([image, *sorted(columns)])
    rows = rows if image == "image" else rows.rename_column(image, "image")
    rows = rows.cast_column("image", datasets.Image(decode=False)) if _holds_images(rows) else rows
    return with_image_root(rows, arguments)


def with_image_root(rows: datasets.Dataset, arguments: DataArguments) -> datasets.Dataset:
    """Rows whose column `image` has whole paths, for those who read it without `image_root`."""
    root = arguments.image_root
    if root is None:
        return rows

    def whole(image: str | dict) -> str | dict:
        if isinstance(image, str):
            return os.path.join(root, image)
        return image if image["bytes"] is not None else {**image, "path": os.path.join(root, image["path"])}

    return rows.map(lambda row: {"image": whole(row["image"])})


def decode_image(value: Any, image_root: str | None = None) -> PIL.Image.Image:
    """An RGB image from what an image column holds: a PIL image, a path, or bytes and path.

    Raises:
        OSError: it is not there, is no image or ends early.
    """
    if isinstance(value, PIL.Image.Image):
        return value.convert("RGB")
    if isinstance(value, str):
        value = {"bytes": None, "path": value}
    if not isinstance(value, dict) or (value.get("bytes") is None and not value.get("path")):
        raise OSError("there is no image")
    file = (
        io.BytesIO(value["bytes"]) if value.get("bytes") is not None else os.path.join(image_root or "", value["path"])
    )
    try:
        with PIL.Image.open(file) as image:
            return image.convert("RGB")
    except (PIL.Image.DecompressionBombError, SyntaxError, ValueError) as error:
        raise OSError(str(error)) from error


def first_caption(captions: Sequence[str]) -> str:
    """The first of several captions that is not missing."""
    return next(caption for caption in captions if caption.strip())


class PairLoader:
    """The batches of one process, for ever, from any batch on.

    Args:
        rows: of `load_pairs`.
        batch_size: of this process.
        sampler: of this process's batches; default: all pairs, shuffled. A stream has none.
        caption_weights: of all L captions of an image, for `multi_positive_loss`; None: each epoch draws one caption.
        hidden_states: gives what stands in a batch for the images and beside the captions of these pairs.

    Raises:
        ValueError: the dataset is smaller than a global batch, or images do not have L captions, one of which has a
            weight.
    """

    def __init__(
        self,
        rows: datasets.Dataset | datasets.IterableDataset,
        processor: CLIPProcessor,
        arguments: DataArguments,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        sampler: GlobalBatchSampler | ClusterBatchSampler | None = None,
        caption_weights: Sequence[float] | None = None,
        hidden_states: Callable[[Sequence[int]], dict[str, torch.Tensor]] | None = None,
    ):
        self.processor, self.arguments, self.batch_size, self.seed = processor, arguments, batch_size, seed
        self.rank, self.world_size, self.all_captions = rank, world_size, caption_weights is not None
        if arguments.streaming and not (sampler is None and caption_weights is None and hidden_states is None):
            raise ValueError("a stream has no numbered pairs for a sampler, caption weights or hidden states")
        if caption_weights is not None:
            _require_weighted(rows, caption_weights, arguments.source)
        if arguments.streaming:
            self.rows = split_dataset_by_node(rows.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER), rank, world_size)
        else:
            self.hidden_states = hidden_states
            self.pairs = _Pairs(rows, processor, arguments, seed, self.all_captions, hidden_states is None)
            if sampler is None:
                sampler = GlobalBatchSampler(len(rows), batch_size, rank, world_size, seed)
            self.sampler = sampler

    def __len__(self) -> int:
        """Batches of an epoch; a stream has no known length."""
        return len(self.sampler)

    def batches(self, start: int) -> Iterator[dict[str, torch.Tensor]]:
        """Batches from number `start` of the run on: `pixel_values` (B, C, H, W), `input_ids` and `attention_mask`
        (B, S), padded to the longest caption and cut at the tokenizer's `model_max_length`.

        With `caption_weights` they hold the captions of all images, one image after the other, without those that are
        missing, and `caption_mask` (B, L) tells which these are.
        """
        if self.arguments.streaming:
            # A stream has to be read again up to where the run stopped.
            yield from DataLoader(
                self.rows.repeat(None).skip(start * self.batch_size).map(self._process),
                batch_size=self.batch_size,
                drop_last=True,
                **self._options,
            )
        epoch, start_batch = divmod(start, len(self.sampler))
        while True:
            self.sampler.set_epoch(epoch, start_batch)
            self.pairs.epoch = epoch
            yield from DataLoader(self.pairs, batch_sampler=self.sampler, **self._options)
            epoch, start_batch = epoch + 1, 0

    def in_order(self, start: int, stop: int) -> Iterator[dict[str, torch.Tensor]]:
        """Batches as above of the pairs from `start` to `stop` in their order, the last one perhaps smaller; of several
        captions, with the first."""
        self.pairs.epoch = None
        starts = range(start, stop, self.batch_size)
        batches = [list(range(first, min(first + self.batch_size, stop))) for first in starts]
        yield from DataLoader(self.pairs, batch_sampler=batches, **self._options)

    def text_lengths(self) -> list[int]:
        """Tokens of every caption that `in_order` gives, padding left out."""
        self.pairs.epoch = None
        lengths = []
        for start in range(0, len(self.pairs), 1000):
            captions = [self.pairs.caption(index) for index in range(start, min(start + 1000, len(self.pairs)))]
            if self.all_captions:
                captions = [caption for of_image in captions for caption in of_image if caption.strip()]
            lengths += map(len, self.processor.tokenizer(captions, truncation=True)["input_ids"])
        return lengths

    @property
    def _options(self) -> dict[str, Any]:
        # Without a generator, every DataLoader that begins draws from the global one, of which dropout and the router's
        # noise draw: what a resumed run draws would depend on where it was interrupted
        generator = torch.Generator().manual_seed(self.seed)
        return {"collate_fn": self._collate, "num_workers": self.arguments.num_workers, "generator": generator}

    def _process(self, row: dict[str, Any]) -> dict[str, Any]:
        return {
            "pixel_values": _pixel_values([row["image"]], self.processor, self.arguments)[0],
            "caption": row["caption"] if isinstance(row["caption"], str) else row["caption"][0],
        }

    def _collate(self, pairs: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        captions = [pair["caption"] for pair in pairs]
        if self.all_captions:
            texts = [caption for of_image in captions for caption in of_image if caption.strip()]
        else:
            texts = captions
        text = self.processor.tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        batch = {"input_ids": text["input_ids"], "attention_mask": text["attention_mask"]}
        if "pixel_values" in pairs[0]:
            batch["pixel_values"] = torch.stack([torch.as_tensor(pair["pixel_values"]) for pair in pairs])
        else:
            batch |= self.hidden_states([pair["index"] for pair in pairs])
        if self.all_captions:
            batch["caption_mask"] = torch.tensor([[bool(caption.strip()) for caption in row] for row in captions])
        return batch


class _Pairs(torch.utils.data.Dataset):
    """Processed pairs by number, with all captions, or with the one of several that `epoch` draws: without an epoch,
    the first."""

    def __init__(
        self,
        rows: datasets.Dataset,
        processor: CLIPProcessor,
        arguments: DataArguments,
        seed: int,
        all_captions: bool,
        with_images: bool,
    ):
        self.images, self.captions = rows.select_columns("image"), rows.select_columns("caption")
        self.processor, self.arguments, self.seed, self.epoch = processor, arguments, seed, 0
        self.all_captions, self.with_images, self.pixel_values = all_captions, with_images, None
        if arguments.in_memory and with_images:
            parts = [_pixel_values(rows[i : i + 64]["image"], processor, arguments) for i in range(0, len(rows), 64)]
            self.pixel_values = torch.cat(parts)
        if arguments.in_memory:
            self.captions = [{"caption": caption} for caption in rows["caption"]]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        pair = {"index": index, "caption": self.caption(index)}
        if self.pixel_values is not None:
            pair["pixel_values"] = self.pixel_values[index]
        elif self.with_images:
            pair["pixel_values"] = _pixel_values([self.images[index]["image"]], self.processor, self.arguments)[0]
        return pair

    def caption(self, index: int) -> str | list[str]:
        """The caption or captions of a pair, without its image."""
        captions = self.captions[index]["caption"]
        if isinstance(captions, str) or self.all_captions:
            return captions
        if self.epoch is None:
            return first_caption(captions)
        captions = [caption for caption in captions if caption.strip()]
        return captions[np.random.default_rng([self.seed, self.epoch, index]).integers(len(captions))]


def _require_weighted(rows, caption_weights: Sequence[float], source: str) -> None:
    """Every image must have as many captions as there are weights. Reports the missing ones."""
    missing = [0] * len(caption_weights)
    for index, captions in enumerate(rows["caption"]):
        if isinstance(captions, str) or len(captions) != len(caption_weights):
            number = "one caption" if isinstance(captions, str) else f"{len(captions)} captions"
            raise ValueError(
                f"caption_weights has {len(caption_weights)} weights, but image {index} of {source} {number}"
            )
        there = [bool(caption.strip()) for caption in captions]
        missing = [count + (not is_there) for count, is_there in zip(missing, there, strict=True)]
        if not any(weight > 0 and is_there for weight, is_there in zip(caption_weights, there, strict=True)):
            raise ValueError(f"image {index} of {source} has no caption with a weight: {captions}")
    if any(missing):
        logger.warning(
            "%s: of %d images, %s have no caption in place 0, 1, ...; their other captions get its weight",
            source, len(rows), ", ".join(map(str, missing)),
        )  # fmt: skip


def _pixel_values(images: list[Any], processor: CLIPProcessor, arguments: DataArguments) -> torch.Tensor:
    images = [decode_image(image, arguments.image_root) for image in images]
    return processor.image_processor(images, return_tensors="pt")["pixel_values"]


def open_rows(arguments: DataArguments) -> datasets.Dataset | datasets.IterableDataset:
    """The rows of any source but the glyphs, with all their columns.

    Raises:
        FileNotFoundError: a local source is not there.
        ValueError: an entry of a ShareGPT4V-style file has no image or no caption.
    """
    rows = _open(arguments)
    return rows if arguments.num_samples is None else rows.take(arguments.num_samples)


def _open(arguments: DataArguments) -> datasets.Dataset | datasets.IterableDataset:
    source, options = arguments.source, {"split": arguments.split, "streaming": arguments.streaming}
    if source.endswith(".json"):
        return _open_sharegpt4v(Path(source), arguments)
    for suffix, builder in {".tar": "webdataset", ".parquet": "parquet", ".arrow": "arrow"}.items():
        pattern = f"{source}/**/*{suffix}" if os.path.isdir(source) else source
        if pattern.endswith(suffix) and not (os.path.isdir(source) and (Path(source) / "state.json").exists()):
            files = sorted(glob.glob(pattern, recursive=True))
            if files:
                return datasets.load_dataset(builder, data_files={arguments.split: files}, **options)
            if not os.path.isdir(source):
                raise FileNotFoundError(f"no file matches {source}")
    if not os.path.isdir(source):
        return datasets.load_dataset(source, **options)
    if (Path(source) / "state.json").exists():
        rows = datasets.load_from_disk(source)
        return rows.to_iterable_dataset() if arguments.streaming else rows
    return datasets.load_dataset("imagefolder", data_dir=source, **options)


def _open_sharegpt4v(path: Path, arguments: DataArguments) -> datasets.Dataset | datasets.IterableDataset:
    """ShareGPT4V's format: a list of {"image": path, "conversations": [..., {"from": "gpt", "value": caption}]}."""
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    with path.open(encoding="utf-8") as file:
        entries = json.load(file)
    rows = {arguments.image_column: [], arguments.caption_column: []}
    for number, entry in enumerate(entries):
        try:
            caption = next(turn["value"] for turn in entry["conversations"] if turn["from"] == "gpt")
            image = entry["image"]
        except (KeyError, StopIteration, TypeError) as error:
            raise ValueError(f"{path}: entry {number} has no image or no answer of gpt: {entry}") from error
        rows[arguments.image_column].append(image)
        rows[arguments.caption_column].append(caption)
    rows = datasets.Dataset.from_dict(rows)
    return rows.to_iterable_dataset() if arguments.streaming else rows


def select_columns(rows, arguments: DataArguments):
    """The image and the caption column alone, under those names; images are not decoded yet.

    Raises:
        ValueError: one of them is not there.
    """
    wanted = {arguments.image_column: "image", arguments.caption_column: "caption"}
    columns = rows.column_names
    if columns is not None:  # a stream of unknown features tells with its first row
        missing = [column for column in wanted if column not in columns]
        if missing:
            raise ValueError(
                f"{arguments.source} has no column {', '.join(missing)}; its columns are {', '.join(columns)}. Set "
                "image_column and caption_column"
            )
        rows = rows.select_columns(list(wanted))
    rows = rows.rename_columns({old: new for old, new in wanted.items() if old != new})
    if _holds_images(rows):
        # Decoded here, where an image that is broken can be skipped.
        rows = rows.cast_column("image", datasets.Image(decode=False))
    return rows


def _holds_images(rows) -> bool:
    return isinstance((rows.features or {}).get("image"), datasets.Image)


def _problem(row: dict[str, Any], arguments: DataArguments) -> str:
    """What keeps a pair from being used, or nothing."""
    captions = row["caption"] if isinstance(row["caption"], list) else [row["caption"]]
    if not all(isinstance(caption, str) for caption in captions) or not "".join(captions).strip():
        return "its caption is empty"
    try:
        decode_image(row["image"], arguments.image_root)
    except OSError as error:
        return f"its image cannot be read: {error}"
    return ""


def readable_pairs(rows: datasets.Dataset, arguments: DataArguments) -> tuple[datasets.Dataset, int]:
    """The rows of `select_columns` without the unreadable ones, and how many those were. Decodes every image.

    Raises:
        ValueError: they are more than `max_unreadable` of all, or nothing is left.
    """
    problems = rows.map(
        lambda row: {"problem": _problem(row, arguments)},
        remove_columns=rows.column_names,
        num_proc=arguments.num_workers or None,
        desc="reading all images",
    )["problem"]
    problems = list(problems)
    bad = [index for index, problem in enumerate(problems) if problem]
    if bad:
        _judge(len(bad), len(rows), f"pair {bad[0]} ({_where(rows[bad[0]])}): {problems[bad[0]]}", arguments)
        rows = rows.select([index for index, problem in enumerate(problems) if not problem])
    if len(rows) == 0:
        raise ValueError(f"{arguments.source} has no pairs in split {arguments.split}")
    return rows, len(bad)


class _StreamFilter:
    """Keeps readable pairs, counts the others; every worker has its own."""

    def __init__(self, arguments: DataArguments):
        self.arguments, self.seen, self.bad, self.first = arguments, 0, 0, ""

    def __call__(self, row: dict[str, Any]) -> bool:
        problem = _problem(row, self.arguments)
        self.seen += 1
        if problem:
            self.bad += 1
            self.first = self.first or f"pair {self.seen - 1} ({_where(row)}): {problem}"
            if self.seen < STREAM_TRIAL:
                logger.warning("%s: %d of %d pairs skipped so far", self.arguments.source, self.bad, self.seen)
        if self.seen >= STREAM_TRIAL and problem:
            _judge(self.bad, self.seen, self.first, self.arguments)
        return not problem


def _judge(bad: int, total: int, first: str, arguments: DataArguments) -> None:
    """Report skipped pairs, or refuse them."""
    share = f"{bad} of {total} pairs of {arguments.source} cannot be used; the first is {first}"
    if bad > arguments.max_unreadable * total:
        raise ValueError(f"{share}. More than max_unreadable = {arguments.max_unreadable:.0%} is an error")
    logger.warning("%s. They are skipped", share)


def _where(row: dict[str, Any]) -> str:
    image = row["image"]
    return str(image if isinstance(image, str) else (image or {}).get("path") or "no path")
