"""Ctrl-C and SIGTERM end a program as errors do, so that temporary files are removed."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

from records.processes import num_processes

# What signals raised. Where one arrives while torch looks at a Python object, torch makes an error of its own of it, or
# drops it: `end_if_told_to` raises it again.
_raised: list[BaseException] = []


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """SIGTERM raises SystemExit, so that `finally` blocks run, and SIGINT KeyboardInterrupt."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        _raised.append(KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number))
        raise _raised[-1]

    def send_again(lost: Any) -> None:
        """Where a finalizer runs when the signal arrives, Python drops what it raises, and goes on."""
        if lost.exc_value not in _raised:
            return hook(lost)
        number = signal.SIGINT if isinstance(lost.exc_value, KeyboardInterrupt) else signal.SIGTERM
        threading.Timer(0.01, os.kill, (os.getpid(), number)).start()  # not before the finalizer is over

    hook, sys.unraisablehook = sys.unraisablehook, send_again
    before = {}
    if threading.current_thread() is threading.main_thread():  # no other may set handlers
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            before[signal.SIGINT] = signal.signal(signal.SIGINT, leave)
        # One of several processes is ended while it waits for the others, in a call that would keep Python from running
        # the handler
        if num_processes() == 1:
            before[signal.SIGTERM] = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        sys.unraisablehook = hook
        _raised.clear()
        for number, handler in before.items():
            if signal.getsignal(number) is leave:
                signal.signal(number, handler)


def end_if_told_to() -> None:
    """Ends the program if a signal told it to and what that raised got lost."""
    if _raised:
        raise _raised[0]
