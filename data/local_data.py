"""Names of data: files, patterns and folders on this machine, or names on the Hub. It imports nothing heavy."""

import glob
import os
import re
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clip_moe.data.worlds import is_world
from clip_moe.engine.local_names import is_hub_name, similar_path
from clip_moe.engine.messages import one_line

# Endings of shards
SUFFIXES = (".tar", ".tar.gz", ".tgz")
# Ending of a table -> what separates its columns
TABLES = {".csv": ",", ".tsv": "\t", ".jsonl": None, ".json": None}
# In the order in which they are looked for in a folder
BUILDERS = {".tar": "webdataset", ".parquet": "parquet", ".arrow": "arrow"}


def is_here(source: str) -> bool:
    """Whether a source is a path on this machine, or a pattern that matches files."""
    if os.path.exists(source) or suffix_of(source) not in {*BUILDERS, *TABLES}:
        return os.path.exists(source)
    return any(glob.glob(pattern, recursive=True) for pattern in without_braces(source))


def is_read_whole(source: str) -> bool:
    """Whether a source is a file or a pattern, which is all that it names, whatever the split is called."""
    return suffix_of(source) in BUILDERS and not Path(source).is_dir()


def is_table(source: str) -> bool:
    """Whether a source is a table or a pattern of tables, which may have a column of splits."""
    return suffix_of(source) in TABLES and not Path(source).is_dir()


def suffix_of(name: str) -> str:
    """The ending of a file, that of a shard also where it is compressed."""
    return ".tar" if name.lower().endswith(SUFFIXES) else os.path.splitext(name)[1].lower()


def without_braces(pattern: str) -> list[str]:
    """Expands {000..012} and {a,b} in a pattern, as open_clip and a shell do."""
    braces = re.search(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}", pattern)
    if braces is None:
        return [pattern]
    first, last, words = braces.groups()
    if words is None:
        words = ",".join(f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1))
    before, after = pattern[: braces.start()], pattern[braces.end() :]
    return [whole for word in words.split(",") for whole in without_braces(before + word + after)]


def missing_data(source: str) -> str:
    """The fault of a source that is neither on this machine nor a possible name on the Hub; empty if there is none. A
    name similar to one in a local folder counts as a slip."""
    if is_world(source) or is_here(source):
        return ""
    if meant := similar_path(source):
        return f"there is no file or folder {source}: did you mean {meant}?"
    is_file = Path(source).suffix in (*BUILDERS, *TABLES)
    return f"there is no file or folder {source}" if is_file or not is_hub_name(source) else ""


def file_in(root: str, name: str) -> str:
    """The path of a file, whose name may be in another Unicode form on disk: macOS takes letters apart."""
    path = os.path.join(root, name)
    if name.isascii() or os.path.exists(path):
        return path
    forms = (os.path.join(root, unicodedata.normalize(form, name)) for form in ("NFC", "NFD"))
    return next(filter(os.path.exists, forms), path)


def matching(source: str) -> list[str]:
    """The files of a pattern. Raises FileNotFoundError where there are none."""
    if os.path.isfile(source):
        return [source]
    files: list[str] = []
    for pattern in without_braces(source):
        found = sorted(glob.glob(pattern, recursive=True))
        if not found:  # also where others are there: one of them may be lost
            raise FileNotFoundError(f"no file matches {pattern}")
        files += found
    return list(dict.fromkeys(files))


@contextmanager
def reading(source: str) -> Iterator[None]:
    """Turns whatever `datasets` and the libraries below it raise into a ValueError of one line that names the source.
    `datasets` itself logs the file that it cannot read."""
    try:
        yield
    except Exception as error:
        from datasets.exceptions import DatasetGenerationError

        cause = error
        while isinstance(cause, DatasetGenerationError) and cause.__cause__ is not None:
            cause = cause.__cause__
        if isinstance(cause, ValueError | OSError) and source in str(cause):
            raise cause from None
        name = "" if type(cause) is ValueError else f"{type(cause).__name__}: "
        raise ValueError(f"{source} cannot be read: {name}{one_line(cause)}") from error
