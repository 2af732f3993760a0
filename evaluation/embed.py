"""A model's embeddings of the pictures and captions of a data set, in files for other programs: `clip-moe embed`."""

import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from accelerate import PartialState

from data.identity import identity
from data.pairs import load_pairs, present_captions, rename_columns, select_columns, with_class_names
from data.sources import DataArguments, open_rows
from data.worlds import WORLDS
from evaluation.embedder import Embedder, usable_device
from records.files import locked, new_file, output_folder, read_json, refuse_to_overwrite, write_text, writing
from records.messages import join_names
from records.provenance import weights_fingerprint

logger = logging.getLogger(__name__)

What, Form = Literal["both", "images", "captions"], Literal["npy", "parquet"]
# What a folder holds, and what was computed so far
ABOUT, PARTS = "embeddings.json", "parts"
# What says how data are read, and not which
READING = ("num_workers", "prefetch_factor", "in_memory")
# Rows of a parquet file that are written together
ROW_GROUP = 10_000


def embed_pairs(
    model: str,
    arguments: DataArguments,
    output_dir: Path,
    what: What = "both",
    form: Form = "npy",
    batch_size: int = 64,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    num_workers: int | None = None,
    state: PartialState | None = None,
) -> dict[str, Any]:
    """Write the normalized embeddings of a data set, in its order, to a folder. Resumes after an interruption.

    Returns:
        What the folder holds: `num_images`, `num_captions`, and the places of `unreadable` pictures in the data set,
        which have no embedding.

    Raises:
        ValueError: the folder holds embeddings of another model, other data or other settings.
    """
    is_main = state is None or state.is_main_process
    source, output_dir = os.path.realpath(arguments.source), Path(output_dir)
    if os.path.isdir(source) and Path(os.path.realpath(output_dir)).is_relative_to(source):
        raise ValueError(f"{output_dir} lies inside the data, {source}: name a folder outside")
    settings = {**asdict(arguments), "what": what, "form": form, "batch_size": batch_size, "dtype": str(dtype)}
    asked = {
        "model": weights_fingerprint(model),
        "data": identity(arguments),
        **{name: value for name, value in settings.items() if name not in READING},
    }
    with locked(output_dir) if is_main else nullcontext(), output_folder(output_dir):
        about = _begun(output_dir, asked) if is_main else None
        if state is not None:
            state.wait_for_everyone()
        if not is_main:
            about = read_json(output_dir / ABOUT) if (output_dir / ABOUT).exists() else {}
        if "num_images" in about:
            if is_main:
                shutil.rmtree(output_dir / PARTS, ignore_errors=True)  # of one that was killed at its very end
            return about
        rows = _rows(arguments, what)
        texts = [] if what == "images" else [present_captions(captions) for captions in rows["caption"]]
        if what != "images" and not any(texts):
            raise ValueError(f"{arguments.source} has no caption in {arguments.caption_column}: take --what images")
        device = usable_device(device) if state is None else state.device
        if is_main and not about:
            write_text(output_dir / ABOUT, json.dumps(asked))
        embedder = Embedder(model, output_dir / PARTS, batch_size, device, dtype, num_workers=num_workers, state=state)
        images = None if what == "captions" else embedder.images(rows, skip_unreadable=True)
        captions = None if what == "images" else embedder.texts([text for of_image in texts for text in of_image])
        if state is not None:
            state.wait_for_everyone()  # which have read what is deleted below
        if not is_main:
            return asked
        unreadable = [] if images is None else np.flatnonzero(~images.any(axis=1)).tolist()
        if unreadable:
            places = join_names(f"{place} ({_path(rows[place])})" for place in unreadable)
            message = f"{len(unreadable)} of {len(rows)} pictures cannot be read and have no embedding: {places}"
            if len(unreadable) == len(rows):
                (output_dir / ABOUT).unlink()
                shutil.rmtree(output_dir / PARTS)
                raise ValueError(f"{message}. Relative paths start from image_root, or else from the working directory")
            logger.warning(message)
        if identity(arguments) != asked["data"]:
            raise ValueError(f"{arguments.source} changed while it was embedded: delete {output_dir}, and start again")
        left_out = set(unreadable)
        (_write_npy if form == "npy" else _write_parquet)(output_dir, rows, texts, images, captions, left_out)
        of_kept = (len(of_image) for place, of_image in enumerate(texts) if place not in left_out)
        held = {"num_images": 0 if images is None else len(images) - len(left_out), "num_captions": sum(of_kept)}
        write_text(output_dir / ABOUT, json.dumps(asked | held | {"unreadable": unreadable}))
        shutil.rmtree(output_dir / PARTS)
    return asked | held | {"unreadable": unreadable}


def _begun(output_dir: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """What a folder says it holds; nothing where it is empty."""
    if not (output_dir / ABOUT).exists():
        refuse_to_overwrite(output_dir)
        return {}
    about, asked = read_json(output_dir / ABOUT), json.loads(json.dumps(asked))
    if not isinstance(about, dict):
        raise ValueError(f"{output_dir / ABOUT} is damaged: delete {output_dir}, and start again")
    hashed = {"model": "another model", "data": "other data files"}
    others = [name for name in asked if about.get(name) != asked[name]]
    changes = [hashed.get(name, f"{name} {about.get(name)!r}, now {asked[name]!r}") for name in others]
    if changes:
        raise ValueError(f"{output_dir} was begun with {join_names(changes)}: name another folder, or delete it")
    sides = [side for side, left_out in (("image", "captions"), ("text", "images")) if asked["what"] != left_out]
    names = [f"{side}_embeds.npy" for side in sides] + ["rows.jsonl"] if asked["form"] == "npy" else ["embeds.parquet"]
    lacking = [name for name in names if not (output_dir / name).is_file()]
    if "num_images" in about and lacking:
        raise ValueError(f"{output_dir} lacks {join_names(lacking)}: delete it, and start again")
    return about


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
