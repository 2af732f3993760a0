"""The identity of pairs, by names and contents: labels, stages and checkpoints know their data on every machine.

`identity` is that of a source that is not opened yet, `data_fingerprint` that of opened pairs in their order.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import pyarrow.compute
import pyarrow.parquet

from clip_moe.data.annotations import open_tables
from clip_moe.data.columns import is_text
from clip_moe.data.images import from_base64
from clip_moe.data.local_data import BUILDERS, file_in, is_here, is_table, matching, reading, suffix_of
from clip_moe.data.shards import MEMBER, file_of, read_member
from clip_moe.data.sources import is_cache, is_saved, rows_of_splits
from clip_moe.data.worlds import is_world, origin_of
from clip_moe.engine.digests import FILES_AT_ONCE, DigestCache, file_digests, file_stamp, value_digest
from clip_moe.engine.files import files_in
from clip_moe.engine.hub import hub_commit
from clip_moe.engine.provenance import MANIFEST

if TYPE_CHECKING:
    from clip_moe.data.arguments import DataArguments


def identity(arguments: DataArguments) -> dict[str, Any] | None:
    """The identity of a source with all its splits and rows, for the manifests of stages: the number of files and the
    hash of their names and contents, all of a folder or a pattern and images that are only named there; of a Hub
    dataset its commit; of a world, see `origin_of`. None where the settings say all (of most built-in worlds), or where
    it cannot be known now (the data are gone, the Hub is out of reach).
    """
    source = arguments.source
    if is_world(source):
        return origin_of(source) or None
    if not is_here(source):
        try:  # offline, the last one that was here
            return {"commit": hub_commit(source, "dataset")}
        except (OSError, ValueError):  # no such name, offline, or no name that the Hub could know
            return None
    if os.path.isdir(source):
        folder, names = source, sorted(files_in(source))
        # Neither caches of `datasets` nor when a stage ran
        names = [name for name in names if not is_cache(name) and os.path.basename(name) != MANIFEST]
        files = [os.path.join(folder, name) for name in names]
    else:
        files = matching(source)
        folder = os.path.dirname(files[0])
        names = [os.path.relpath(file, folder or ".") for file in files]
    with reading(arguments.source):
        named = (name for name in _named_images(arguments, files) if isinstance(name, str) and name)
        references = [name for name in dict.fromkeys(named) if not from_base64(name)]
    images = [file_in(arguments.image_root or "", name) for name in references]
    images = [image for image in images if os.path.isfile(image)]
    if not files or references and not images:
        return None
    inside = set(map(os.path.abspath, files))
    images = [image for image in images if image not in inside]
    names = [Path(name).as_posix() for name in names] + [os.path.basename(image) for image in images]
    return {"files": len(names), "sha256": value_digest([names, file_digests([*files, *images])])}


def _named_images(arguments: DataArguments, files: list[str]) -> Iterator[str]:
    """The images, or shards of images, that rows name: the rows of tables that are used, and all of a saved dataset or
    of parquet and Arrow files."""
    source, split, column = arguments.source, arguments.split, arguments.image_column
    if is_table(source):
        rows = rows_of_splits(open_tables(files, split), split, source)
        for image in rows[column][arguments.taken_rows] if column in rows.column_names else ():
            for part in image if isinstance(image, list) else [image]:
                yield part.get("path") if isinstance(part, dict) else part
    elif is_saved(source):
        rows = datasets.load_from_disk(source)
        for part in rows.values() if isinstance(rows, dict) else [rows]:
            if column in part.column_names:
                yield from _named(part.data.column(column), files[0])
    else:
        suffix = next((suffix for suffix in BUILDERS if suffix in map(suffix_of, files)), None)
        columns_of = {".parquet": _parquet_columns, ".arrow": _arrow_columns}.get(suffix)
        for file in files if columns_of else ():
            if suffix_of(file) == suffix:
                for part in columns_of(file, column):
                    yield from _named(part, file)


def _named(column: pyarrow.ChunkedArray | None, file: str) -> Iterator[str]:
    """The files of images that a column names, and its own file where it holds some; None: a column that holds all."""
    names = [] if column is None else named_images(column)
    yield from map(file_of, names)
    if column is None or pyarrow.types.is_struct(_element_type(column.type)) and len(names) < len(column):
        yield os.path.abspath(file)


def named_images(column: pyarrow.ChunkedArray) -> list[str]:
    """The files of images that a column only names: as texts, or as paths without bytes, which are not read here."""
    while column.type != _element_type(column.type):
        column = pyarrow.compute.list_flatten(column)
    if pyarrow.types.is_struct(column.type) and column.type.get_field_index("path") >= 0:
        paths, contents = (pyarrow.compute.struct_field(column, name) for name in ("path", "bytes"))
        column = paths.filter(pyarrow.compute.is_null(contents))
    return list(filter(None, column.to_pylist())) if is_text(column.type) else []


def _element_type(kind: pyarrow.DataType) -> pyarrow.DataType:
    """The type of one image, also of a column that holds lists of images."""
    while pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        kind = kind.value_type
    return kind


def _parquet_columns(path: str, column: str) -> Iterator[pyarrow.ChunkedArray | None]:
    """A column by row groups; None for those in which every image has bytes, which are not read."""
    with pyarrow.parquet.ParquetFile(path) as file:
        is_there = column in file.schema_arrow.names
        kind = _element_type(file.schema_arrow.field(column).type) if is_there else pyarrow.null()
        for number in range(file.num_row_groups if pyarrow.types.is_struct(kind) or is_text(kind) else 0):
            group = file.metadata.row_group(number)
            parts = {part.path_in_schema: part.statistics for part in map(group.column, range(group.num_columns))}
            counts = parts.get(f"{column}.bytes")
            is_whole = counts is not None and counts.has_null_count and not counts.null_count
            yield None if is_whole else file.read_row_group(number, [column])[column]


def _arrow_columns(path: str, column: str) -> Iterator[pyarrow.ChunkedArray]:
    with pyarrow.memory_map(path) as file:
        try:
            table = pyarrow.ipc.open_stream(file).read_all()
        except pyarrow.ArrowInvalid:
            table = pyarrow.ipc.open_file(file).read_all()
        if column in table.column_names:
            yield table[column]


def named_files_stamp(rows: datasets.Dataset) -> str:
    """A stamp of the files that rows only name, as they are now: neither their names nor the rows tell."""
    paths = named_images(rows.data.column("image"))
    return value_digest([os.path.isfile(path) and file_stamp(path) for path in paths])


def data_fingerprint(rows: datasets.Dataset, images: bool = True) -> str:
    """The hash of all captions and images in their order, by which labels know their dataset.

    An image in a file of its own counts by its name without folders and its content, one in a shard by its place and
    the shard, any other by its bytes and the name beside them. So the hash is the same on every machine. Nothing is
    decoded.

    Args:
        rows: columns `image`, `caption` or both.
        images: whether they are used. If not, only the captions count, and no image is read.
    """
    cache, key = DigestCache(), f"rows {images} {rows._fingerprint}"
    stamp = " ".join(file_stamp(file["filename"]) for file in rows.cache_files)
    if rows.cache_files and key in (digests := cache.get({key: stamp})):
        return digests[key]
    digest, has_named_images = hashlib.sha256(), False
    used = {"image", "caption"} if images else {"caption"}
    rows = rows.select_columns([name for name in ("image", "caption") if name in used & set(rows.column_names)])
    if isinstance(rows.features.get("image"), datasets.Image):
        rows = rows.cast_column("image", datasets.Image(decode=False))
    for batch in rows.iter(FILES_AT_ONCE):
        entries = [_entry(image) for image in batch.get("image", [])]
        has_bytes = [entry["bytes"] is not None for entry in entries]
        named = [entry["path"] for entry in entries if entry["bytes"] is None]
        has_named_images = has_named_images or bool(named)  # which may change while the rows stay
        file_hashes = file_digests(map(file_of, named))
        byte_hashes = [hashlib.sha256(entry["bytes"]).hexdigest() for entry in entries if entry["bytes"] is not None]
        paths = [entry["path"] for entry in entries]
        names = [path and os.path.relpath(path, os.path.dirname(file_of(path))) for path in paths]
        ranges = [entry["pixel_range"] for entry in entries if entry.get("pixel_range") is not None]
        parts = [names, has_bytes, file_hashes, byte_hashes, batch.get("caption"), *ranges]
        digest.update(value_digest(parts).encode())
    if rows.cache_files and not has_named_images:
        cache.put({key: (stamp, digest.hexdigest())})
    return digest.hexdigest()


def _entry(image: str | dict[str, Any]) -> dict[str, Any]:
    """An image of a column with its `bytes` and `path`."""
    return {"path": image, "bytes": None} if isinstance(image, str) else image


def image_digests(images: Iterable[str | dict[str, Any]]) -> list[str]:
    """The hashes of images, each a path or with `bytes` or a `path`, which may have a `pixel_range`."""
    entries = list(map(_entry, images))
    contents = [
        read_member(entry["path"]) if not entry.get("bytes") and MEMBER.fullmatch(entry["path"]) else entry.get("bytes")
        for entry in entries
    ]
    paths = [entry["path"] for entry, content in zip(entries, contents, strict=True) if not content]
    file_hashes = iter(file_digests(paths))
    digests = [hashlib.sha256(content).hexdigest() if content else next(file_hashes) for content in contents]
    for number, entry in enumerate(entries):
        if entry.get("pixel_range") is not None:
            digests[number] = hashlib.sha256(f"{digests[number]} {entry['pixel_range']}".encode()).hexdigest()
    return digests
