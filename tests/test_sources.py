"""Pairs from every kind of source; sources that are damaged, contradictory or dangerous end in one line that names
them."""

import dataclasses
import os
import subprocess

import datasets
import pytest
import tiny_sources
from tiny_sources import damaged, images_and_texts, png, rows, saved_pairs, write_shard

from data.pairs import _reading_code, load_pairs, present_captions, select_columns
from data.sources import DataArguments
from training.loader import PairLoader

STREAMING = pytest.mark.parametrize("streaming", [False, True], ids=["loaded", "streamed"])
TAR = {"image_column": "png", "caption_column": "txt"}


def test_pairs_without_images_are_all_that_have_a_caption(tmp_path, monkeypatch):
    arguments = DataArguments(**damaged(tmp_path, 0.02), max_unreadable=0.05)
    monkeypatch.setattr("data.pairs.decode_image", None)  # calling it would fail
    assert len(load_pairs(arguments, images=False)) == 199  # three images cannot be read, a caption is empty
    with pytest.raises(ValueError, match="1 of 200 pairs .*: its caption is empty. More than max_unreadable = 0%"):
        load_pairs(dataclasses.replace(arguments, max_unreadable=0.0), images=False)


def test_images_are_looked_at_again_with_another_pillow(tmp_path, monkeypatch):
    """Or with other code that reads them; else what can be read is known from before."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    arguments, numbers = DataArguments(**saved_pairs(tmp_path / "rows", ["a dog", "a cat"])), []
    for version in ("13.0", "13.0", "0.1"):
        monkeypatch.setattr("PIL.__version__", version)
        _reading_code.cache_clear()
        assert len(load_pairs(arguments)) == 2
        numbers.append(len(list((tmp_path / "cache" / "looks").glob("*.arrow"))))
    _reading_code.cache_clear()
    assert numbers == [1, 1, 2]


@STREAMING
def test_captions_one_a_line(tmp_path, streaming):
    """As in the retrieval shards of CLIP_benchmark."""
    cells = ["a dog\na brown dog\n", "a cat", "\n a bird \r\n\nit flies", " \n"]
    write_shard(tmp_path / "x.tar", images_and_texts(range(4), cells))
    arguments = DataArguments(source=str(tmp_path / "x.tar"), **TAR, max_unreadable=0.5, streaming=streaming)
    found = [row["caption"] for row in load_pairs(dataclasses.replace(arguments, captions_per_line=True))]
    assert found[:3] == [["a dog", "a brown dog"], ["a cat"], ["a bird", "it flies"]]
    assert found[3:] == ([[]] if streaming else [])  # a stream is sorted out as it is read
    assert [row["caption"] for row in load_pairs(arguments)][:3] == cells[:3]


def test_a_stream_of_unknown_features_tells_its_columns_with_its_first_row():
    found = datasets.IterableDataset.from_generator(lambda: iter([{"picture": "a.png", "text": "a", "more": 1}]))
    arguments = DataArguments(source="x", image_column="picture", caption_column="text", streaming=True)
    assert list(select_columns(found, arguments)) == [{"image": "a.png", "caption": "a"}]
    with pytest.raises(ValueError, match="x has no column 'txt'; its columns are 'picture', 'text', 'more'"):
        select_columns(found, dataclasses.replace(arguments, caption_column="txt"))


@STREAMING
@pytest.mark.parametrize("how", ["--format=gnu", "--format=pax", "--record-size=512", "-z"])
def test_a_shard_of_another_program_is_whole(tmp_path, streaming, how):
    (tmp_path / "files").mkdir()
    for name, content in images_and_texts(range(8)):
        (tmp_path / "files" / name).write_bytes(content)
    names = sorted(os.listdir(tmp_path / "files"))
    subprocess.run(["tar", "-cf", tmp_path / "0.tar", how, "-C", tmp_path / "files", *names], check=True)
    assert len(list(load_pairs(DataArguments(source=str(tmp_path), streaming=streaming, **TAR)))) == 8


@pytest.mark.parametrize("name", ["v[12]", "run*", "{b,c}"])
def test_the_name_of_a_folder_is_no_pattern(tmp_path, name):
    for folder in (name, "v1", "v2", "run_old", "qq", "a"):
        (tmp_path / folder).mkdir()
        rows([f"of {folder}"] * 3).to_parquet(str(tmp_path / folder / "0.parquet"))
    for streaming in (False, True):
        pairs = load_pairs(DataArguments(source=str(tmp_path / name), streaming=streaming))
        assert [pair["caption"] for pair in pairs] == [f"of {name}"] * 3


def test_rows_are_read_anew_from_a_file_that_kept_its_time(tmp_path):
    for word in ("red", "new"):
        rows([word] * 3).to_parquet(str(tmp_path / "0.parquet"))
        os.utime(tmp_path / "0.parquet", (1e9, 1e9))
        assert load_pairs(DataArguments(source=str(tmp_path)))["caption"] == [word] * 3


@pytest.mark.parametrize("column", ["texts", "paths"])
def test_images_that_rows_only_name_are_looked_at_again_when_they_change(tmp_path, column):
    names = tiny_sources.write_pictures(tmp_path / "images")
    images = names if column == "texts" else [{"bytes": None, "path": name} for name in names]
    (tmp_path / "rows").mkdir()
    datasets.Dataset.from_dict({"image": images, "caption": names}).to_parquet(str(tmp_path / "rows" / "0.parquet"))
    arguments = DataArguments(source=str(tmp_path / "rows"), image_root=str(tmp_path / "images"), max_unreadable=0.5)
    image = tmp_path / "images" / "1.png"
    for content, number in ((png(1), 8), (b"broken", 7), (png(1), 8)):
        image.write_bytes(content)
        os.utime(image, (1e9, 1e9))
        assert len(load_pairs(arguments)) == number
    image.unlink()
    assert len(load_pairs(arguments)) == 7


def read(processor, source, streaming, batches=30, **settings):
    """Everything, as training reads it: loaded, or streamed by two workers."""
    settings = {"num_workers": 2 * streaming, **settings}
    arguments = DataArguments(source=str(source), streaming=streaming, **settings)
    loader = PairLoader(load_pairs(arguments), processor, arguments, 1)
    for _ in zip(range(batches), loader.batches(0), strict=False):
        pass


def error_of(*args, **settings):
    """The message of the error, which is of the kinds that commands turn into one line."""
    with pytest.raises((ValueError, OSError)) as caught:
        read(*args, **settings)
    message = str(caught.value)
    assert "\n" not in message and "Traceback" not in message and "worker process" not in message
    return message


@STREAMING
def test_shards_with_a_text_that_is_not_utf8_and_without_a_caption(tmp_path, processor, streaming, caplog):
    write_shard(tmp_path / "0.tar", [*images_and_texts(range(10, 30)), ("3.png", png())])
    read(processor, tmp_path, streaming, max_unreadable=0.1, num_workers=0, **TAR)  # what workers log is not captured
    assert "3.png" in caplog.text and "its caption is empty" in caplog.text
    write_shard(tmp_path / "1.tar", [*images_and_texts(range(10, 38)), ("40.png", png()), ("40.txt", b"caf\xe9")])
    read(processor, tmp_path, streaming, max_unreadable=0.1, num_workers=0, batches=60, **TAR)
    assert f"the text of {tmp_path / '1.tar'}, 40.txt is missing: 'utf-8' codec can't decode" in caplog.text


@pytest.mark.parametrize("way", [{}, {"streaming": True}, {"indexed": True}], ids=str)
def test_columns_are_those_of_the_whole_source(tmp_path, way):
    """The first six samples have no caption, and one of the others is no text."""
    members = images_and_texts(range(6, 10))
    without = [(f"{number}.png", png()) for number in range(6)]
    write_shard(tmp_path / "0.tar", [*without, *members, ("a.png", png()), ("a.txt", b"caf\xe9")])
    rows = load_pairs(DataArguments(source=str(tmp_path / "0.tar"), max_unreadable=0.9, **TAR, **way))
    assert sum(bool(present_captions(row["caption"])) for row in rows) == 4


def test_what_is_not_there_and_does_not_go_together(tmp_path, processor):
    rows(["a caption"])["image"][0].save(tmp_path / "x.png")
    (tmp_path / "empty").mkdir()
    for source, message in (
        ("x.png", "x.png is a file that holds no pairs: name a folder, a dataset on the Hub, or files that end in .t"),
        ("empty", str(tmp_path / "empty")),
        *((name, name) for name in ("nowhere", "nowhere-*.tar", "nowhere.parquet", "nowhere.json")),
    ):
        assert message in error_of(processor, tmp_path / source, False)
    assert "user/nowhere" in error_of(processor, "user/nowhere", False)
    settings = tiny_sources.parquet(tmp_path) | {"caption_column": "text"}
    with pytest.raises(ValueError, match="no column 'text'; its columns are 'picture', 'caption'"):
        load_pairs(DataArguments(**settings))
    with pytest.raises(ValueError, match="streaming neither goes with"):
        DataArguments(source="x", streaming=True, in_memory=True)


def test_nothing_is_written_beside_the_users_data(tmp_path):
    """What is computed of a dataset of `save_to_disk` is kept elsewhere, also where its images are named."""
    names = tiny_sources.write_pictures(tmp_path / "images")
    pairs = datasets.Dataset.from_dict({"image": names, "caption": [f"{name}\n{name}" for name in names]})
    pairs.save_to_disk(tmp_path / "saved")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    arguments = DataArguments(
        source=str(tmp_path / "saved"), image_root=str(tmp_path / "images"), captions_per_line=True, num_workers=2
    )
    for _ in range(2):
        assert list(load_pairs(arguments)["caption"]) == [[name, name] for name in names]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_cache_that_cannot_be_written_is_not_needed(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "file" / "cache"))
    source = tiny_sources.image_folder(tmp_path)
    assert len(load_pairs(DataArguments(**source))) == 8
