"""Batches for training, loaded and streamed: their order, where they resume, and pairs that cannot be read."""

import dataclasses
import os
import signal
from collections import Counter

import numpy as np
import pytest
import tiny_sources
import torch
from tiny_sources import SOURCES, damaged, parquet, png, saved_pairs, sharegpt4v
from tiny_sources import rows as rows_of

from clip_moe.data.arguments import DataArguments
from clip_moe.data.pairs import load_pairs
from clip_moe.data.symbols import SYMBOLS
from clip_moe.data.tokenizer import pieces_per_word
from clip_moe.evaluation.batches import read_batches
from clip_moe.training.loader import PairLoader
from clip_moe.training.samplers import Share


def batches(loader, start, number):
    stream = loader.batches(start)
    return [next(stream) for _ in range(number)]


def equal(first, second):
    return all(torch.equal(a[key], b[key]) for a, b in zip(first, second, strict=True) for key in a)


def loader_of(arguments, processor, batch_size=1, rank=0, world_size=1):
    return PairLoader(load_pairs(arguments), processor, arguments, Share(batch_size, rank, world_size))


def test_a_stream_skips_and_judges(tmp_path, processor, caplog, monkeypatch):
    arguments = DataArguments(**damaged(tmp_path, 0.02), streaming=True, max_unreadable=0.03)
    stream = loader_of(arguments, processor).batches(0)
    pixels = [next(stream)["pixel_values"] for _ in range(2 * 196)]  # not one more or less: epochs have another order
    first, second = (sorted(map(lambda image: image.mean().item(), part)) for part in (pixels[:196], pixels[196:]))
    assert first == second
    assert "4 of 200 pairs" in caplog.text and caplog.text.count("skipped so far") == 4
    problems = ["images/cut.png: its image cannot be read", "images/nowhere.png: its image", "its caption is empty"]
    assert all(problem in caplog.text for problem in problems)
    strict = dataclasses.replace(arguments, max_unreadable=0.01)
    with pytest.raises(ValueError, match=r"4 of 200 .*the first is pair \d+ in the order of the stream \(.*More than"):
        batches(loader_of(strict, processor), 0, 197)
    monkeypatch.setattr("clip_moe.data.readable.STREAM_TRIAL", 10)
    with pytest.raises(ValueError, match="More than max_unreadable"):
        batches(loader_of(strict, processor), 0, 196)


def test_a_share_of_a_short_stream_is_judged_only_if_it_is_worse_than_all_may_be(tmp_path, processor):
    """Four bad pairs of 200 are few, but may be many of those that one process or worker reads."""
    stream = {"streaming": True, "num_workers": 2}
    good = DataArguments(**damaged(tmp_path, 0.02), **stream, max_unreadable=0.02)
    assert len(batches(loader_of(good, processor, rank=1, world_size=2), 0, 110)) == 110
    bad = DataArguments(**damaged(tmp_path, 0.5), **stream)
    with pytest.raises(ValueError, match="More than max_unreadable"):
        batches(loader_of(bad, processor, rank=1, world_size=2), 0, 200)


@pytest.mark.parametrize(("num_workers", "world_size"), [(2, 1), (0, 2)])
def test_a_stream_that_several_share_has_no_first_pairs(tmp_path, processor, num_workers, world_size):
    arguments = DataArguments(**parquet(tmp_path), streaming=True, num_samples=2, num_workers=num_workers)
    with pytest.raises(ValueError, match="num_samples = 2: a stream"):
        loader_of(arguments, processor, world_size=world_size)


def test_a_worker_that_is_killed_is_no_traceback(tmp_path, processor, monkeypatch):
    monkeypatch.setattr("clip_moe.training.loader.read_pair", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    arguments = DataArguments(**sharegpt4v(tmp_path), streaming=True, num_workers=1)
    with pytest.raises(ValueError, match=r"DataLoader worker .*(is killed by signal|exited unexpectedly)"):
        batches(loader_of(arguments, processor), 0, 1)


@pytest.mark.parametrize(("counts", "num_workers"), [((0, 20), 2), ((3, 20), 2), ((3, 20), 0)], ids=str)
def test_streams_of_uneven_shards_resume(processor, tmp_path, counts, num_workers):
    for shard, count in enumerate(counts):
        rows = rows_of([f"{shard} {number}" for number in range(20)])
        rows.select(range(count)).to_parquet(tmp_path / f"{shard}.parquet", batch_size=20)
    arguments = DataArguments(source=str(tmp_path), streaming=True, num_workers=num_workers)
    loader = loader_of(arguments, processor, 2)
    whole = batches(loader, 0, 12)
    for start in (1, 3, 6):
        assert equal(batches(loader, start, 12 - start), whole[start:])


@pytest.mark.parametrize("streaming", [False, True], ids=["loaded", "streamed"])
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)
def test_one_broken_image_is_skipped_counted_and_named(tmp_path, processor, caplog, monkeypatch, source, streaming):
    monkeypatch.setattr(tiny_sources, "png", lambda number=0: png(number)[:50] if number == 7 else png(number))
    arguments = DataArguments(**source(tmp_path), streaming=streaming, max_unreadable=0.2)
    pixels = [batch["pixel_values"].mean().item() for batch in batches(loader_of(arguments, processor), 0, 2 * 7)]
    assert len(set(pixels[:7])) == 7 and sorted(pixels[:7]) == sorted(pixels[7:])
    assert f"1 of 8 pairs of {arguments.source} cannot be used" in caplog.text
    assert "7.png" in caplog.text and "its image cannot be read: " in caplog.text
    strict = dataclasses.replace(arguments, max_unreadable=0.01)
    with pytest.raises(ValueError, match=r"7\.png.*its image cannot be read: .*More than max_unreadable = 1%"):
        batches(loader_of(strict, processor), 0, 8)


@pytest.mark.parametrize("streaming", [False, True], ids=["loaded", "streamed"])
def test_of_several_captions_every_epoch_draws_one_that_is_there(tmp_path, processor, streaming):
    captions = [["", "one", None, "two", " "], ["three"], [None, "four"], ["five", "six", ""]]
    rows_of(captions).to_parquet(tmp_path / "x.parquet")
    arguments = DataArguments(source=str(tmp_path / "x.parquet"), streaming=streaming)
    loader = loader_of(arguments, processor, 4)
    drawn = [processor.tokenizer.batch_decode(b["input_ids"], skip_special_tokens=True) for b in batches(loader, 0, 30)]
    counts = Counter(text.strip() for epoch in drawn for text in epoch)
    assert set(counts) == {"one", "two", "three", "four", "five", "six"}
    assert counts["three"] == counts["four"] == 30 and min(counts.values()) >= 8
    assert equal(batches(loader_of(arguments, processor, 4), 17, 1), batches(loader, 17, 1))


def test_captions_are_missing_in_a_list_but_not_all_of_them(tmp_path, processor, caplog):
    captions = [["a", None], [None, "b"], [None, ""]]
    arguments = DataArguments(**saved_pairs(tmp_path / "x", captions), max_unreadable=0.5)
    rows = load_pairs(arguments)
    assert list(rows["caption"]) == [["a", None], [None, "b"]] and "its caption is empty" in caplog.text
    loader = PairLoader(rows, processor, arguments, Share(2), caption_weights=[0.5, 0.5])
    batch = loader.in_order()[0]
    assert batch["caption_mask"].tolist() == [[True, False], [False, True]] and len(batch["input_ids"]) == 2
    assert "of 2 images, 1, 1 lack caption 0, 1" in caplog.text
    with pytest.raises(ValueError, match="image 1 of .* has no caption with a weight"):
        PairLoader(rows, processor, arguments, Share(2), caption_weights=[1.0, 0.0])


@pytest.mark.parametrize("streaming", [False, True], ids=["loaded", "streamed"])
def test_captions_that_are_cut_are_reported(tmp_path, processor, caplog, capsys, streaming, monkeypatch):
    arguments = DataArguments(source=str(tmp_path / "x.parquet"), streaming=streaming)

    def captions(share):
        return [f"qzxjv {number} " * (40 if number < share * 200 else 1) for number in range(200)]

    def report(share):
        rows_of(captions(share)).to_parquet(tmp_path / "x.parquet")
        caplog.clear()
        PairLoader(load_pairs(arguments), processor, arguments, Share(8)).report_captions("tuned")
        return caplog.text + capsys.readouterr().out

    assert "longer" not in report(0)
    told = report(0.865)
    assert "tuned: 173 captions are longer than 16 tokens" in told
    assert "max_position_embeddings" in told and "long_context" in told
    pieces = pieces_per_word(processor.tokenizer, captions(0.865))
    assert f"{arguments.source} into {pieces:.1f} pieces" in told and "a tokenizer stage learns" in told
    monkeypatch.setattr("clip_moe.training.loader.CAPTIONS_LOOKED_AT", 50)
    monkeypatch.setattr("clip_moe.training.loader.STREAMED_LOOKED_AT", 50)
    assert f"these are {'the first 50' if streaming else '50 of 200'}." in report(1)


# Processes that read batches: they live as long as a run, read ahead, and change nothing


@pytest.fixture(scope="module")
def rows():
    return SYMBOLS.load("train", "web", 20, captions_per_image=3)


def make(rows, processor, **settings):
    return PairLoader(rows, processor, DataArguments(source="symbols", num_samples=20, **settings), Share(8))


@pytest.mark.parametrize("settings", [{}, {"num_workers": 2}, {"in_memory": True}], ids=str)
def test_batches_are_those_of_their_epochs(rows, processor, settings):
    loader, stream = make(rows, processor), make(rows, processor, **settings).batches(1)
    expected = []
    for epoch in range(3):
        expected += [(epoch, batch) for batch in loader.sampler.epoch_batches(epoch)]
    for epoch, numbers in expected[1:]:
        batch = next(stream)
        drawn = [np.random.default_rng([0, epoch, number]).integers(3) for number in numbers]
        captions = [rows[number]["caption"][chosen] for number, chosen in zip(numbers, drawn, strict=True)]
        ids = processor.tokenizer(captions, padding=True, truncation=True, return_tensors="pt")["input_ids"]
        assert torch.equal(batch["input_ids"], ids)
        images = [rows[number]["image"] for number in numbers]
        pixels = processor.image_processor(images, return_tensors="pt")["pixel_values"]
        assert torch.equal(batch["pixel_values"], pixels)


@pytest.mark.parametrize("settings", [{}, {"num_workers": 1}, {"in_memory": True}], ids=str)
def test_pairs_in_order_have_their_first_captions(rows, processor, settings):
    batches = make(rows, processor, **settings).in_order()
    found = list(read_batches(batches, range(len(batches)), settings.get("num_workers", 0)))
    assert [len(batch["pixel_values"]) for batch in found] == [8, 8, 4]
    pixels = processor.image_processor(list(rows["image"]), return_tensors="pt")["pixel_values"]
    assert torch.equal(torch.cat([batch["pixel_values"] for batch in found]), pixels)
    first = [captions[0] for captions in rows["caption"]]
    for number, batch in enumerate(found):
        tokens = processor.tokenizer(first[8 * number :][:8], padding=True, truncation=True, return_tensors="pt")
        assert torch.equal(batch["input_ids"], tokens["input_ids"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_on_a_machine_with_a_gpu_are_pinned(rows, processor, num_workers):
    batch = next(make(rows, processor, num_workers=num_workers).batches(0))
    assert all(tensor.is_pinned() for tensor in batch.values())
