"""How often images are decoded: by stages that need captions alone, not at all, and by a stream once."""

import dataclasses

import pytest
from tiny_sources import damaged, sharegpt4v, webdataset

import data.images
from data.captions import CaptionPolicy, build_captions
from data.pairs import caption_columns, load_pairs
from data.sources import DataArguments
from training.loader import PairLoader


@pytest.fixture
def decoded(monkeypatch):
    """What every image was read from, from now on."""
    read, found = data.images.decode_image, []

    def record(value, *others):
        found.append(value)
        return read(value, *others)

    for reader in ("data.images", "data.pairs", "training.loader"):
        monkeypatch.setattr(f"{reader}.decode_image", record)
    return found


def test_a_stream_reads_each_image_once_an_epoch(tmp_path, decoded, processor):
    arguments = DataArguments(**webdataset(tmp_path), streaming=True)
    loader = PairLoader(load_pairs(arguments), processor, arguments, batch_size=8)
    loader.report_cut_captions()
    stream = loader.batches(0)
    for _ in range(3):
        next(stream)
    assert len(decoded) == 3 * 8


def test_loaded_pairs_are_looked_at_once_and_read_once_an_epoch(tmp_path, decoded, processor):
    arguments = DataArguments(**sharegpt4v(tmp_path))
    loader = PairLoader(load_pairs(arguments), processor, arguments, batch_size=8)
    loader.report_cut_captions()
    assert len(decoded) == 8
    stream = loader.batches(0)
    for _ in range(3):
        next(stream)
    assert len(decoded) == 8 + 3 * 8


def test_captions_are_made_without_images(tmp_path, decoded, processor):
    arguments = DataArguments(**damaged(tmp_path, 0.5))
    policies = [CaptionPolicy(policy="full", column="caption")]
    assert len(build_captions(caption_columns(arguments, {"caption"}), policies, processor.tokenizer, seed=0)) == 200
    assert decoded == []


def test_pairs_without_images_are_all_that_have_a_caption(tmp_path, decoded):
    arguments = DataArguments(**damaged(tmp_path, 0.02), max_unreadable=0.05)
    rows = load_pairs(arguments, images=False)
    assert len(rows) == 199 and decoded == []  # three images cannot be read, a caption is empty
    assert len(load_pairs(arguments)) == 196 and len(decoded) == 199
    with pytest.raises(ValueError, match="1 of 200 pairs .*: its caption is empty. More than max_unreadable = 0%"):
        load_pairs(dataclasses.replace(arguments, max_unreadable=0.0), images=False)
