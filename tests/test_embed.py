"""Embeddings of own data in files: in order, complete, and none of a picture that cannot be read."""

import json
import shutil

import numpy as np
import pyarrow.parquet
import pytest
import small_evaluation
import torch
from datasets import Image
from several_processes import run_processes
from tiny_sources import png

from data.pairs import load_pairs
from data.sources import DataArguments
from evaluation import commands
from evaluation.embed import PARTS, embed_pairs
from evaluation.embedder import Embedder

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
    return embed_pairs(str(dense), DataArguments(source=str(source)), output, batch_size=2, device="cpu", **options)


@pytest.mark.parametrize("form", ["npy", "parquet"])
def test_rows_are_in_order_and_complete(dense, pictures, tmp_path, form, caplog):
    held = embed(dense, pictures, tmp_path / "out", form=form)
    kept = [number for number in range(NUMBER) if number != 5]
    counts = [0 if number == 7 else number % 3 + 1 for number in kept]
    assert (held["unreadable"], held["num_images"], held["num_captions"]) == ([5], NUMBER - 1, sum(counts))
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

    monkeypatch.setattr("evaluation.embedder.BATCHES_PER_SHARD", 1)
    monkeypatch.setattr(Embedder, "_embed", embedded)
    with pytest.raises(KeyboardInterrupt):
        embed(dense, pictures, tmp_path / "out")
    assert list((tmp_path / "out" / PARTS).rglob("*.safetensors"))
    held = embed(dense, pictures, tmp_path / "out")
    assert len(calls) == 5 + 6 - 4 + 11 and held == whole  # of 6 batches of pictures, 4 were kept
    for name in ("image_embeds.npy", "text_embeds.npy", "rows.jsonl"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    monkeypatch.setattr(Embedder, "_embed", None)
    assert embed(dense, pictures, tmp_path / "out") == whole  # nothing is computed again


def test_another_model_other_data_or_settings_are_refused(dense, sparse, pictures, tmp_path):
    embed(dense, pictures, tmp_path / "out", what="images")
    assert not (tmp_path / "out" / "text_embeds.npy").exists()
    with pytest.raises(ValueError, match="out was begun with another model: name another folder, or delete it"):
        embed(sparse, pictures, tmp_path / "out", what="images")
    with pytest.raises(ValueError, match="out was begun with what 'images', now 'both': name"):
        embed(dense, pictures, tmp_path / "out")
    shutil.copy(pictures / "01.png", pictures / "02.png")
    with pytest.raises(ValueError, match="out was begun with other data files"):
        embed(dense, pictures, tmp_path / "out", what="images")


def test_a_missing_picture_is_left_out_and_a_folder_of_others_is_not_taken(dense, pictures, tmp_path):
    table = f"image,caption,other\n{pictures}/01.png,one,x\n{pictures}/none.png,two,y\n"
    (tmp_path / "table.csv").write_text(table)
    held = embed(dense, tmp_path / "table.csv", tmp_path / "out")
    assert (held["unreadable"], held["num_images"], held["num_captions"]) == ([1], 1, 1)
    with pytest.raises(ValueError, match="out was begun with caption_column "):
        arguments = DataArguments(source=str(tmp_path / "table.csv"), caption_column="other")
        embed_pairs(str(dense), arguments, tmp_path / "out", batch_size=2, device="cpu")
    (tmp_path / "out" / "rows.jsonl").unlink()
    with pytest.raises(ValueError, match="out lacks rows.jsonl: delete it, and start again"):
        embed(dense, tmp_path / "table.csv", tmp_path / "out")
    with pytest.raises(ValueError, match="inside lies inside the data, .*: name a folder outside"):
        embed(dense, pictures, pictures / "inside")
    (tmp_path / "table.csv").write_text("image,caption\nnone.png,a\n,b\n")
    with pytest.raises(ValueError, match="2 of 2 pictures cannot be read .* Relative paths start from image_root"):
        embed(dense, tmp_path / "table.csv", tmp_path / "none")
    assert not (tmp_path / "none").exists()
    with pytest.raises(ValueError, match="table.csv has no caption in other: take --what images"):
        (tmp_path / "table.csv").write_text("image,other\nnone.png,\n")
        arguments = DataArguments(source=str(tmp_path / "table.csv"), caption_column="other")
        embed_pairs(str(dense), arguments, tmp_path / "empty", batch_size=2, device="cpu")
    (tmp_path / "mine" / PARTS).mkdir(parents=True)
    with pytest.raises(ValueError, match="mine already exists: remove it or choose another output"):
        embed(dense, pictures, tmp_path / "mine")


def run_command(*arguments):
    commands.embed.main(list(map(str, arguments)))


@pytest.mark.slow
def test_two_processes_embed_as_one(dense, pictures, tmp_path):
    options = "--model", dense, "--dataset", pictures, "--batch-size", "2", "--device", "cpu"
    printed = run_processes(2, run_command, *options, "--output-dir", tmp_path / "two")
    assert printed.count("11 pictures and 19 captions, 1 pictures skipped") == 1, printed
    embed(dense, pictures, tmp_path / "one")
    for name in ("image_embeds.npy", "text_embeds.npy", "rows.jsonl"):
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()
