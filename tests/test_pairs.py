"""Pairs from every kind of source, and what cannot be read."""

import dataclasses

import datasets
import numpy as np
import pytest
from tiny_sources import CAPTIONS, SOURCES, damaged, images_and_texts, parquet, picture, sharegpt4v, write_shard

from data import symbols
from data.images import decode_image
from data.pairs import load_pairs, select_columns
from data.sources import DataArguments


@pytest.mark.parametrize("streaming", [False, True], ids=["loaded", "streamed"])
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)
def test_sources(tmp_path, source, streaming):
    arguments = DataArguments(**source(tmp_path), streaming=streaming)
    rows = list(load_pairs(arguments))
    assert sorted(row["caption"] for row in rows) == sorted(CAPTIONS)
    for row in rows:
        assert set(row) == {"image", "caption"}
        number = CAPTIONS.index(row["caption"])
        assert np.array_equal(decode_image(row["image"], arguments.image_root), picture(number))


def test_num_samples(tmp_path):
    assert list(load_pairs(DataArguments(**sharegpt4v(tmp_path), num_samples=3))["caption"]) == CAPTIONS[:3]


def test_symbols():
    rows = load_pairs(DataArguments(source="symbols", captions="detailed", kinds="half 2", num_samples=20))
    assert len(rows) == 20
    assert set(rows["kind"]) <= set(symbols.KIND_SETS["half 2"])


def test_a_few_unreadable_pairs_are_counted_and_skipped(tmp_path, caplog):
    rows = load_pairs(DataArguments(**damaged(tmp_path, 0.02), max_unreadable=0.05))
    assert len(rows) == 196
    assert "4 of 200 pairs" in caplog.text and "pair 10 (cut.png)" in caplog.text and "skipped" in caplog.text


@pytest.mark.parametrize("share", [0.02, 0.9])
def test_many_unreadable_pairs_are_an_error(tmp_path, share):
    with pytest.raises(ValueError, match=r"pair \d+ \(.*More than max_unreadable = 1%"):
        load_pairs(DataArguments(**damaged(tmp_path, share)))


def test_missing_column(tmp_path):
    source = parquet(tmp_path) | {"caption_column": "text"}
    with pytest.raises(ValueError, match="no column 'text'; its columns are 'picture', 'caption'"):
        load_pairs(DataArguments(**source))


@pytest.mark.parametrize("source", ["nowhere.json", "nowhere-*.tar", "nowhere.parquet"])
def test_missing_files(tmp_path, source):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_pairs(DataArguments(source=str(tmp_path / source)))


def test_captions_that_are_no_texts(tmp_path):
    table = {"image": [picture(0)], "caption": [5]}
    datasets.Dataset.from_dict(table).cast_column("image", datasets.Image()).save_to_disk(tmp_path / "x")
    for lines in (False, True):
        with pytest.raises(ValueError, match="its caption is no text but 5"):
            load_pairs(DataArguments(source=str(tmp_path / "x"), captions_per_line=lines))


@pytest.mark.parametrize("streaming", [False, True], ids=["loaded", "streamed"])
def test_captions_one_a_line(tmp_path, streaming):
    """As in the retrieval shards of CLIP_benchmark."""
    cells = ["a dog\na brown dog\n", "a cat", "\n a bird \r\n\nit flies", " \n"]
    write_shard(tmp_path / "x.tar", images_and_texts(range(4), cells))
    columns = {"image_column": "png", "caption_column": "txt", "max_unreadable": 0.5, "streaming": streaming}
    arguments = DataArguments(source=str(tmp_path / "x.tar"), captions_per_line=True, **columns)
    found = [row["caption"] for row in load_pairs(arguments)]
    assert found[:3] == [["a dog", "a brown dog"], ["a cat"], ["a bird", "it flies"]]
    assert found[3:] == ([[]] if streaming else [])  # a stream is sorted out as it is read
    whole = [row["caption"] for row in load_pairs(dataclasses.replace(arguments, captions_per_line=False))]
    assert whole[:3] == cells[:3]


def test_a_stream_of_unknown_features_tells_its_columns_with_its_first_row():
    rows = datasets.IterableDataset.from_generator(lambda: iter([{"picture": "a.png", "text": "a", "more": 1}]))
    arguments = DataArguments(source="x", image_column="picture", caption_column="text", streaming=True)
    assert list(select_columns(rows, arguments)) == [{"image": "a.png", "caption": "a"}]
    with pytest.raises(ValueError, match="x has no column 'txt'; its columns are 'picture', 'text', 'more'"):
        select_columns(rows, dataclasses.replace(arguments, caption_column="txt"))
