"""How far long work is: a bar on a terminal, and in a log a line now and then."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm.auto import tqdm

# Between two lines of a log
SECONDS = 30

Item = TypeVar("Item")


class Progress:
    """Counts the steps of some work on stderr.

    Args:
        total: steps of the whole work.
        initial: steps that were done before.
        shown: False on all processes but one.
        leave: whether the bar stays when all is done; a log keeps its lines in any case.
    """

    def __init__(self, description: str, total: int, initial: int = 0, shown: bool = True, leave: bool = True):
        self.bar = tqdm(total=total, initial=initial, desc=description, leave=leave, disable=None if shown else True)
        self.description, self.total, self.step = description, total, initial
        self.in_lines = shown and self.bar.disable
        self.initial, self.started, self.summary = initial, time.monotonic(), ""
        self.next_line = self.started + SECONDS

    def update(self, summary: str = "") -> None:
        """One step more.

        Args:
            summary: what is told of the step, such as its loss; of a step without one, that of the last one is told.
        """
        self.step += 1
        self.bar.update()
        self.summary = summary or self.summary
        if summary:
            self.bar.set_postfix_str(summary)
        now = time.monotonic()
        if self.in_lines and (now >= self.next_line or (self.step == self.total and summary)):
            left = (now - self.started) / (self.step - self.initial) * (self.total - self.step)
            parts = [f"{self.description}: {self.step} of {self.total}", self.summary]
            parts += [f"{tqdm.format_interval(left)} left"] if self.step < self.total else []
            print(", ".join(filter(None, parts)), file=sys.stderr, flush=True)
            self.next_line = now + SECONDS

    def close(self) -> None:
        """The work is over, or ended."""
        self.bar.close()


def progress(items: Iterable[Item], description: str, total: int, shown: bool = True) -> Iterator[Item]:
    """Yields the items, and counts them as `Progress` does."""
    counted = Progress(description, total, shown=shown, leave=False)
    try:
        for item in items:
            yield item
            counted.update()
    finally:
        counted.close()
