"""A model's embeddings of the pictures and captions of a data set, in files for other programs."""

import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from accelerate import PartialState

from data.pairs import load_pairs, present_captions, rename_columns, select_columns, with_class_names
from data.sources import DataArguments, open_rows
from data.worlds import WORLDS
from evaluation.embedder import Embedder
from records.files import new_file, writing
from records.messages import join_names

logger = logging.getLogger(__name__)

What, Form = Literal["both", "images", "captions"], Literal["npy", "parquet"]
# What was computed so far
PARTS = "parts"
# Rows of a parquet file that are written together
ROW_GROUP = 10_000


def write_embeddings(
    model: str,
    arguments: DataArguments,
    folder: Path,
    what: What = "both",
    form: Form = "npy",
    batch_size: int = 64,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    num_workers: int | None = None,
    state: PartialState | None = None,
) -> tuple[int, int, list[int]]:
    """Write the normalized embeddings of a data set, in its order, into a folder. Resumes after an interruption.

    Returns:
        How many images and captions there are, and the places of unreadable pictures in the data set, which have no
        embedding.
    """
    source, is_main = os.path.realpath(arguments.source), state is None or state.is_main_process
    if os.path.isdir(source) and Path(os.path.realpath(folder)).is_relative_to(source):
        raise ValueError(f"{folder} lies inside the data, {source}: name a folder outside")
    rows = _rows(arguments, what)
    texts = [] if what == "images" else [present_captions(captions) for captions in rows["caption"]]
    if what != "images" and not any(texts):
        raise ValueError(f"{arguments.source} has no caption in {arguments.caption_column}: set what to images")
    embedder = Embedder(model, folder / PARTS, batch_size, device, dtype, num_workers=num_workers, state=state)
    images = None if what == "captions" else embedder.images(rows, skip_unreadable=True)
    captions = None if what == "images" else embedder.texts([text for of_image in texts for text in of_image])
    if state is not None:
        state.wait_for_everyone()  # which have read what is deleted below
    unreadable = [] if images is None else np.flatnonzero(~images.any(axis=1)).tolist()
    if unreadable and is_main:
        places = join_names(f"{place} ({_path(rows[place])})" for place in unreadable)
        message = f"{len(unreadable)} of {len(rows)} pictures cannot be read and have no embedding: {places}"
        if len(unreadable) == len(rows):
            shutil.rmtree(folder / PARTS)
            raise ValueError(f"{message}. Relative paths start from image_root, or else from the working directory")
        logger.warning(message)
    left_out = set(unreadable)
    if is_main:
        (_write_npy if form == "npy" else _write_parquet)(folder, rows, texts, images, captions, left_out)
        shutil.rmtree(folder / PARTS)
    num_captions = sum(len(of_image) for place, of_image in enumerate(texts) if place not in left_out)
    return 0 if images is None else len(images) - len(unreadable), num_captions, unreadable


def _rows(arguments: DataArguments, what: What) -> datasets.Dataset:
    if arguments.source in WORLDS:
        return load_pairs(arguments)
    opened = open_rows(arguments)
    if what == "images":
        rows = rename_columns(opened, {arguments.image_column: "image"}, arguments)
    else:
        rows = with_class_names(select_columns(opened, arguments))
    if len(rows) == 0:
        raise ValueError(f"{arguments.source} has no pairs in split {arguments.split}")
    return rows


def _path(row: dict[str, Any]) -> str | None:
    image = row["image"]
    return image if isinstance(image, str) else image.get("path") if isinstance(image, dict) else None


def _described(
    rows: datasets.Dataset, texts: list[list[str]], unreadable: set[int]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The place of each readable pair, and what it is."""
    if isinstance(rows.features["image"], datasets.Image):
        rows = rows.cast_column("image", datasets.Image(decode=False))
    for place, row in enumerate(rows.select_columns("image")):
        if place not in unreadable:
            yield place, {"row": place, "image": _path(row), "captions": texts[place] if texts else []}


def _write_npy(
    output_dir: Path,
    rows: datasets.Dataset,
    texts: list[list[str]],
    images: np.ndarray | None,
    captions: np.ndarray | None,
    unreadable: set[int],
) -> None:
    """`image_embeds.npy` and `text_embeds.npy`; a line of `rows.jsonl` for each pair says what is in them, in order."""
    kept = np.array([place not in unreadable for place in range(len(rows))])
    for name, embeds, of_pairs in (("image_embeds", images, 1), ("text_embeds", captions, list(map(len, texts)))):
        if embeds is not None:
            path = output_dir / f"{name}.npy"
            with writing(path), new_file(path) as partial, open(partial, "wb") as file:
                np.save(file, embeds[np.repeat(kept, of_pairs)])
    path = output_dir / "rows.jsonl"
    with writing(path), new_file(path) as partial, open(partial, "w", encoding="utf-8") as file:
        for _, described in _described(rows, texts, unreadable):
            file.write(json.dumps(described, ensure_ascii=False) + "\n")


def _write_parquet(
    output_dir: Path,
    rows: datasets.Dataset,
    texts: list[list[str]],
    images: np.ndarray | None,
    captions: np.ndarray | None,
    unreadable: set[int],
) -> None:
    """`embeds.parquet`: a row for each pair, with `image_embeds` and the list `text_embeds` of its captions."""
    width = (images if images is not None else captions).shape[1]
    vector = pyarrow.list_(pyarrow.float32(), width)
    kinds = {"row": pyarrow.int64(), "image": pyarrow.string(), "captions": pyarrow.list_(pyarrow.string())}
    kinds |= {} if images is None else {"image_embeds": vector}
    kinds |= {} if captions is None else {"text_embeds": pyarrow.list_(vector)}
    first = np.cumsum([0, *map(len, texts)])
    schema = pyarrow.schema(kinds)
    path = output_dir / "embeds.parquet"
    with (
        writing(path),
        new_file(path) as partial,
        pyarrow.parquet.ParquetWriter(partial, schema) as writer,
    ):
        group = []
        for place, described in _described(rows, texts, unreadable):
            if images is not None:
                described["image_embeds"] = images[place]
            if captions is not None:
                described["text_embeds"] = list(captions[first[place] : first[place + 1]])
            group.append(described)
            if len(group) == ROW_GROUP:
                writer.write_table(pyarrow.Table.from_pylist(group, schema))
                group.clear()
        if group:
            writer.write_table(pyarrow.Table.from_pylist(group, schema))
