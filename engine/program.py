"""How a program of this project ends: with what it found, or with one line that says what is wrong."""

import contextlib
import logging
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator

from clip_moe.engine.messages import Faults, one_line
from clip_moe.engine.processes import is_first_process, num_processes

# Seconds that a process that failed waits before it speaks: another one that failed may take some to end, after which
# the launcher ends all
PATIENCE = 15
INTERRUPTED = "interrupted: nothing half-written was left; run the same command again, which goes on where it can"


def end(call: Callable[[], str | None], is_all: bool) -> None:
    """Call what a program is for, and print what it returns. What a user can cause ends in one line on stderr.

    Args:
        is_all: whether the program then ends, before its module imports what it needs when others import it.
    """
    with one_line_errors():
        result = call()
        if result and is_first_process():
            _print(result)
    if is_all:
        sys.exit()


def _print(text: str) -> None:
    """As it is, for a file or another program; in a terminal, markdown's tables fit into its width."""
    if sys.stdout.isatty() and re.search(r"^\|", text, re.MULTILINE):
        from rich.console import Console  # takes a while
        from rich.markdown import Markdown

        Console().print(Markdown(text))
    else:
        print(text)


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Ends the program with one line on stderr and a status that is not 0 for an error that the user can cause.

    Ctrl-C and SIGTERM end it as errors do, so that temporary files are removed. Of several processes that fail, one
    alone says why: the first process, or the one that failed first.
    """
    alone = num_processes() == 1
    _quiet_output()
    with sigterm_raises():
        try:
            try:
                yield
            except Exception as error:
                # The others wait to be ended by the launcher, which ends all when one has. So does a process that only
                # lost the connection to another: it fails with a RuntimeError.
                if not alone and (not is_first_process() or isinstance(error, RuntimeError)):
                    time.sleep(PATIENCE)
                raise
        except KeyboardInterrupt:
            if not alone:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher sends it again
            if is_first_process():
                print(INTERRUPTED, file=sys.stderr)
            sys.exit(128 + signal.SIGINT)
        except Faults as error:
            sys.exit(f"error: {error}")
        except (ValueError, OSError, FloatingPointError) as error:
            sys.exit(f"error: {one_line(error)}")
        except Exception as error:
            # Only now, since help needs neither
            from huggingface_hub.errors import StrictDataclassError
            from safetensors import SafetensorError

            if isinstance(error, SafetensorError):  # of a file that cannot be written, it raises no OSError
                sys.exit(f"error: weights could not be written or read: {one_line(error)}")
            if isinstance(error, StrictDataclassError):
                sys.exit(f"error: {one_line(error)}")
            raise


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
    """SIGTERM raises SystemExit, so that `finally` blocks run, as Ctrl-C raises KeyboardInterrupt."""
    if num_processes() > 1:  # one that waits for others does so in a call that keeps Python from running a handler
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _quiet_output() -> None:
    """No library draws a bar where stderr is no terminal. Of several processes, the first alone warns."""
    if not is_first_process():
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
    if not sys.stderr.isatty() or not is_first_process():
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # also of transformers, which asks it
        os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
