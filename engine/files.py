"""Files that appear whole or not at all, and folders with one writer at a time."""

import contextlib
import itertools
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from clip_moe.engine.messages import in_one_line, warn_once

# Files that systems leave behind, some with thumbnails: macOS, Python, NAS of Synology and QNAP, Windows, Linux
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
            holder = "try again"  # where it ends just now
            with contextlib.suppress(OSError):
                holder = path.read_text(encoding="utf-8")
            raise ValueError(f"{folder} is in use: {holder}") from None
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
    fault = f"is a link to {os.path.realpath(output)}: name that folder" if output.is_symlink() else None
    if output.exists() and not (output.is_dir() and {path.name for path in output.iterdir()} <= {".lock"}):
        fault = fault or "already exists: remove it"
    if fault:
        raise ValueError(f"{output} {fault} or choose another output")


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
                warn_once(f"{place} links to a folder that was already read: skipped")
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


@contextlib.contextmanager
def _reading(path: Path, form: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, RecursionError) as error:  # ValueError: also numbers of thousands of digits
        raise ValueError(f"{path} is not {form}: {error}") from error


def read_text(path: Path) -> str:
    with _reading(path, "UTF-8 text"):
        return path.read_text(encoding="utf-8-sig")


def read_json(path: Path) -> Any:
    """The content of a file of JSON. Raises an OSError if it cannot be read, a ValueError if it is no JSON."""
    with _reading(path, "valid JSON"):
        return json.loads(path.read_text(encoding="utf-8-sig"))


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a `log.jsonl`, without one that is being written, or was at a kill."""
    with _reading(path, "valid JSON Lines"):
        return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def read_record(path: Path, schema: Any = dict[str, Any]) -> Any:
    """Content of this type that a stage wrote as JSON."""
    try:
        return TypeAdapter(schema).validate_python(read_json(path))
    except ValueError as error:
        is_fault = isinstance(error, ValidationError)
        reason = in_one_line(error.errors()[:1]) if is_fault else str(error).removeprefix(f"{path} ")
        raise ValueError(
            f"{path} is damaged ({reason}): restore the file, or delete {path.parent} to make it again"
        ) from error


def write_text(path: Path, text: str) -> None:
    """Replaces a file of text, which ends with one line break, whole or not at all."""
    with new_file(path) as temporary, writing(path):
        temporary.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
