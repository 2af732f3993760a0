"""The identity of pairs, by names and contents: labels, stages and checkpoints know their data on every machine.

Contents are read once: their digests are kept beside the cache of `datasets`, and a file is read again only when its
size, times or inode have changed. Copies on another machine have other times, but the same digests.
"""

import hashlib
import json
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import datasets
from huggingface_hub import snapshot_download
from tqdm.auto import trange

from data import icons
from data.shards import MEMBER, read_member
from data.sources import DataArguments, file_stamp, source_files, source_images
from data.worlds import WORLDS

# Errors about a fingerprint that is not that of the pairs say this
OTHER_DATA = "another dataset, another order or other images of the same names"

logger = logging.getLogger(__name__)

AT_ONCE = 1000
_READS: ContextVar[bool] = ContextVar("_READS", default=True)
# A file that is younger may change again without a change of its times, which have the resolution of the file system
SECONDS_UNTIL_KEPT = 2


@contextmanager
def contents_unread() -> Iterator[None]:
    """Within it, files count by size, times and inode in place of what they hold: for a look at whether data are there,
    whose digests nobody keeps."""
    token = _READS.set(False)
    try:
        yield
    finally:
        _READS.reset(token)


def data_fingerprint(rows: datasets.Dataset, images: bool = True) -> str:
    """The hash of all captions and images in their order, by which labels know their dataset.

    An image in a file of its own counts by its name without folders and its content, any other by its bytes and the
    name beside them. So the hash is the same on every machine. Nothing is decoded.

    Args:
        rows: columns `image` and `caption`.
        images: whether they are used. If not, only the captions count, and no image is read.
    """
    if not images:
        return _captions_fingerprint(rows)
    cache = _DigestCache()
    key, stamp = f"rows {rows._fingerprint}", " ".join(file_stamp(file["filename"]) for file in rows.cache_files)
    if rows.cache_files and key in (digests := cache.get({key: stamp})):
        return digests[key]
    holds_images = isinstance(rows.features["image"], datasets.Image)
    files = rows.cast_column("image", datasets.Image(decode=False)) if holds_images else rows
    digest, in_files = hashlib.sha256(), False
    for batch in files.select_columns(["image", "caption"]).iter(AT_ONCE):
        images = [{"path": image, "bytes": None} if isinstance(image, str) else image for image in batch["image"]]
        paths = [image["path"] for image in images if image["bytes"] is None]
        in_files = in_files or bool(paths)  # which may change while the rows stay
        contents = iter(content_digests(paths))
        for image, caption in zip(images, batch["caption"], strict=True):
            path, content = image["path"], image["bytes"]
            digest.update(json.dumps([path and os.path.basename(path), caption]).encode())
            digest.update(bytes.fromhex(next(contents)) if content is None else hashlib.sha256(content).digest())
    if rows.cache_files and not in_files:
        cache.put({key: (stamp, digest.hexdigest())})
    return digest.hexdigest()


def _captions_fingerprint(rows: datasets.Dataset) -> str:
    digest = hashlib.sha256()
    for batch in rows.select_columns("caption").iter(AT_ONCE):
        digest.update("".join(json.dumps(caption) + "\n" for caption in batch["caption"]).encode())
    return digest.hexdigest()


def identity(arguments: DataArguments) -> dict[str, Any] | None:
    """The identity of a source, without opening its images or shards as pairs: for the manifests of stages.

    Returns:
        The number of files and the hash of their names and contents; of a Hub dataset, its commit; of icons, the
        versions of the packages that have them; None where that is all in the settings (another built-in world) or
        cannot be known now (data that are gone, a Hub out of reach).
    """
    source = arguments.source
    if source == "icons":
        return icons.versions()
    if source in WORLDS:
        return None
    files = source_files(arguments)
    if not files and os.path.exists(source):
        return None
    if not files:
        try:  # offline, the last one that was here
            return {"commit": Path(snapshot_download(source, repo_type="dataset", allow_patterns=[])).name}
        except (OSError, ValueError):  # no such name, offline, or no name that the Hub could know
            return None
    named = source_images(arguments)
    images = [image for image in named if os.path.isfile(image)]
    if named and not images:
        return None
    folder = source if os.path.isdir(source) else os.path.dirname(files[0])
    names = [Path(os.path.relpath(file, folder)).as_posix() for file in files]
    names += [os.path.basename(image) for image in images]
    digest = hashlib.sha256(json.dumps([names, content_digests([*files, *images])]).encode())
    return {"files": len(names), "sha256": digest.hexdigest()}


def image_digests(images: Iterable[str | dict[str, Any]]) -> list[str]:
    """The hashes of images, each a path or with `bytes` or a `path`, which may have a `box`."""
    images = [{"path": image} if isinstance(image, str) else image for image in images]
    in_shard = [not image.get("bytes") and MEMBER.fullmatch(image["path"]) for image in images]
    images = [
        {**image, "bytes": read_member(image["path"])} if is_there else image
        for image, is_there in zip(images, in_shard, strict=True)
    ]
    in_files = iter(content_digests(image["path"] for image in images if not image.get("bytes")))
    whole = [hashlib.sha256(image["bytes"]).hexdigest() if image.get("bytes") else next(in_files) for image in images]
    boxes = [image.get("box") for image in images]
    return [
        digest if box is None else hashlib.sha256(f"{digest} {box}".encode()).hexdigest()
        for digest, box in zip(whole, boxes, strict=True)
    ]


def content_digests(paths: Iterable[str]) -> list[str]:
    """The hashes of files by size and content, in hexadecimal digits. A file within a shard counts by its place and the
    hash of the shard. A file is read once, and again when it has changed.
    """
    paths = [os.fspath(path) for path in paths]
    members = [MEMBER.fullmatch(path) for path in paths]
    digests = _file_digests([member[1] if member else path for member, path in zip(members, paths, strict=True)])
    return [
        hashlib.sha256(f"{digest} {member[2]} {member[3]}".encode()).hexdigest() if member else digest
        for member, digest in zip(members, digests, strict=True)
    ]


def _file_digests(paths: list[str]) -> list[str]:
    paths = [os.path.abspath(path) for path in paths]
    if not _READS.get():
        return [hashlib.sha256(file_stamp(path).encode()).hexdigest() for path in paths]
    cache, digests = _DigestCache(), {}
    for start in trange(0, len(paths), AT_ONCE, desc=f"reading {len(paths)} files", delay=5, disable=None):
        stamps = {path: file_stamp(path) for path in paths[start : start + AT_ONCE]}
        digests |= cache.get(stamps)
        missing = [path for path in stamps if path not in digests]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            computed = dict(zip(missing, pool.map(_content_digest, missing), strict=True))
        cache.put({path: (stamps[path], content) for path, content in computed.items() if _is_old(path)})
        digests |= computed
    return [digests[path] for path in paths]


def _content_digest(path: str) -> str:
    digest = hashlib.sha256(f"{os.path.getsize(path)} ".encode())
    with open(path, "rb") as file:
        while part := file.read(2**20):
            digest.update(part)
    return digest.hexdigest()


def _is_old(path: str) -> bool:
    return os.stat(path).st_mtime < time.time() - SECONDS_UNTIL_KEPT


class _DigestCache:
    """Digests that were computed before: under a key, with a stamp that tells whether one still holds.

    Where its file cannot be used, everything is read each time.
    """

    def __init__(self):
        self.path = Path(datasets.config.HF_DATASETS_CACHE) / "clip_moe_digests.sqlite"

    def get(self, stamps: dict[str, str]) -> dict[str, str]:
        marks = ", ".join("?" * len(stamps))
        rows = self._run(lambda table: table.execute(f"SELECT * FROM digests WHERE key IN ({marks})", list(stamps)))
        return {key: digest for key, stamp, digest in rows if stamps[key] == stamp}

    def put(self, digests: dict[str, tuple[str, str]]) -> None:
        rows = [(key, stamp, digest) for key, (stamp, digest) in digests.items()]
        self._run(lambda table: table.executemany("INSERT OR REPLACE INTO digests VALUES (?, ?, ?)", rows))

    def _run(self, command: Callable[[sqlite3.Connection], Iterable]) -> list[tuple[str, str, str]]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.path, timeout=60)) as connection, connection:
                connection.execute("CREATE TABLE IF NOT EXISTS digests (key TEXT PRIMARY KEY, stamp TEXT, digest TEXT)")
                return list(command(connection))
        except (OSError, sqlite3.Error) as error:
            logger.warning("digests of files cannot be kept in %s (%s): they are computed each time", self.path, error)
            return []
