"""WebDataset shards: tar files with the files of one sample after another.

A tar holds its files as they are, so with an index of headers, samples of shards have numbers like those of a folder. A
stream reads them from start to end.
"""

import io
import os
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import datasets

from clip_moe.data.annotations import text_of
from clip_moe.engine.messages import join_names, warn_once

# A file in a shard: its first byte, its length and its name
MEMBER = re.compile(r"(.+\.tar)#(\d+)\+(\d+)/(.+)", re.DOTALL)
# Endings whose files hold a number, and endings of texts; all others are kept as they are, as images
NUMBERS = {"cls", "cls2", "id", "idx", "index", "inx"}
TEXTS = {"caption", "csv", "json", "jsonl", "text", "transcript", "tsv", "txt"}
IMAGE = datasets.Image(decode=False)
# Bytes at the end of a tar: two of the largest records that tar writes. A download that was cut may have many more
MOST_ZEROS = 2**17
DAMAGED = "{} is no tar, or is cut or damaged, or several in one: copy or download it again"


def open_shards(files: Sequence[str], columns: Sequence[str], stamps: Sequence[str], streaming: bool) -> Any:
    """The samples of shards in their order, loaded or as a stream. To load them, headers and texts are read once, which
    `datasets` caches, and images stay where they are, but for those of compressed shards.

    Files whose names agree up to the first dot, one after the other, are a sample, and the rest of the name is the
    column. A column `jpg;png` is the one or the other, and of `json.caption` the column `json` is read. What a sample
    lacks is None, and so is a text that is not UTF-8. A ValueError where no sample has a column, or a shard is damaged.

    Args:
        columns: which are read.
        stamps: the files' stamps; with others, the index is made anew.
    """
    files = list(map(os.path.abspath, files))  # which a cached index has, too
    for file in files if streaming else ():  # others as they are indexed
        require_end(file)
    endings = _endings(files[0])
    columns = ["json" if column.startswith("json.") and column not in endings else column for column in columns]
    missing = [column for column in columns if endings.isdisjoint(column.split(";"))]
    for file in files[1:]:
        if missing:
            missing = [column for column in missing if _endings(file).isdisjoint(column.split(";"))]
    if missing:
        content = f"{files[0]} has {join_names(sorted(endings)) or 'no files'}"
        raise ValueError(f"the shards have no column {join_names(missing)}; {content}")
    names = list(dict.fromkeys(columns))
    features = datasets.Features({"__key__": datasets.Value("string")} | {name: _feature(name) for name in names})
    # A list would be shared by the readers of a stream, as that of the files is
    arguments = {"files": files, "columns": tuple(names), "stamps": tuple(stamps), "keeps_place": not streaming}
    kind = datasets.IterableDataset if streaming else datasets.Dataset
    return kind.from_generator(_samples, features=features, gen_kwargs=arguments)


def read_member(reference: str) -> bytes:
    """The bytes that a reference names."""
    shard, start, length, _ = MEMBER.fullmatch(reference).groups()
    with open(shard, "rb") as file:
        file.seek(int(start))
        content = file.read(int(length))
    if len(content) != int(length):
        raise OSError(f"{shard} ends before byte {int(start) + int(length)}: has it changed since it was indexed?")
    return content


def file_of(path: str) -> str:
    """The shard that a reference is to; a path that is none is itself."""
    member = MEMBER.fullmatch(path)
    return member[1] if member else path


def require_end(file: str) -> None:
    """A tar must end as tars do, with zeros: what was cut does not. The end of a compressed one is not looked for."""
    with suppress(tarfile.TarError, EOFError), tarfile.open(file) as tar:
        if not isinstance(tar.fileobj, io.BufferedReader):
            return
        tar.fileobj.seek(max(0, tar.fileobj.seek(0, os.SEEK_END) - 2 * tarfile.BLOCKSIZE))
        if tar.fileobj.read() == bytes(2 * tarfile.BLOCKSIZE):
            return
    raise ValueError(DAMAGED.format(file))


def _feature(column: str) -> Any:
    endings = set(column.split(";"))
    if endings <= TEXTS:
        return datasets.Value("string")
    return datasets.Value("int64") if endings <= NUMBERS else IMAGE


def _endings(file: str) -> set[str]:
    return {column for _, column, _, _ in _members(file)}


def _samples(
    files: list[str], columns: tuple[str, ...], keeps_place: bool, stamps: tuple[str, ...]
) -> Iterator[dict[str, Any]]:
    kinds = {ending: _feature(column) for column in columns for ending in column.split(";")}
    for file in files:
        sample, dotted = {}, []
        for name, ending, tar, member in _members(file):
            if sample and (name != sample["__key__"] or ending in sample):  # two of one name are two samples
                yield _columns(sample, columns)
                sample = {}
            sample["__key__"] = name
            if ending in kinds:
                sample[ending] = _value(kinds[ending], tar, member, file, keeps_place)
            elif ending.rpartition(".")[2] in kinds:
                dotted.append(member.name)
        if sample:
            yield _columns(sample, columns)
        if dotted:
            warn_once(
                f"{file}: {len(dotted)} files are ignored, such as {dotted[0]}: in shards, a sample's name ends at the "
                "first dot",
            )


def _columns(sample: Mapping[str, Any], columns: Sequence[str]) -> dict[str, Any]:
    """A row: of each column, the first ending that the sample has."""
    endings = {column: next(filter(sample.__contains__, column.split(";")), None) for column in columns}
    return {"__key__": sample["__key__"]} | {column: sample.get(ending) for column, ending in endings.items()}


def _value(
    kind: Any, tar: tarfile.TarFile, member: tarfile.TarInfo, file: str, keeps_place: bool
) -> Mapping[str, Any] | str | int | None:
    if kind is IMAGE and keeps_place and isinstance(tar.fileobj, io.BufferedReader) and file.endswith(".tar"):
        return {"path": f"{file}#{member.offset_data}+{member.size}/{member.name}", "bytes": None}
    content = tar.extractfile(member).read()
    if kind is IMAGE:
        return {"path": member.name, "bytes": content}
    text = text_of(content, f"{file}, {member.name}")
    if text is None or kind.dtype == "string":
        return text
    return int(text) if re.fullmatch(r"\s*-?\d{1,18}\s*", text) else None


def _members(file: str) -> Iterator[tuple[str, str, tarfile.TarFile, tarfile.TarInfo]]:
    """Key, ending, shard and header of each file in a shard. Raises a ValueError where it is damaged."""
    require_end(file)
    links = []
    with tarfile.open(file) as tar:
        while (member := tar.next()) is not None:
            tar.members = []  # there may be millions
            folder, name = os.path.split(member.name)
            stem, _, column = name.partition(".")
            if member.islnk() or member.issym():
                links.append(member.name)
            elif member.isreg() and stem and column:
                yield os.path.join(folder, stem), column.lower(), tar, member
        # A reader takes a damaged header for the end, silently, and so the end of the first of several
        tar.fileobj.seek(tar.offset)
        end = tar.fileobj.read(MOST_ZEROS + 1)
    if not 2 * tarfile.BLOCKSIZE <= len(end) <= MOST_ZEROS or end.strip(b"\0"):
        raise ValueError(DAMAGED.format(file))
    if links:
        warn_once(
            f"{file}: {len(links)} links to other files are ignored, such as {links[0]}: create it with tar "
            "--hard-dereference --dereference",
        )
