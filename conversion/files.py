"""Files that appear whole or not at all, and commands that end in one line."""

import contextlib
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

NOTHING_LEFT = "nothing was written"


@contextlib.contextmanager
def one_line_errors(interrupted: str = NOTHING_LEFT) -> Iterator[None]:
    """Ends the program with one line on stderr and a status that is not 0 for an error that the user can cause.

    Ctrl-C and SIGTERM end it as errors do, so that temporary files are removed.

    Args:
        interrupted: what is left after Ctrl-C, and how to go on.
    """
    with _sigterm_exits():
        try:
            yield
        except KeyboardInterrupt:
            print(f"interrupted: {interrupted}", file=sys.stderr)
            sys.exit(128 + signal.SIGINT)
        except SafetensorError as error:  # of a file that cannot be written, safetensors raises no OSError
            sys.exit(f"error: weights could not be written or read: {_one_line(error)}")
        except (ValueError, OSError, FloatingPointError, StrictDataclassError) as error:
            sys.exit(f"error: {_one_line(error)}")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


@contextlib.contextmanager
def _sigterm_exits() -> Iterator[None]:
    """SIGTERM raises SystemExit, so that `finally` blocks run."""

    def leave(number, frame) -> NoReturn:
        sys.exit(128 + number)

    # Only the main thread may set handlers. One of several processes is ended while it waits for the others, in a call
    # that would keep Python from running the handler
    if threading.current_thread() is not threading.main_thread() or int(os.environ.get("WORLD_SIZE", 1)) > 1:
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def new_folder(output: str | Path) -> Iterator[Path]:
    """Yields a temporary folder beside `output`, which gets that name when the block ends without an error.

    So a full disk, a kill or a failed check leaves no half-written `output`.

    Raises:
        ValueError: `output` exists and is not an empty folder.
    """
    output = Path(output).resolve()
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise ValueError(f"{output} already exists and is not an empty folder: remove it or choose another output")
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        if output.exists():
            output.rmdir()
        temporary.rename(output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`, which takes its place when the block ends without an error."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replaces a file of text whole or not at all."""
    with new_file(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
