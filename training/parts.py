"""Arrays of many rows, written in parts by any number of processes; parts that are there are kept.

A part is a file that is named by its first row. All parts have the same number of rows, but the last one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from safetensors import safe_open

from evaluation.progress import progress
from training.arrays import open_arrays, save_arrays

# The folder of the parts, and what tells all that is to know of them, in the folder of their stage
PARTS, INDEX = "parts", "index.json"


def part_file(folder: Path, start: int) -> Path:
    """The part that begins with this row."""
    return folder / f"{start:012d}.safetensors"


def write_parts(
    accelerator: Accelerator,
    folder: Path,
    name: str,
    num_rows: int,
    part_size: int,
    compute: Callable[[int, int], Mapping[str, np.ndarray | torch.Tensor]],
) -> None:
    """Write what is not there yet; every process computes its share, and waits for the others.

    Args:
        name: of what is written, for the progress bar.
        compute: first row, row after the last -> arrays by name. Each array has these rows, or more (tokens of rows).

    Raises:
        ValueError: a part is damaged, missing or of another size.
    """
    folder.mkdir(exist_ok=True)
    starts = range(0, num_rows, part_size)[accelerator.process_index :: accelerator.num_processes]
    for start in progress(starts, f"{name} of {num_rows} rows", len(starts), accelerator.is_main_process):
        path = part_file(folder, start)
        if not path.exists():
            save_arrays(path, compute(start, min(start + part_size, num_rows)))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        require_parts(folder, num_rows, part_size)


def require_parts(folder: Path, num_rows: int, part_size: int) -> None:
    """
    Raises:
        ValueError: the folder does not hold exactly the parts of so many rows, each of them whole.
    """
    expected = {part_file(folder, start): min(part_size, num_rows - start) for start in range(0, num_rows, part_size)}
    for path, size in expected.items():
        with _open_part(path) as file:
            found = min(file.get_slice(name).get_shape()[0] for name in file.keys())  # noqa: SIM118
        if found != size:
            raise ValueError(f"{path} has {found} rows, not {size}: {_way_out(folder)}")
    others = sorted(set(folder.glob("*.safetensors")) - set(expected))
    if others:
        raise ValueError(f"{others[0]} is no part of {num_rows} rows, {part_size} a part: {_way_out(folder)}")


def read_parts(folder: Path, name: str, stop: int, start: int = 0) -> Iterator[tuple[int, np.ndarray]]:
    """An array of each part with the number of its first row; one of them is held at a time.

    Args:
        start, stop: rows to read, from the first one of a part to the last one of a part.

    Raises:
        ValueError: a part is damaged or not there.
    """
    row = start
    while row < stop:
        with _open_part(part_file(folder, row)) as file:
            array = file.get_tensor(name)
        yield row, array
        row += len(array)
    if row != stop:
        raise ValueError(f"{folder} has a part that ends with row {row}, not {stop}: {_way_out(folder)}")


def sample_rows(parts: Iterable[tuple[int, np.ndarray]], num_rows: int, num_samples: int, seed: int) -> np.ndarray:
    """(num_samples, d) float32 rows of all parts, drawn uniformly; beside them, one part is held at a time."""
    chosen = np.sort(np.random.default_rng(seed).choice(num_rows, min(num_samples, num_rows), replace=False))
    rows = None
    for start, part in parts:
        if rows is None:
            rows = np.empty((len(chosen), part.shape[1]), np.float32)
        first, stop = np.searchsorted(chosen, (start, start + len(part)))
        rows[first:stop] = part[chosen[first:stop] - start]
    return rows


@contextmanager
def _open_part(path: Path) -> Iterator[safe_open]:
    if not path.is_file():
        raise ValueError(f"{path} is not there: do all processes see this folder? If so, {_way_out(path.parent)}")
    with open_arrays(path, "this stage", _stage(path.parent)) as file:
        yield file


def _stage(folder: Path) -> Path:
    """The folder of a stage, which makes nothing anew while that is there, by the folder of its parts."""
    return folder.parent if folder.name == PARTS else folder


def _way_out(folder: Path) -> str:
    return f"delete {_stage(folder)} to have it made anew"
