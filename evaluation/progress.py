"""How far long work is: a bar on a terminal, and in a log a line now and then."""

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

# Between two lines of a log
SECONDS = 30


class _Lines:
    """A file for tqdm, which rewrites a line: here, each is a line of its own."""

    def write(self, text: str) -> None:
        if text.strip():
            print(text.strip(), file=sys.stderr, flush=True)


def progress(
    description: str,
    total: int,
    items: Iterable[Any] | None = None,
    initial: int = 0,
    shown: bool = True,
    leave: bool = False,
) -> tqdm:
    """Count the steps of some work on stderr.

    Args:
        items: what to iterate over; None: whoever calls counts by `update`.
        total, initial: steps of the whole work, and those that were done before.
        shown: False on all processes but one.
        leave: whether the bar stays when all is done, and a log tells of work that takes no time.
    """
    options: dict[str, Any] = {}
    if not sys.stderr.isatty():
        options = {"file": _Lines(), "mininterval": SECONDS, "miniters": 1, "delay": 0 if leave else SECONDS}
        options["bar_format"] = "{desc}: {n_fmt} of {total_fmt}{postfix}, {remaining} left"
    return tqdm(items, description, total, leave, initial=initial, disable=not shown, **options)
