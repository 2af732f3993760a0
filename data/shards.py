"""WebDataset shards read at random: an index tells where in its shard each file lies.

A tar holds its files one after the other, as they are. So a sample of a shard is as near as one in a folder, and what
goes by numbers (labels of clusters, hidden states, a run that goes on) goes with shards as they are.
"""

import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import suppress

import datasets

# An image in a shard: its first byte and its length
MEMBER = re.compile(r"(.+\.tar)#(\d+)\+(\d+)", re.DOTALL)


def open_shards(files: Sequence[str], image_column: str, text_column: str, stamps: Sequence[str]) -> datasets.Dataset:
    """The samples of shards in their order. Headers and texts are read once; the result is cached by `datasets`.

    Files whose names agree up to the first dot, one after the other, are a sample, and the rest of the name is the
    column. What a sample lacks is None.

    Args:
        stamps: of the files: with others, the index is made anew.

    Returns:
        Columns `__key__`, the image column, of references that `read_member` reads, and the text column.
    """
    features = {"__key__": datasets.Value("string")}
    features |= {column: datasets.Value("string") for column in (image_column, text_column)}
    arguments = {"files": list(files), "image_column": image_column, "text_column": text_column, "stamps": list(stamps)}
    rows = datasets.Dataset.from_generator(_samples, features=datasets.Features(features), gen_kwargs=arguments)
    for column in (image_column, text_column):
        if rows.data.column(column).null_count == len(rows):
            there = sorted({name for _, name, _, _ in _members(files[0])})
            raise ValueError(f"the shards have no column {column}; in {files[0]} are {', '.join(there) or 'no files'}")
    return rows


def read_member(reference: str) -> bytes:
    """The bytes that a reference names."""
    shard, start, length = MEMBER.fullmatch(reference).groups()
    with open(shard, "rb") as file:
        file.seek(int(start))
        content = file.read(int(length))
    if len(content) != int(length):
        raise OSError(f"{shard} ends before byte {int(start) + int(length)}: was it changed since it was indexed?")
    return content


def require_whole(file: str, streaming: bool) -> None:
    """A tar must end as tars do, with zeros up to a full record. Readers take a damaged header for the end, silently.

    All headers are read, but of a stream, which may be of many large shards, only the end: it shows what was cut.
    """
    end = b""
    with suppress(tarfile.TarError, EOFError), tarfile.open(file) as tar:
        if streaming:
            tar.fileobj.seek(max(0, tar.fileobj.seek(0, os.SEEK_END) - 2 * tarfile.BLOCKSIZE))
        else:
            while tar.next() is not None:
                tar.members = []  # there may be millions
            tar.fileobj.seek(tar.offset)
        end = tar.fileobj.read(2 * tarfile.RECORDSIZE + 1)
    if not 2 * tarfile.BLOCKSIZE <= len(end) <= 2 * tarfile.RECORDSIZE or end.strip(b"\0"):
        raise ValueError(f"{file} is no tar, or is cut or damaged: copy or download it again")


def _samples(files: list[str], image_column: str, text_column: str, stamps: list[str]) -> Iterator[dict]:
    for file in files:
        require_whole(file, streaming=False)
        sample = {}
        for key, column, tar, member in _members(file):
            if sample and sample["__key__"] != key:
                yield sample
                sample = {}
            sample = sample or {"__key__": key, image_column: None, text_column: None}
            if column == image_column:
                sample[column] = f"{os.path.abspath(file)}#{member.offset_data}+{member.size}"
            elif column == text_column:
                sample[column] = tar.extractfile(member).read().decode()
        if sample:
            yield sample


def _members(file: str) -> Iterator[tuple[str, str, tarfile.TarFile, tarfile.TarInfo]]:
    """Key, ending, shard and header of each file in a shard."""
    with tarfile.open(file, mode="r:") as tar:
        while (member := tar.next()) is not None:
            tar.members = []  # there may be millions
            folder, name = os.path.split(member.name)
            stem, _, column = name.partition(".")
            if member.isreg() and stem and column:
                yield os.path.join(folder, stem), column.lower(), tar, member
