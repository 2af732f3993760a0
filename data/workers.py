"""Processes that read data."""

import contextlib
from collections.abc import Iterator


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
