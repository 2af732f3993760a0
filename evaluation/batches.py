"""Images and texts in batches: read, identified by a digest, and made a model's inputs."""

from collections.abc import Iterator, Sequence
from itertools import chain

import datasets
import torch
from datasets import Image
from torch.utils.data import DataLoader, Dataset, default_collate
from transformers import BaseImageProcessor, PreTrainedTokenizerBase

from clip_moe.data.identity import image_digests
from clip_moe.data.preparation import Preparation
from clip_moe.data.tokenizer import tokenize
from clip_moe.data.workers import errors_of_workers
from clip_moe.engine.digests import value_digest

# Images of which the digests are computed at a time
DIGESTED_AT_ONCE = 1000


class TextBatches(Dataset):
    """The inputs of consecutive texts, cut at the tokenizer's `model_max_length`."""

    def __init__(self, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, batch_size: int):
        self.items, self.tokenizer, self.batch_size = texts, tokenizer, batch_size

    def __len__(self) -> int:
        return -(-len(self.items) // self.batch_size)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        texts = list(self.items[number * self.batch_size : (number + 1) * self.batch_size])
        return tokenize(self.tokenizer, texts)

    def digest(self) -> str:
        """The digest of all contents."""
        return value_digest(["texts", *self.items])


class ImageBatches(Dataset):
    """The inputs of consecutive images of a column. Of an image in a file of its own, the digest is kept
    (`clip_moe.data.identity.image_digests`): the file is not read for it again."""

    def __init__(self, rows: datasets.Dataset, column: str, image_processor: BaseImageProcessor, batch_size: int):
        rows = rows.select_columns(column)
        if isinstance(rows.features[column], Image):
            rows = rows.cast_column(column, Image(decode=False))
        self.items, self.batch_size = rows, batch_size
        self.column, self.prepare = column, Preparation(image_processor)

    def __len__(self) -> int:
        return -(-len(self.items) // self.batch_size)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        images = self.items[number * self.batch_size : (number + 1) * self.batch_size][self.column]
        return default_collate(list(map(self.prepare.read, images)))

    def digest(self) -> str:
        parts = (image_digests(batch[self.column]) for batch in self.items.iter(DIGESTED_AT_ONCE))
        return value_digest(["images", *chain.from_iterable(parts)])


Batches = TextBatches | ImageBatches


def read_batches(batches: Batches, numbers: Sequence[int], num_workers: int) -> Iterator[dict[str, torch.Tensor]]:
    """The batches of these numbers, in their order."""
    generator = torch.Generator()  # without one, a DataLoader draws from the global one
    with errors_of_workers():
        yield from DataLoader(batches, sampler=numbers, batch_size=None, num_workers=num_workers, generator=generator)
