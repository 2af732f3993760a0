"""The digest of what files hold, and of values: SHA-256 in hexadecimal digits.

A file is read once on a machine, and again where its size, times or inode have changed: its digest is kept beside the
cache of `datasets`. Copies have other times, but the same digests.
"""

import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from clip_moe.engine.messages import warn_once

FILES_AT_ONCE = 1000
# A file that is younger may change again without a change of its times, which have the resolution of the file system
SECONDS_UNTIL_KEPT = 2


def value_digest(value: Any) -> str:
    """The digest of a value that JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def short_digest(value: Any) -> str:
    """Eight letters that tell plain values apart."""
    return value_digest(value)[:8]


def file_stamp(path: str | Path) -> str:
    """A stamp that changes when a file is written or replaced: its times can be set back, that of its inode cannot."""
    stat = os.stat(path)
    return f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"


def file_digests(paths: Iterable[str | Path]) -> list[str]:
    """The digest of what each file holds."""
    from tqdm.auto import trange

    paths = [os.path.abspath(path) for path in paths]
    cache, digests = DigestCache(), {}
    for start in trange(0, len(paths), FILES_AT_ONCE, desc=f"reading {len(paths)} files", delay=5, disable=None):
        stamps = {path: file_stamp(path) for path in paths[start : start + FILES_AT_ONCE]}
        digests |= cache.get(stamps)
        missing = [path for path in stamps if path not in digests]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            computed = dict(zip(missing, pool.map(file_digest, missing), strict=True))
        now = time.time()
        old = [path for path in computed if os.stat(path).st_mtime < now - SECONDS_UNTIL_KEPT]
        cache.put({path: (stamps[path], computed[path]) for path in old})
        digests |= computed
    return [digests[path] for path in paths]


def file_digest(path: str | Path) -> str:
    """The digest of what a file holds, which is read now: for a file that must not be damaged, or changed by others."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class DigestCache:
    """Digests that were computed before: under a key, with a stamp that tells whether one still holds.

    Where its file cannot be used, everything is read each time.
    """

    def __init__(self):
        home = os.environ.get("HF_HOME", os.path.expanduser("~/.cache/huggingface"))
        self.path = Path(os.environ.get("HF_DATASETS_CACHE", f"{home}/datasets")) / "clip_moe_sha256.sqlite"

    def get(self, stamps: Mapping[str, str]) -> dict[str, str]:
        marks = ", ".join("?" * len(stamps))
        rows = self._run(lambda table: table.execute(f"SELECT * FROM digests WHERE key IN ({marks})", list(stamps)))
        return {key: digest for key, stamp, digest in rows if stamps[key] == stamp}

    def put(self, digests: Mapping[str, tuple[str, str]]) -> None:
        rows = [(key, stamp, digest) for key, (stamp, digest) in digests.items()]
        if rows:
            self._run(lambda table: table.executemany("INSERT OR REPLACE INTO digests VALUES (?, ?, ?)", rows))

    def _run(self, command: Callable[[sqlite3.Connection], Iterable]) -> list[tuple[str, str, str]]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.path, timeout=60)) as connection, connection:
                connection.execute("CREATE TABLE IF NOT EXISTS digests (key TEXT PRIMARY KEY, stamp TEXT, digest TEXT)")
                return list(command(connection))
        except (OSError, sqlite3.Error) as error:
            warn_once(f"cannot cache file digests in {self.path} ({error}): they are computed each time")
            return []
