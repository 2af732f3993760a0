"""Features of a data set on disk: of images, captions or tokens, in shards that any number of processes write.

A shard is a file of arrays (safetensors) named by its first row. A run that was killed goes on after its last shard;
then an index says that all are there, and what the features are of.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from pydantic import ConfigDict, PositiveInt, create_model
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from clip_moe.engine.files import new_file, output_folder, read_record, write_text, writing
from clip_moe.evaluation.progress import progress

INDEX = "index.json"
# The one array of whole numbers that is read as rows; all others are of features
LABELS = "labels"
FLOATS = torch.float16, torch.float32, torch.float64  # those that NumPy has, too
INTEGERS = torch.int32, torch.int64
# The rows of shards -> their arrays, by name. An array has the rows of its shard, or more (tokens of rows).
Compute = Callable[[list[range]], Iterable[Mapping[str, np.ndarray | torch.Tensor]]]


class FeatureStore:
    """The features of some rows in a folder; `about`: what the index says of them."""

    def __init__(self, folder: Path, num_rows: int, shard_size: int, about: Mapping[str, Any] | None = None):
        self.folder, self.num_rows, self.shard_size = folder, num_rows, shard_size
        self.about = dict(about or {})

    @classmethod
    def open(cls, folder: Path, maker: str, keys: Mapping[str, type] | None = None) -> "FeatureStore":
        """The store that a folder holds.

        Args:
            maker: the stage that writes such folders, for the error.
            keys: keys of its index, with types.
        """
        if not (folder / INDEX).is_file():
            raise FileNotFoundError(f"{folder} is not the folder of {maker}: there is no {INDEX}")
        fields = {"num_rows": PositiveInt, "shard_size": PositiveInt} | (keys or {})
        config = ConfigDict(extra="allow", strict=True)
        schema = create_model("Index", __config__=config, **{key: (kind, ...) for key, kind in fields.items()})
        index = read_record(folder / INDEX, schema).model_dump()
        return cls(folder, index.pop("num_rows"), index.pop("shard_size"), index)

    def shards(self) -> list[range]:
        """The rows of each shard."""
        starts = range(0, self.num_rows, self.shard_size)
        return [range(start, min(start + self.shard_size, self.num_rows)) for start in starts]

    def path(self, start: int) -> Path:
        """The shard that begins with this row."""
        return self.folder / f"{start:012d}.safetensors"

    def write(self, processes: Accelerator | PartialState | None, noun: str, compute: Compute) -> None:
        """Write the shards that are not there; every process computes its share, and waits for the others.

        Args:
            processes: None: this one works alone.
            noun: the features, for the progress bar.
            compute: yields the arrays of one shard after the other.
        """
        rank, number, is_main = 0, 1, True
        if processes is not None:
            rank, number, is_main = processes.process_index, processes.num_processes, processes.is_main_process
        missing = [rows for rows in self.shards()[rank::number] if not self.path(rows.start).exists()]
        if missing:
            about = f"{noun}, in parts of {self.shard_size} of {self.num_rows}"
            computed = progress(about, len(missing), compute(missing), shown=is_main)
            for rows, arrays in zip(missing, computed, strict=True):
                with output_folder(self.folder):
                    save_arrays(self.path(rows.start), arrays)
        if processes is not None:
            processes.wait_for_everyone()
        if is_main:
            for rows in self.shards():
                self.shard(rows.start)
            index = {"num_rows": self.num_rows, "shard_size": self.shard_size, **self.about}
            write_text(self.folder / INDEX, json.dumps(index))

    def __getitem__(self, name: str) -> "Rows":
        return Rows(self, name)

    def shard(self, start: int) -> safe_open:
        """The arrays of the shard that begins with this row, as tensors that are mapped."""
        path = self.path(start)
        self.require(path.is_file(), start, "is not there (do all processes see this folder?)")
        with _damaged(path):
            return safe_open(path, "pt")

    def require(self, is_usable: bool, start: int, reason: str) -> None:
        """Raises a ValueError if the shard that begins with this row is not usable."""
        if not is_usable:
            raise ValueError(f"{self.path(start)} {reason}: delete {self.folder} to make it again")


class Rows:
    """An array (rows, ...) of a store that loads a slice, or rows by their numbers in ascending order. Features that
    are not finite, and anything else that is no such array, are a ValueError."""

    def __init__(self, store: FeatureStore, name: str):
        self.store, self.name = store, name
        first = self._read(0)
        self.shape, self.dtype = (store.num_rows, *first.shape[1:]), first.dtype

    def __len__(self) -> int:
        return self.store.num_rows

    def __getitem__(self, rows: slice | np.ndarray) -> np.ndarray:
        numbers = np.arange(len(self))[rows] if isinstance(rows, slice) else rows
        size, chosen = self.store.shard_size, np.empty((len(numbers), *self.shape[1:]), self.dtype)
        for start in np.unique(numbers // size) * size:
            first, last = np.searchsorted(numbers, (start, start + size))
            array, place = self._read(start), slice(first, last)
            is_alike = (array.shape[1:], array.dtype) == (self.shape[1:], self.dtype)
            reason = f"has {self.name} {array.dtype} {array.shape[1:]}, not {self.dtype} {self.shape[1:]}"
            self.store.require(is_alike, start, reason)
            chosen[place] = array[numbers[place] - start]
            self.store.require(np.isfinite(chosen[place]).all(), start, f"has {self.name} that are not finite")
        return chosen

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[:].astype(dtype or self.dtype, copy=False)

    def sample(self, number: int, seed: int) -> np.ndarray:
        """(number, ...) float32 rows, drawn uniformly."""
        drawn = np.random.default_rng(seed).choice(len(self), min(number, len(self)), replace=False)
        return self[np.sort(drawn)].astype(np.float32, copy=False)

    def _read(self, start: int) -> np.ndarray:
        with _damaged(self.store.path(start)):
            array = self.store.shard(start).get_tensor(self.name)
        size, types = min(self.store.shard_size, len(self) - start), INTEGERS if self.name == LABELS else FLOATS
        is_whole = array.shape[:1] == (size,)
        self.store.require(is_whole, start, f"has {self.name} {tuple(array.shape)}, not of {size} rows")
        self.store.require(array.dtype in types, start, f"has {self.name} of {array.dtype}")
        return array.numpy()


def save_arrays(
    path: Path, arrays: Mapping[str, np.ndarray | torch.Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write a file of named arrays whole or not at all. An OSError says why it could not be written."""
    tensors = {name: torch.as_tensor(array).contiguous() for name, array in arrays.items()}
    with new_file(path) as partial, writing(path):
        save_file(tensors, partial, metadata)


@contextmanager
def open_arrays(path: Path, maker: str) -> Iterator[safe_open]:
    """Open a file of named arrays. `maker`: what writes such files, for the error."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: {path.parent} is not the folder of {maker}")
    with _damaged(path), safe_open(path, "numpy") as file:
        yield file


@contextmanager
def _damaged(path: Path) -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged; delete {path.parent} to make it again: {error}") from error
