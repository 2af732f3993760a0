"""Process helpers: rank, memory, signals, one-line errors."""

import contextlib
import io
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from clip_moe.engine.messages import Faults, one_line

# Seconds that a process that failed waits before it speaks: another one that failed may take some to end, after which
# the launcher ends all
PATIENCE = 15
INTERRUPTED = "interrupted: nothing half-written was left; run the same command again, which goes on where it can"


def num_processes() -> int:
    """The processes that a launcher started."""
    return int(os.environ.get("WORLD_SIZE", 1))


def is_first_process() -> bool:
    """Whether this is the first of the processes that a launcher started, or the only one."""
    return int(os.environ.get("RANK", 0)) == 0


def end(call: Callable[[], str | None], is_all: bool) -> None:
    """Call a program's function, and print its result. Errors that a user can cause end in one line on stderr.

    Args:
        is_all: whether the program then ends, before its module imports what it needs when others import it.
    """
    with one_line_errors():
        result = call()
        if result and is_first_process():
            try:
                print(result, flush=True)
            except BrokenPipeError:  # the reader, such as `head`, has what it wants; Python flushes again at its end
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if is_all:
        sys.exit()


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
            # Whose errors about a file, a configuration or memory are neither an OSError nor a ValueError
            is_users = type(error).__module__.startswith(("safetensors", "huggingface_hub"))
            if is_users or type(error).__name__ == "OutOfMemoryError":
                sys.exit(f"error: {type(error).__name__}: {one_line(error)}")
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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # what the encoding of a terminal lacks ends nothing
    if not is_first_process():
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
    if not sys.stderr.isatty() or not is_first_process():
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # also of transformers, which asks it
        os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"


def peak_memory(device: Any) -> int:
    """Bytes: on an accelerator, of its tensors; on a CPU, of the whole process."""
    import torch

    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():  # that of `resource` may be of the process that started this one
        lines = status.read_text(encoding="utf-8").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    import psutil

    return psutil.Process().memory_info().rss


def reset_peak_memory(device: Any) -> None:
    """Reset the peak. On a CPU, this has no effect if the system does not support it."""
    import torch

    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
    elif Path("/proc/self/clear_refs").exists():
        with contextlib.suppress(OSError):  # not every system lets it
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def in_words(size: int) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"
