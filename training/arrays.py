"""Files of named arrays (safetensors), written whole or not at all; a damaged one is said in one line."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from conversion.files import new_file


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


@contextmanager
def open_arrays(path: Path, maker: str, stage: Path | None = None) -> Iterator[safe_open]:
    """Open a file of arrays, which become numpy's.

    Args:
        maker: what writes such files, for the error.
        stage: the folder to delete where the file is damaged; None: the one it is in.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is damaged.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there: {path.parent} is not the folder of {maker}")
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged; delete {stage or path.parent} to have it made anew: {error}") from error
