"""Files that appear whole or not at all, folders with one writer at a time, and commands that end in one line."""

import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from filelock import FileLock, Timeout
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from tqdm.contrib.logging import logging_redirect_tqdm

from records.messages import shortened

NOTHING_LEFT = "nothing was written"
MOST_LEVELS = 50  # far above any file of a model or a run, and far below what Python can walk through

# What signals raised. Where one arrives while torch looks at a Python object, torch makes an error of its own of it, or
# drops it: `end_if_told_to` raises it again.
_raised: list[BaseException] = []


@contextlib.contextmanager
def one_line_errors(interrupted: str = NOTHING_LEFT) -> Iterator[None]:
    """Ends the program with one line on stderr and a status that is not 0 for an error that the user can cause.

    Ctrl-C and SIGTERM end it as errors do, so that temporary files are removed. Warnings stand beside progress bars,
    not within them, and there are no bars where stderr is no terminal.

    Args:
        interrupted: what is left after Ctrl-C, and how to go on.
    """
    with _signals_raise(), _readable_output():
        try:
            try:
                yield
            except Exception:
                end_if_told_to()
                raise
        except KeyboardInterrupt:
            if int(os.environ.get("WORLD_SIZE", 1)) > 1:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher sends it again
            if int(os.environ.get("RANK", 0)) == 0:  # of several processes, all get it
                print(f"interrupted: {interrupted}", file=sys.stderr)
            sys.exit(128 + signal.SIGINT)
        except SafetensorError as error:  # of a file that cannot be written, safetensors raises no OSError
            sys.exit(f"error: weights could not be written or read: {_one_line(error)}")
        except (ValueError, OSError, FloatingPointError, StrictDataclassError) as error:
            sys.exit(f"error: {_one_line(error)}")


@contextlib.contextmanager
def _readable_output() -> Iterator[None]:
    from huggingface_hub.utils import disable_progress_bars
    from transformers.utils import logging as transformers_logging

    if not sys.stderr.isatty():
        disable_progress_bars()
        transformers_logging.disable_progress_bar()
        if "datasets" in sys.modules:  # converters do not need it
            sys.modules["datasets"].disable_progress_bars()
    logging.captureWarnings(True)
    # Each prints by itself, so that what it hands on to the root would be printed twice
    loggers = [logging.getLogger(name) for name in ("transformers", "datasets", "huggingface_hub")]
    libraries = {logger: logger.propagate for logger in loggers}
    try:
        for logger in libraries:
            logger.propagate = False
        with logging_redirect_tqdm([logging.getLogger(), *libraries]):
            yield
    finally:
        for logger, propagates in libraries.items():
            logger.propagate = propagates
        logging.captureWarnings(False)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
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
        if int(os.environ.get("WORLD_SIZE", 1)) <= 1:
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


def _absolute(path: str | Path) -> Path:
    """The path behind all symbolic links."""
    resolved = Path(os.path.realpath(path))  # `Path.resolve` raises RuntimeError on a circle, in some versions
    if resolved.is_symlink():
        raise OSError(f"{path} is a symbolic link that leads back to itself: remove it")
    return resolved


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lets no other process into the block for the same folder, which need not be there yet.

    The lock is the system's, on a hidden file beside the folder (in it, where nothing may be written beside it), so
    it ends with the process however that ends.

    Raises:
        ValueError: another process holds it; says which, and since when.
        OSError: the file cannot be written.
    """
    folder = _absolute(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = os.access(folder.parent, os.W_OK)
    path = folder.with_name(f".{folder.name}.lock") if beside else folder / ".lock"
    lock = FileLock(path, timeout=0.2)  # not 0: a file that its holder removes just now is tried again
    try:  # from here on: a signal may arrive as soon as there is a file
        try:
            lock.acquire()
        except Timeout:
            with contextlib.suppress(OSError):
                raise ValueError(f"{folder} is in use: {path.read_text(encoding='utf-8')}") from None
            raise ValueError(f"{folder} was in use until just now: try again") from None
        since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
        holder = f"process {os.getpid()} on {socket.gethostname()} has been writing there since {since}"
        path.write_text(holder, encoding="utf-8")
        yield
    finally:
        if lock.is_locked:
            path.unlink(missing_ok=True)  # before the release: whoever opened it meanwhile sees that it is gone
            lock.release()


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Turns whatever a library raises when it cannot write into an OSError: tokenizers raises a plain `Exception` on a
    full disk, torch a RuntimeError about positions in the file. So nothing but their writing belongs into the block."""
    try:
        yield
    except Exception as error:
        reason = error.__context__ if isinstance(error.__context__, OSError) else error
        raise OSError(f"cannot write {path}: {reason}") from error


def save(part: Any, folder: Path) -> None:
    """Saves a model, a processor or a half of one as transformers does.

    Raises:
        OSError: it cannot be written.
    """
    with writing(folder):
        part.save_pretrained(folder)


@contextlib.contextmanager
def new_folder(output: str | Path) -> Iterator[Path]:
    """Yields a temporary folder beside `output`, which gets that name when the block ends without an error.

    So a full disk, a kill or a failed check leaves no half-written `output`.

    Raises:
        ValueError: `output` exists and is not an empty folder, or another process writes it.
    """
    output = _absolute(output)
    with locked(output):
        if output.exists() and not (output.is_dir() and not any(output.iterdir())):
            raise ValueError(f"{output} already exists and is not an empty folder: remove it or choose another output")
        temporary = output.with_name(f".{output.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
        try:  # from here on: a signal may arrive as soon as it is there
            temporary.mkdir()
            yield temporary
            end_if_told_to()
            respect_umask(temporary)
            if output.exists():
                output.rmdir()
            temporary.rename(output)
        except SafetensorError as error:  # of a file that cannot be written, safetensors raises no OSError
            raise OSError(f"cannot write {output}: {error}") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def respect_umask(folder: Path) -> None:
    """Gives the files in a folder the mode that the user's umask asks for, as the folder has it already.

    safetensors makes files that their owner alone can read, from its version 0.8 on.
    """
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(mode)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`, which takes its place when the block ends without an error.

    A device or a pipe, as /dev/null or /dev/stdout, is itself what is yielded: nothing takes its place.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        yield path
        return
    temporary = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode  # what the umask gives, and safetensors does not
        yield temporary
        end_if_told_to()
        temporary.chmod(mode)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def output_folder(path: Path) -> Iterator[None]:
    """Makes a folder, which is gone again where the block ends with an error before anything is in it.

    Raises:
        OSError: it cannot be made.
    """
    is_new = not path.exists()
    path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # not empty
            is_new and path.rmdir()
        raise


def read_json(path: Path) -> Any:
    """What a file holds as JSON.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no JSON, or nested too deep.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # ValueError: also no UTF-8, and numbers of thousands of digits
        raise ValueError(f"{path} is no JSON that can be read: {error}") from error
    level = [content]
    for _ in range(MOST_LEVELS):
        level = [
            value
            for part in level
            for value in (part.values() if isinstance(part, dict) else part if isinstance(part, list) else ())
        ]
    if level:
        raise ValueError(f"{path} is no JSON that can be read: it is nested in more than {MOST_LEVELS} levels")
    return content


def read_record(path: Path, kind: type, keys: Mapping[str, type] | None = None) -> Any:
    """A dictionary with values of these types, of which numbers are counts, or a list, that a stage wrote as JSON.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        record = read_json(path)
        if not isinstance(record, kind):
            raise ValueError(f"it holds no {kind.__name__}")
        for key, wanted in (keys or {}).items():
            value = record.get(key)
            if type(value) is not wanted or (wanted is int and value < 1):
                raise ValueError(f"its {key} is {shortened(value)}")
    except ValueError as error:
        reason = str(error).removeprefix(f"{path} ")
        raise ValueError(
            f"{path} is damaged ({reason}): delete {path.parent} to make it anew, or restore the file"
        ) from error
    return record


def write_text(path: Path, text: str) -> None:
    """Replaces a file of text whole or not at all."""
    with new_file(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
