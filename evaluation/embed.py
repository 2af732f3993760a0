"""A model's embeddings of the pictures and captions of a data set, in files for other programs."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from accelerate import PartialState

from clip_moe.data.arguments import DataArguments
from clip_moe.data.pairs import load_pairs, rename_columns, select_columns, with_class_names
from clip_moe.data.sources import open_rows
from clip_moe.data.texts import present_captions
from clip_moe.data.worlds import is_world
from clip_moe.engine.files import new_file, write_text, writing
from clip_moe.engine.messages import join_names
from clip_moe.evaluation.embedder import Embedder

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
    is_main = state is None or state.is_main_process
    rows = _rows(arguments, what)
    texts = [] if what == "images" else [present_captions(captions) for captions in rows["caption"]]
    if what != "images" and not any(texts):
        raise ValueError(f"{arguments.source} has no caption in {arguments.caption_column}: set what to images")
    embedder = Embedder(model, folder / PARTS, batch_size, device, dtype, num_workers=num_workers, state=state)
    images = None if what == "captions" else embedder.images(rows, skip_unreadable=True)
    captions = None if what == "images" else embedder.texts([text for of_image in texts for text in of_image])
    if state is not None:
        state.wait_for_everyone()  # which have read what is deleted below
    skipped = arguments.skip or 0  # rows are those of the data
    unreadable = [] if images is None else np.flatnonzero(~images.any(axis=1)).tolist()
    if unreadable and is_main:
        places = join_names(f"{place + skipped} ({_path(rows[place])})" for place in unreadable)
        message = f"{len(unreadable)} of {len(rows)} pictures cannot be read and have no embedding: {places}"
        if len(unreadable) == len(rows):
            shutil.rmtree(folder / PARTS)
            raise ValueError(f"{message}. Relative paths start from image_root, or else from the working directory")
        logger.warning(message)
    kept = np.setdiff1d(np.arange(len(rows)), unreadable)
    embeds = {} if images is None else {"image_embeds": images[kept]}
    if captions is not None:
        embeds["text_embeds"] = captions[np.repeat(np.isin(np.arange(len(rows)), kept), list(map(len, texts)))]
    texts = [texts[place] if texts else [] for place in kept]
    if is_main:
        paths = [_path(row) for row in rows.select(kept).select_columns("image")]
        described = {"row": (kept + skipped).tolist(), "image": paths, "captions": texts}
        (_write_npy if form == "npy" else _write_parquet)(folder, described, embeds)
        shutil.rmtree(folder / PARTS)
    return 0 if images is None else len(kept), sum(map(len, texts)), unreadable


def _rows(arguments: DataArguments, what: What) -> datasets.Dataset:
    """The column `image`, which is not decoded, and but for images alone `caption`."""
    if is_world(arguments.source):
        return load_pairs(arguments).cast_column("image", datasets.Image(decode=False))
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
    return image if image is None or isinstance(image, str) else image["path"]


def _write_npy(output_dir: Path, described: dict[str, list], embeds: dict[str, np.ndarray]) -> None:
    """A file for each kind of embeddings, and `rows.jsonl`, a line of which describes a pair."""
    for name, of_rows in embeds.items():
        path = output_dir / f"{name}.npy"
        with writing(path), new_file(path) as partial, open(partial, "wb") as file:
            np.save(file, of_rows)
    lines = (dict(zip(described, values, strict=True)) for values in zip(*described.values(), strict=True))
    write_text(output_dir / "rows.jsonl", "\n".join(json.dumps(line, ensure_ascii=False) for line in lines))


def _write_parquet(output_dir: Path, described: dict[str, list], embeds: dict[str, np.ndarray]) -> None:
    """`embeds.parquet`: a row for each pair, with `image_embeds` and the list `text_embeds` of its captions."""
    table = pyarrow.table(
        described,
        pyarrow.schema(
            {"row": pyarrow.int64(), "image": pyarrow.string(), "captions": pyarrow.list_(pyarrow.string())}
        ),
    )
    for name, of_rows in embeds.items():
        column = pyarrow.FixedSizeListArray.from_arrays(of_rows.ravel(), of_rows.shape[1])
        if name == "text_embeds":
            offsets = np.cumsum([0, *map(len, described["captions"])], dtype=np.int32)
            column = pyarrow.ListArray.from_arrays(offsets, column)
        table = table.append_column(name, column)
    path = output_dir / "embeds.parquet"
    with writing(path), new_file(path) as partial:
        pyarrow.parquet.write_table(table, partial, row_group_size=ROW_GROUP)
