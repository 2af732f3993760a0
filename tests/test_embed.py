"""Embeddings of own data in files: in order, complete, and none of a picture that cannot be read."""

import json

import numpy as np
import pyarrow.parquet
import pytest
import small_evaluation
import torch
from datasets import Image
from several_processes import run_processes
from tiny_sources import png

import clip_moe
from clip_moe.data.arguments import DataArguments
from clip_moe.data.pairs import load_pairs
from clip_moe.evaluation.embed import PARTS, write_embeddings
from clip_moe.evaluation.embedder import Embedder

NUMBER = 12
dense, sparse = small_evaluation.dense, small_evaluation.sparse


@pytest.fixture
def pictures(tmp_path):
    """Twelve pictures with one to three captions, of which one is damaged and one has no caption."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    lines = []
    for number in range(NUMBER):
        (folder / f"{number:02d}.png").write_bytes(b"damaged" if number == 5 else png(number))
        captions = [f"a red circle {k}" for k in range(number % 3 + 1)] if number != 7 else []
        lines.append({"file_name": f"{number:02d}.png", "caption": captions})
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def embed(dense, source, output, **options):
    output.mkdir(exist_ok=True)
    data = DataArguments(source=str(source), caption_column=options.pop("caption_column", "caption"))
    return write_embeddings(str(dense), data, output, batch_size=2, device=torch.device("cpu"), **options)


def test_rows_are_numbered_as_in_the_data(dense, pictures, tmp_path, caplog):
    (tmp_path / "out").mkdir()
    data = DataArguments(source=str(pictures), skip=4)
    write_embeddings(str(dense), data, tmp_path / "out", batch_size=2, device=torch.device("cpu"))
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    assert [(row["row"], row["image"][-6:]) for row in rows] == [(n, f"{n:02d}.png") for n in (4, *range(6, NUMBER))]
    assert "no embedding: 5 (" in caplog.text


@pytest.mark.parametrize("form", ["npy", "parquet"])
def test_rows_are_in_order_and_complete(dense, pictures, tmp_path, form, caplog):
    held = embed(dense, pictures, tmp_path / "out", form=form)
    kept = [number for number in range(NUMBER) if number != 5]
    counts = [0 if number == 7 else number % 3 + 1 for number in kept]
    assert held == (NUMBER - 1, sum(counts), [5])
    assert "1 of 12 pictures cannot be read and have no embedding: 5 (" in caplog.text
    if form == "npy":
        images, texts = (np.load(tmp_path / "out" / f"{name}_embeds.npy") for name in ("image", "text"))
        rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    else:
        rows = pyarrow.parquet.read_table(tmp_path / "out" / "embeds.parquet").to_pylist()
        images = np.array([row["image_embeds"] for row in rows], np.float32)
        texts = np.array([text for row in rows for text in row["text_embeds"]], np.float32)
    assert [row["row"] for row in rows] == kept and [len(row["captions"]) for row in rows] == counts
    embedder = Embedder(dense, None, 4, torch.device("cpu"))
    by_name = {row["image"]: image for row, image in zip(rows, images, strict=True)}
    alone = load_pairs(DataArguments(source=str(pictures), max_unreadable=0.5)).cast_column(
        "image", Image(decode=False)
    )
    expected = embedder.images(alone)
    for row, image in zip(alone, expected, strict=True):
        np.testing.assert_allclose(by_name[row["image"]["path"]], image, atol=1e-6)
    expected = embedder.texts([caption for row in rows for caption in row["captions"]])
    np.testing.assert_allclose(texts, expected, atol=1e-6)
    assert not (tmp_path / "out" / PARTS).exists()


def test_what_was_interrupted_goes_on(dense, pictures, tmp_path, monkeypatch):
    whole = embed(dense, pictures, tmp_path / "whole")
    original, calls = Embedder._embed, []

    def embedded(self, *arguments):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return original(self, *arguments)

    monkeypatch.setattr("clip_moe.evaluation.embedder.BATCHES_PER_SHARD", 1)
    monkeypatch.setattr(Embedder, "_embed", embedded)
    with pytest.raises(KeyboardInterrupt):
        embed(dense, pictures, tmp_path / "out")
    assert list((tmp_path / "out" / PARTS).rglob("*.safetensors"))
    held = embed(dense, pictures, tmp_path / "out")
    assert len(calls) == 5 + 6 - 4 + 11 and held == whole  # of 6 batches of pictures, 4 were kept
    for name in ("image_embeds.npy", "text_embeds.npy", "rows.jsonl"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_missing_picture_is_left_out_and_data_without_any_are_refused(dense, pictures, tmp_path):
    table = tmp_path / "table.csv"
    table.write_text(f"image,caption\n{pictures}/01.png,one\n{pictures}/none.png,two\n")
    assert embed(dense, table, tmp_path / "out") == (1, 1, [1])
    assert embed(dense, table, tmp_path / "images", what="images") == (1, 0, [1])
    assert not (tmp_path / "images" / "text_embeds.npy").exists()
    table.write_text("image,caption\nnone.png,a\n,b\n")
    with pytest.raises(ValueError, match="2 of 2 pictures cannot be read .* Relative paths start from image_root"):
        embed(dense, table, tmp_path / "none")
    table.write_text("image,other\nnone.png,\n")
    with pytest.raises(ValueError, match="table.csv has no caption in other: set what to images"):
        embed(dense, table, tmp_path / "empty", caption_column="other")


def run_command(*arguments):
    clip_moe.main(["embed", *map(str, arguments)])


@pytest.mark.slow
def test_two_processes_embed_as_one(dense, pictures, tmp_path):
    options = "--model", dense, "--data.source", pictures, "--batch_size", 2
    printed = run_processes(2, run_command, tmp_path / "two", *options)
    assert printed.count("11 pictures and 19 captions, 1 pictures skipped") == 1, printed
    embed(dense, pictures, tmp_path / "one")
    for name in ("image_embeds.npy", "text_embeds.npy", "rows.jsonl"):
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()
