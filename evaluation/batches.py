"""What is embedded, in batches: read, told apart by their contents, and made a model's inputs."""

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import datasets
import torch
from datasets import Image
from torch.utils.data import DataLoader, Dataset
from transformers import BaseImageProcessor, PreTrainedTokenizerBase

from data.identity import image_digests
from data.images import decode_image
from data.workers import errors_of_workers

# Encoded images of a dataset, in bytes, above which workers save more time than it takes to start them
WORTH_WORKERS = 32 * 2**20
MOST_WORKERS = 8
# Images that tell how large the others are
LOOKED_AT = 16

# The digest of a batch, and the model's inputs: None for a batch that is known
Batch = tuple[str, dict[str, torch.Tensor] | None]


class Batches(Dataset):
    """Consecutive images or texts. A batch that is known by its digest is not made into inputs, nor decoded."""

    def __init__(self, items: Sequence[Any], batch_size: int):
        self.items, self.batch_size = items, batch_size
        self.known: Collection[str] = ()

    def __len__(self) -> int:
        return -(-len(self.items) // self.batch_size)

    def __getitem__(self, number: int) -> Batch:
        batch = self.read(number * self.batch_size, (number + 1) * self.batch_size)
        digest = self.digest(batch)
        return digest, None if digest in self.known else self.inputs(batch)

    def read(self, start: int, stop: int) -> list[Any]:
        return list(self.items[start:stop])

    def digest(self, batch: list[Any]) -> str:
        raise NotImplementedError

    def inputs(self, batch: list[Any]) -> dict[str, torch.Tensor]:
        raise NotImplementedError

    def num_workers(self, num_processes: int) -> int:
        """How many workers are worth it in each of so many processes."""
        return 0


class TextBatches(Batches):
    """Texts, cut at the tokenizer's `model_max_length`."""

    def __init__(self, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, batch_size: int):
        super().__init__(texts, batch_size)
        self.tokenizer = tokenizer

    def digest(self, batch: list[str]) -> str:
        return _digest(["texts", *batch])

    def inputs(self, batch: list[str]) -> dict[str, torch.Tensor]:
        inputs = self.tokenizer(batch, padding=True, truncation=True, return_tensors="pt")
        return {name: inputs[name] for name in ("input_ids", "attention_mask")}


class ImageBatches(Batches):
    """The images of a column.

    Of an image in a file of its own, the digest is kept (`data.identity.image_digests`): if it is known, the file is
    not read. All others are read once.
    """

    def __init__(self, rows: datasets.Dataset, column: str, image_processor: BaseImageProcessor, batch_size: int):
        rows = rows.select_columns(column)
        if isinstance(rows.features[column], Image):
            rows = rows.cast_column(column, Image(decode=False))
        super().__init__(rows, batch_size)
        self.column, self.image_processor = column, image_processor

    def read(self, start: int, stop: int) -> list[dict[str, Any]]:
        values = self.items[start:stop][self.column]
        return [value if isinstance(value, dict) else {"path": value} for value in values]

    def digest(self, batch: list[dict[str, Any]]) -> str:
        return _digest(["images", *image_digests(batch)])

    def inputs(self, batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        images = [decode_image(value) for value in batch]
        return {"pixel_values": self.image_processor(images, return_tensors="pt")["pixel_values"]}

    def num_workers(self, num_processes: int) -> int:
        first = self.read(0, LOOKED_AT)
        sizes = [len(value["bytes"]) if value.get("bytes") else os.path.getsize(value["path"]) for value in first]
        if sum(sizes) / len(sizes) * len(self.items) < WORTH_WORKERS:
            return 0
        return min(MOST_WORKERS, max(1, (os.cpu_count() or 1) // num_processes))


def _digest(contents: list[str]) -> str:
    return hashlib.sha256(json.dumps(contents).encode()).hexdigest()[:32]


def read_batches(batches: Batches, numbers: Sequence[int], num_workers: int) -> Iterator[Batch]:
    """The batches of these numbers, in their order.

    Raises:
        OSError, ValueError: an image cannot be read.
    """
    generator = torch.Generator()  # without one, a DataLoader draws from the global one
    with errors_of_workers():
        yield from DataLoader(batches, sampler=numbers, batch_size=None, num_workers=num_workers, generator=generator)
