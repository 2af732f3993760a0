"""Files of named arrays (safetensors), written whole or not at all; a damaged one is said in one line."""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from records.files import new_file


def save_arrays(
    path: Path, arrays: Mapping[str, np.ndarray | torch.Tensor], metadata: dict[str, str] | None = None
) -> None:
    """
    Raises:
        OSError: the file cannot be written. What was there before stays.
    """
    tensors = {name: torch.as_tensor(array).contiguous() for name, array in arrays.items()}
    with new_file(path) as partial:
        try:
            save_file(tensors, partial, metadata)
        except SafetensorError as error:  # of a file that cannot be written, safetensors raises no OSError
            raise OSError(f"cannot write {path}: {error}") from error


def join_rows(path: Path, parts: Mapping[str, Iterable[np.ndarray]], num_rows: int, metadata: dict[str, str]) -> None:
    """What `save_arrays` would write of arrays in float32 whose parts are one below the other, of which one is held at
    a time: safetensors itself writes whole arrays (https://huggingface.co/docs/safetensors, "Format").

    Args:
        num_rows: of all parts of an array together.
    """
    header, end = {"__metadata__": metadata}, 0
    iterators = {name: iter(of_name) for name, of_name in parts.items()}
    firsts = {name: next(iterator) for name, iterator in iterators.items()}
    for name, first in firsts.items():
        start, end = end, end + num_rows * first[0].nbytes
        header[name] = {"dtype": "F32", "shape": [num_rows, *first.shape[1:]], "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with new_file(path) as partial, partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, first in firsts.items():
            for part in itertools.chain([first], iterators[name]):
                file.write(np.ascontiguousarray(part, "<f4"))


@contextmanager
def open_arrays(path: Path, maker: str, stage: Path | None = None, framework: str = "numpy") -> Iterator[safe_open]:
    """Open a file of arrays, which become numpy's.

    Args:
        maker: what writes such files, for the error.
        stage: the folder to delete where the file is damaged; None: the one it is in.
        framework: "pt" maps tensors into memory, where "numpy" reads whole arrays.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is damaged.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there: {path.parent} is not the folder of {maker}")
    try:
        with safe_open(path, framework) as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged; delete {stage or path.parent} to have it made anew: {error}") from error
