"""Pairs of images and captions as the batches of a process."""

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import datasets
import numpy as np
import torch
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader, default_collate, get_worker_info
from transformers import CLIPProcessor

from clip_moe.data.arguments import Augmentation, DataArguments
from clip_moe.data.columns import Rows
from clip_moe.data.identity import named_files_stamp
from clip_moe.data.local_data import reading
from clip_moe.data.overview import look_at
from clip_moe.data.preparation import Preparation
from clip_moe.data.readable import STREAM_TRIAL, StreamReport, judge, read_pair
from clip_moe.data.texts import first_caption, present_captions
from clip_moe.data.tokenizer import SAMPLE, pieces_per_word, read_texts, tokenize
from clip_moe.data.workers import errors_of_workers, worker_options
from clip_moe.data.worlds import is_world
from clip_moe.engine.messages import shortened
from clip_moe.training.duplicates import streamed_image_key, token_keys
from clip_moe.training.samplers import DistributedBatchSampler, GlobalBatchSampler, Share

logger = logging.getLogger(__name__)

SHUFFLE_BUFFER = 10_000
# Pairs whose captions are sampled for the report, of a dataset and of a stream
CAPTIONS_LOOKED_AT, STREAMED_LOOKED_AT = 100_000, 1000
# A tokenizer whose captions these are needs little more than one piece a word, OpenAI's for English 1.1
MANY_PIECES = 2


class PairLoader:
    """The batches of one process, for ever, from any batch on.

    Args:
        rows: what `clip_moe.data.pairs.load_pairs` returns.
        share: how large batches are, and which part of them is this process's.
        sampler: draws this process's batches; default: all pairs, shuffled. A stream has none.
        caption_weights: one for each of an image's L captions, for `multi_positive_loss`; None: each epoch draws one.
        augmentation: changes every image, by numbers that the seed, its epoch and its own number settle; None: none is.
        image_keys: (pairs,) of int64, the same for equal images; True: a stream makes them. Batches then have the keys
            of their images and texts; None: they have none.
        kept: names -> (pairs, ...), further fields of batches.
    """

    def __init__(
        self,
        rows: Rows,
        processor: CLIPProcessor,
        arguments: DataArguments,
        share: Share,
        sampler: DistributedBatchSampler | None = None,
        caption_weights: Sequence[float] | None = None,
        augmentation: Augmentation | None = None,
        image_keys: np.ndarray | Literal[True] | None = None,
        kept: Mapping[str, np.ndarray] | None = None,
    ):
        self.rows, self.processor, self.arguments, self.share = rows, processor, arguments, share
        self.caption_weights, self.image_keys, self.kept = caption_weights, image_keys, kept or {}
        # Text -> its tokens so far, with `in_memory`: for a tiny model, tokenizing takes longer than computing
        self.tokens: dict[str, list[int]] = {}
        readers = max(arguments.num_workers, 1) * share.world_size
        if arguments.streaming and arguments.num_samples is not None and readers > 1:
            raise ValueError(
                f"num_samples = {arguments.num_samples}: a stream shared by {share.world_size} processes with "
                f"{arguments.num_workers} workers has no first pairs. Load it, or read it with one"
            )
        if caption_weights is not None:
            _require_weighted(rows, caption_weights, arguments.source)
        self.prepare = Preparation(processor.image_processor, augmentation)
        if not arguments.streaming:
            self.pairs = _Pairs(rows, self.prepare, arguments, share.seed, caption_weights is not None)
            self.sampler = sampler or GlobalBatchSampler(len(rows), share)

    def __len__(self) -> int:
        """Batches of an epoch, unless it is a stream."""
        return len(self.sampler)

    @property
    def bytes_in_memory(self) -> int:
        """Bytes of the images that `in_memory` keeps."""
        prepared = {} if self.arguments.streaming else self.pairs.prepared or {}
        return sum(value.nbytes for value in prepared.values())

    def batches(self, start: int) -> Iterator[dict[str, torch.Tensor]]:
        """Batches from number `start` of the run on: what `Preparation` makes of B images, `input_ids` and
        `attention_mask` (B, S), padded to the longest caption and cut at the tokenizer's `model_max_length`.

        With `caption_weights` they hold the captions of all images that are there, one image after the other, and
        `caption_mask` (B, L). With `image_keys`, they have the fields of `clip_moe.training.losses.Pairing`.
        """
        if self.arguments.streaming:
            yield from self._streamed_batches(start)
            raise ValueError(f"{self.arguments.source} has no pairs in split {self.arguments.split}")
        # One for the whole run: workers that would end with an epoch would have to start again and read nothing ahead
        with errors_of_workers():
            yield from DataLoader(self.pairs, batch_sampler=self.sampler.from_batch(start), **self._options)

    def in_order(self) -> "PairBatches":
        """Batches as above of all pairs in their order, the last one perhaps smaller; of several captions, with the
        first, or with `caption_weights`."""
        return PairBatches(self)

    def report_captions(self, stage: str) -> None:
        """Prints what captions are like, and warns of those that are all alike or whose words the tokenizer hardly
        knows. Of a built-in world, it only tells how many captions are cut."""
        source, tokenizer = self.arguments.source, self.processor.tokenizer
        if self.arguments.streaming:
            captions = [row["caption"] for row in self.rows.take(STREAMED_LOOKED_AT)]
            rows, looked_at = datasets.Dataset.from_dict({"caption": captions}), f"the first {len(captions):,}"
        else:
            chosen = np.random.default_rng(self.share.seed).permutation(len(self.rows))[:CAPTIONS_LOOKED_AT]
            rows = self.rows.select_columns("caption").select(np.sort(chosen))
            looked_at = f"{len(rows):,} of {len(self.rows):,}" if len(rows) < len(self.rows) else ""
        captions = [caption for image_captions in rows["caption"] for caption in present_captions(image_captions)]
        if not captions:  # the batches say why
            return
        if len(captions) > 1 and len(set(captions)) == 1:
            logger.warning(
                "all %d captions sampled from %s are %s, so batches have no negatives",
                len(captions), source, shortened(captions[0]),
            )  # fmt: skip
        pieces = pieces_per_word(tokenizer, captions[:SAMPLE])
        if pieces > MANY_PIECES:
            logger.warning(
                "the tokenizer splits a word of the captions of %s into %.1f pieces on average. For a model from "
                "scratch, a tokenizer stage learns a better one from them, with fewer pieces the larger its vocab_size",
                source, pieces,
            )  # fmt: skip
        advice = (
            ": a `captions` stage makes shorter ones of them; a `long_context` stage, or max_position_embeddings of an "
            "`initialize` stage, makes a model that reads more"
        )
        if is_world(source):
            texts = read_texts(tokenizer, captions)
            cut = f"{sum(texts.is_cut):,} captions are longer than {texts.max_length} tokens, and are cut{advice}."
            lines = [cut] if any(texts.is_cut) else []
        else:
            lines = look_at(rows, None, tokenizer, advice)
        if looked_at and lines:
            lines.insert(0, f"Of the pairs of {source}, these are {looked_at}.")
        print("".join(f"{stage}: {line}\n" for line in lines), end="")

    def _streamed_batches(self, start: int) -> Iterator[dict[str, torch.Tensor]]:
        """A stream has to be read again up to where the run stopped."""
        rows = split_dataset_by_node(self.rows, self.share.rank, self.share.world_size)
        num_workers = min(self.arguments.num_workers, rows.num_shards)  # others would have nothing to read
        readers = self.share.world_size * max(num_workers, 1)
        options = self._options | {"num_workers": num_workers}
        with reading(self.arguments.source), errors_of_workers():
            loader = DataLoader(_Stream(self, readers), batch_size=self.share.batch_size, drop_last=True, **options)
            # Not by workers, which do not always take turns: one may have nothing to read
            yield from itertools.islice(loader, start, None)

    @property
    def _options(self) -> dict[str, Any]:
        return worker_options(self.arguments, self.share.seed) | {"collate_fn": self.collate}

    def collate(self, pairs: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """A batch of what `_Pairs` and `_Stream` give."""
        tokenizer, texts = self.processor.tokenizer, [present_captions(pair["caption"]) for pair in pairs]
        ids = self._ids([text for image_captions in texts for text in image_captions])
        batch = tokenize(tokenizer, ids=ids)
        if "image" in pairs[0]:
            # Within a worker, in memory that the other processes have too
            batch |= default_collate([pair["image"] for pair in pairs])
        else:
            numbers = [pair["index"] for pair in pairs]
            batch |= {name: values[numbers] for name, values in self.pairs.prepared.items()}
        if self.caption_weights is not None:
            are_present = [[bool(present_captions(caption)) for caption in pair["caption"]] for pair in pairs]
            batch["caption_mask"] = torch.tensor(are_present)
        if self.image_keys is not None:
            batch["text_keys"] = token_keys(batch["input_ids"], batch["attention_mask"], tokenizer.eos_token_id)
            keys = [pair["image_key"] if "image_key" in pair else self.image_keys[pair["index"]] for pair in pairs]
            batch["image_keys"] = torch.from_numpy(np.array(keys, np.int64))
        numbers = [pair["index"] for pair in pairs] if self.kept else []
        return batch | {name: torch.from_numpy(values[numbers]) for name, values in self.kept.items()}

    def _ids(self, texts: list[str]) -> list[list[int]]:
        if not self.arguments.in_memory:
            return self.processor.tokenizer(texts, truncation=True)["input_ids"]
        new = [text for text in dict.fromkeys(texts) if text not in self.tokens]
        if new:
            self.tokens.update(zip(new, self.processor.tokenizer(new, truncation=True)["input_ids"], strict=True))
        return [self.tokens[text] for text in texts]


class _Stream(torch.utils.data.IterableDataset):
    """The readable pairs of a stream, processed, epoch after epoch, each in an order of its own. Every worker has its
    share of the shards. Of several captions, each epoch draws one."""

    def __init__(self, loader: PairLoader, readers: int):
        self.loader, self.readers = loader, readers

    def __iter__(self) -> Iterator[dict[str, Any]]:
        loader, share, worker = self.loader, self.loader.share, get_worker_info()
        for epoch in itertools.count():
            report = StreamReport(loader.arguments, quiet=epoch > 0)
            # Not by the rows' `set_epoch`, which the workers have in common: one may be epochs ahead of another
            generator = np.random.default_rng([share.seed, epoch])
            rows = loader.rows.shuffle(generator=generator, buffer_size=SHUFFLE_BUFFER)
            for row in split_dataset_by_node(rows, share.rank, share.world_size):
                problem, image = read_pair(row, loader.arguments)
                report.add(row, problem, image)
                if problem:
                    continue
                rng = np.random.default_rng([share.seed, share.rank, worker.id if worker else 0, epoch, report.seen])
                caption = _draw(row["caption"], rng)
                key = {"image_key": streamed_image_key(row["image"])} if loader.image_keys else {}
                yield {"image": loader.prepare(image, rng), "caption": caption} | key
            if report.seen == 0:
                return
            report.end_of_epoch(self.readers)


class _Pairs(torch.utils.data.Dataset):
    """Processed pairs by epoch and number, with all captions, or with the one of several that the epoch draws: without
    an epoch, the first."""

    def __init__(
        self, rows: datasets.Dataset, prepare: Preparation, arguments: DataArguments, seed: int, all_captions: bool
    ):
        self.rows, self.captions = rows.select_columns("image"), rows.select_columns("caption")
        self.prepare, self.arguments, self.seed, self.all_captions = prepare, arguments, seed, all_captions
        self.prepared, self.unreadable, self.tried, self.failed, self.first = None, set(), 0, 0, ""
        if arguments.in_memory:
            self.prepared = _prepared(self.rows, prepare)
            self.captions = [{"caption": caption} for caption in rows["caption"]]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, epoch_and_index: tuple[int | None, int]) -> dict[str, Any]:
        epoch, index = epoch_and_index
        while True:
            self.tried += 1
            try:
                return self._pair(epoch, index)
            except OSError as error:
                index = self._substitute(index, error)

    def _substitute(self, index: int, error: OSError) -> int:
        """The pair that takes the place of one whose image cannot be read, of shards that nobody looked through."""
        if not self.arguments.indexed:
            raise error
        self.failed += 1
        is_new = index not in self.unreadable
        self.unreadable.add(index)
        image = self.rows[index]["image"]
        where = image.get("path") if isinstance(image, dict) else image
        self.first = self.first or f"pair {index} ({where}): {error}"
        if self.tried >= STREAM_TRIAL:
            judge(self.failed, self.tried, self.first, self.arguments, quiet=True)
        judge(len(self.unreadable), len(self), self.first, self.arguments, quiet=not is_new)
        return (index + 1) % len(self)

    def _pair(self, epoch: int | None, index: int) -> dict[str, Any]:
        captions = self.captions[index]["caption"]
        if self.all_captions and not isinstance(captions, str):
            captions = [caption or "" for caption in captions]
        elif epoch is None or isinstance(captions, str):  # nothing to draw
            captions = first_caption(captions)
        else:
            captions = _draw(captions, np.random.default_rng([self.seed, epoch, index]))
        pair = {"index": index, "caption": captions}
        if self.prepared is None:
            # Other numbers than those that draw the caption
            rng = None if epoch is None else np.random.default_rng([self.seed, epoch, index, 1])
            pair["image"] = self.prepare.read(self.rows[index]["image"], rng)
        return pair


class PairBatches(torch.utils.data.Dataset):
    """Pairs in their order, for `clip_moe.evaluation.embedder.Embedder`."""

    def __init__(self, loader: PairLoader):
        self.loader, self.items, self.batch_size = loader, loader.pairs, loader.share.batch_size
        weights = loader.caption_weights
        self.extra = {} if weights is None else {"caption_weights": torch.tensor(weights)}

    def __len__(self) -> int:
        return -(-len(self.items) // self.batch_size)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        numbers = range(len(self.items))[number * self.batch_size : (number + 1) * self.batch_size]
        return self.loader.collate([self.items[None, index] for index in numbers]) | self.extra


# Images of the last pairs in memory, by fingerprint, files and image processor: most stages of a recipe use the same
_PREPARED: dict[tuple[str, str, str], dict[str, torch.Tensor]] = {}


def _prepared(rows: datasets.Dataset, prepare: Preparation) -> dict[str, torch.Tensor]:
    """The model's inputs of all images: names -> (rows, ...)."""
    key = rows._fingerprint, named_files_stamp(rows), prepare.processor.to_json_string()
    if key not in _PREPARED:
        _PREPARED.clear()
        first = prepare.read(rows[0]["image"])
        # Stacked, all would be there twice
        prepared = {name: value.new_empty((len(rows), *value.shape)) for name, value in first.items()}
        for index, row in enumerate(rows):
            for name, value in prepare.read(row["image"]).items():
                prepared[name][index] = value
        _PREPARED[key] = prepared
    return _PREPARED[key]


def _draw(captions: str | Sequence[str | None], rng: np.random.Generator) -> str:
    """One of the captions that are not missing."""
    captions = present_captions(captions)
    return captions[rng.integers(len(captions))]


def _require_weighted(rows: datasets.Dataset, caption_weights: Sequence[float], source: str) -> None:
    """Every image must have as many captions as there are weights. Reports the missing ones."""
    missing, weights = np.zeros(len(caption_weights), int), np.array(caption_weights)
    for index, captions in enumerate(rows["caption"]):
        are_present = np.array([bool(present_captions(caption)) for caption in captions])
        is_list = not isinstance(captions, str) and len(captions) == len(weights)
        if not is_list or not (weights[are_present] > 0).any():
            raise ValueError(
                f"caption_weights: image {index} of {source} has no caption with a weight, or not a list of "
                f"{len(weights)} captions: {shortened(captions)}"
            )
        missing += ~are_present
    if missing.any():
        logger.warning(
            "%s: of %d images, %s lack caption 0, 1, ...; their other captions get its weight",
            source, len(rows), ", ".join(map(str, missing)),
        )  # fmt: skip
