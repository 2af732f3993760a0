"""The identity of pairs, by names and contents: labels, stages and checkpoints know their data on every machine."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import datasets
from huggingface_hub import snapshot_download

from data import icons
from data.shards import MEMBER, read_member
from data.sources import DataArguments, source_files, source_images
from data.worlds import WORLDS
from records.digests import FILES_AT_ONCE, DigestCache, file_digests, file_stamp, value_digest

# Errors about a fingerprint that is not that of the pairs say this
OTHER_DATA = "another dataset, another order or other images of the same names"


def data_fingerprint(rows: datasets.Dataset, images: bool = True) -> str:
    """The hash of all captions and images in their order, by which labels know their dataset.

    An image in a file of its own counts by its name without folders and its content, any other by its bytes and the
    name beside them. So the hash is the same on every machine. Nothing is decoded.

    Args:
        rows: columns `image` and `caption`.
        images: whether they are used. If not, only the captions count, and no image is read.
    """
    cache = DigestCache()
    key, stamp = f"rows {images} {rows._fingerprint}", " ".join(file_stamp(of["filename"]) for of in rows.cache_files)
    if rows.cache_files and key in (digests := cache.get({key: stamp})):
        return digests[key]
    digest, in_files = hashlib.sha256(), False
    rows = rows.select_columns(["image", "caption"] if images else ["caption"])
    if isinstance(rows.features.get("image"), datasets.Image):
        rows = rows.cast_column("image", datasets.Image(decode=False))
    for batch in rows.iter(FILES_AT_ONCE):
        held = [{"path": image, "bytes": None} if isinstance(image, str) else image for image in batch.get("image", [])]
        names = [image["path"] and os.path.basename(image["path"]) for image in held]
        of_files = content_digests(image["path"] for image in held if image["bytes"] is None)
        in_files = in_files or bool(of_files)  # which may change while the rows stay
        of_bytes = [hashlib.sha256(image["bytes"]).hexdigest() for image in held if image["bytes"] is not None]
        in_rows = [image["bytes"] is not None for image in held]
        digest.update(value_digest([names, in_rows, of_files, of_bytes, batch["caption"]]).encode())
    if rows.cache_files and not in_files:
        cache.put({key: (stamp, digest.hexdigest())})
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
    return {"files": len(names), "sha256": value_digest([names, file_digests([*files, *images])])}


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
    """The hashes of files, see `file_digests`. A file within a shard counts by its place and the hash of the shard."""
    paths = [os.fspath(path) for path in paths]
    members = [MEMBER.fullmatch(path) for path in paths]
    digests = file_digests(member[1] if member else path for member, path in zip(members, paths, strict=True))
    return [
        hashlib.sha256(f"{digest} {member[2]} {member[3]}".encode()).hexdigest() if member else digest
        for member, digest in zip(members, digests, strict=True)
    ]
