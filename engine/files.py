"""Files that appear whole or not at all, and folders with one writer at a time."""

import contextlib
import itertools
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from clip_moe.engine.messages import shortened, warn_once

logger = logging.getLogger(__name__)

# What systems leave beside files, some with thumbnails: macOS, Python, NAS of Synology and QNAP, Windows, Linux
LEFT_BEHIND = {
    *("__MACOSX", "__pycache__", "@eaDir", "@tmp", "#recycle", "#snapshot", "@Recycle", "@Recently-Snapshot"),
    *("$RECYCLE.BIN", "System Volume Information", "lost+found"),
}


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lets no other process into the block for the same folder, which need not be there yet.

    The lock is the system's, on a hidden file beside the folder (in it, where nothing may be written beside it), so
    it ends with the process however that ends.

    Raises:
        ValueError: another process holds it; says which, and since when.
        OSError: the file cannot be written.
    """
    from filelock import FileLock, Timeout  # takes a while

    folder = Path(os.path.realpath(folder))
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
    full disk, safetensors its own, torch a RuntimeError about positions in the file. So nothing but their writing
    belongs into the block."""
    try:
        yield
    except Exception as error:
        reason = error.__context__ if isinstance(error.__context__, OSError) else error
        raise OSError(f"cannot write {path}: {reason}") from error


def save(part: Any, folder: Path, **options: Any) -> None:
    """Saves a model, a configuration, a processor or a half of one as transformers does, with its options."""
    with writing(folder):
        part.save_pretrained(folder, **options)


def refuse_to_overwrite(output: Path) -> None:
    """Raises a ValueError if `output` is there and is no empty folder, or is a link, which no folder can replace. A
    lock within it does not count."""
    if output.is_symlink():
        raise ValueError(
            f"{output} is a link to {os.path.realpath(output)}: name that folder, or choose another output"
        )
    if output.exists() and not (output.is_dir() and {path.name for path in output.iterdir()} <= {".lock"}):
        raise ValueError(f"{output} already exists: remove it or choose another output")


@contextlib.contextmanager
def new_folder(output: str | Path) -> Iterator[Path]:
    """Yields a temporary folder beside `output`, which gets that name when the block ends without an error.

    So a full disk, a kill or a failed check leaves no half-written `output`.
    """
    output = Path(os.path.realpath(output))
    with locked(output):
        refuse_to_overwrite(output)
        temporary = output.with_name(f".{output.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
        try:  # from here on: a signal may arrive as soon as it is there
            temporary.mkdir()
            yield temporary
            respect_umask(temporary)
            temporary.rename(output)  # an empty folder may be there
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
        temporary.chmod(mode)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def output_folder(path: Path) -> Iterator[None]:
    """Makes a folder, which is gone again where the block ends with an error before any file is in it."""
    is_new = not path.exists()
    path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for folder, _, _ in os.walk(path, topdown=False) if is_new else ():
            with contextlib.suppress(OSError):  # not empty
                os.rmdir(folder)
        raise


def files_in(folder: str | Path, hidden: bool = False) -> Iterator[str]:
    """The files below a folder, as paths from there. Links are followed; a folder to which several paths lead is read
    once: by its own path, or by the shortest.

    Args:
        hidden: also those that are hidden, and what systems leave behind.
    """

    def refuse(error: OSError) -> None:
        raise error

    def is_left_out(name: str) -> bool:
        return is_hidden(name) and not hidden

    seen, waiting = set(), [folder]
    while waiting:
        links = []
        for place, folders, files in itertools.chain.from_iterable(os.walk(top, onerror=refuse) for top in waiting):
            if os.path.realpath(place) in seen:
                warn_once(logger, f"{place} is a link to a folder that is read already: it is not read again")
                folders.clear()
                continue
            seen.add(os.path.realpath(place))
            below = [os.path.join(place, name) for name in sorted(folders) if not is_left_out(name)]
            links += filter(os.path.islink, below)
            folders[:] = [os.path.basename(path) for path in below if not os.path.islink(path)]
            within = os.path.relpath(place, folder)  # once: it takes longer than all else here
            names = (name for name in files if not is_left_out(name))
            yield from names if within == os.curdir else (os.path.join(within, name) for name in names)
        waiting = sorted(links, key=lambda path: (path.count(os.sep), path))


def is_hidden(name: str) -> bool:
    return name.startswith(".") or name in LEFT_BEHIND


def read_text(path: Path) -> str:
    """The text of a file in UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error}") from error


def read_json(path: Path) -> Any:
    """The content of a file of JSON. Raises an OSError if it cannot be read, a ValueError if it is no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:  # ValueError: also no UTF-8, and numbers of thousands of digits
        raise ValueError(f"{path} is no JSON that can be read: {error}") from error


def read_log(path: Path) -> list[dict[str, Any]]:
    """What stands in the lines of a `log.jsonl`; one that is being written, or was at a kill, has no end."""
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): restore it, or move it away") from error


def read_record(path: Path, kind: type, keys: Mapping[str, type] | None = None) -> Any:
    """A list, or a dictionary with values of these types (numbers are counts), that a stage wrote as JSON."""
    try:
        record = read_json(path)
        if not isinstance(record, kind):
            raise ValueError(f"it holds no {kind.__name__}")
        for key, wanted in (keys or {}).items():
            value = record.get(key)
            if type(value) is not wanted or (wanted is int and value < 1):
                raise ValueError(f"its {key} is {shortened(value)}")
    except ValueError as error:
        raise damaged(path, str(error).removeprefix(f"{path} ")) from error
    return record


def damaged(path: Path, reason: str) -> ValueError:
    """The error about a file that a stage wrote."""
    return ValueError(f"{path} is damaged ({reason}): delete {path.parent} to make it anew, or restore the file")


def write_text(path: Path, text: str) -> None:
    """Replaces a file of text, which ends with one line break, whole or not at all."""
    with new_file(path) as temporary, writing(path):
        temporary.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
