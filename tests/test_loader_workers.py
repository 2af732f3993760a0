"""Processes that read batches: they live as long as a run, read ahead, and change nothing."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from data import symbols
from data.sources import DataArguments
from data.worlds import build_processor
from training.loader import PairLoader


@pytest.fixture(scope="module")
def processor():
    return build_processor("symbols", 16, 16)


@pytest.fixture(scope="module")
def rows():
    return symbols.load("train", "web", 20, captions_per_image=3)


def make(rows, processor, **settings):
    return PairLoader(rows, processor, DataArguments(source="symbols", num_samples=20, **settings), batch_size=8)


def test_a_run_has_one_data_loader_that_reads_over_the_end_of_an_epoch(rows, processor, monkeypatch):
    made = []
    monkeypatch.setattr(
        "training.loader.DataLoader", lambda *args, **options: made.append(1) or DataLoader(*args, **options)
    )
    loader = make(rows, processor, num_workers=1, prefetch_factor=5)  # two batches an epoch
    stream = loader.batches(0)
    next(stream)
    assert loader.sampler.epoch == 2  # the sixth batch was asked for
    for _ in range(6):
        next(stream)
    assert made == [1]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_those_of_their_epochs(rows, processor, num_workers):
    """Which pairs, and which of their captions, a plain loop over epochs says."""
    loader, stream = make(rows, processor), make(rows, processor, num_workers=num_workers).batches(1)
    expected = []
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        expected += [(epoch, batch) for batch in loader.sampler]
    for epoch, numbers in expected[1:]:
        batch = next(stream)
        drawn = [np.random.default_rng([0, epoch, number]).integers(3) for number in numbers]
        captions = [rows[number]["caption"][chosen] for number, chosen in zip(numbers, drawn, strict=True)]
        ids = processor.tokenizer(captions, padding=True, truncation=True, return_tensors="pt")["input_ids"]
        assert torch.equal(batch["input_ids"], ids)
        images = [rows[number]["image"] for number in numbers]
        pixels = processor.image_processor(images, return_tensors="pt")["pixel_values"]
        assert torch.equal(batch["pixel_values"], pixels)


def test_pairs_in_order_are_read_by_the_same_workers(rows, processor):
    loader, plain = make(rows, processor, num_workers=1), make(rows, processor)
    found, workers = [], []
    for start, stop in ((0, 10), (10, 20)):
        found += list(loader.in_order(start, stop))
        workers += [worker.pid for worker in loader._in_order._iterator._workers]
    assert workers[0] == workers[1]
    expected = [*plain.in_order(0, 10), *plain.in_order(10, 20)]
    assert [len(batch["pixel_values"]) for batch in found] == [8, 2, 8, 2]
    assert all(torch.equal(one[key], other[key]) for one, other in zip(found, expected, strict=True) for key in one)


@pytest.mark.parametrize("is_available", [False, True])
def test_memory_is_pinned_where_there_is_an_accelerator(rows, processor, monkeypatch, is_available):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: is_available)
    assert make(rows, processor)._options["pin_memory"] == is_available


@pytest.mark.gpu
@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_on_a_machine_with_a_gpu_are_pinned(rows, processor, num_workers):
    batch = next(make(rows, processor, num_workers=num_workers).batches(0))
    assert all(tensor.is_pinned() for tensor in batch.values())
