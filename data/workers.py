"""Processes that read data."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from clip_moe.data.arguments import DataArguments


def worker_options(arguments: DataArguments, seed: int) -> dict[str, Any]:
    """Options of a `DataLoader` that reads ahead as the settings say, into pinned memory where there is an accelerator:
    its transfers then wait for nothing.

    Args:
        seed: the workers' seed. Nothing that we draw depends on it.
    """
    return {
        "num_workers": arguments.num_workers,
        "pin_memory": torch.accelerator.is_available(),
        # Without a generator, every DataLoader that begins draws from the global one, of which dropout and the router's
        # noise draw: what a resumed run draws would depend on where it was interrupted
        "generator": torch.Generator().manual_seed(seed),
    }


@contextlib.contextmanager
def errors_of_workers() -> Iterator[None]:
    """Errors of a DataLoader's workers as ValueErrors, without the traceback that torch puts into their message."""
    try:
        yield
    except Exception as error:
        if "DataLoader worker" not in str(error):
            raise
        lines = str(error).splitlines()
        traceback_ends = max((number for number, line in enumerate(lines) if line.startswith("  ")), default=-1)
        raise ValueError(" ".join(lines[traceback_ends + 1 :]).removeprefix("ValueError: ")) from error
