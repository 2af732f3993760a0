"""Pairs from every kind of source; sources that are damaged, contradictory or dangerous end in one line that names
them."""

import base64
import dataclasses
import os
import subprocess

import datasets
import numpy as np
import PIL.Image
import pyarrow.parquet
import pytest
import tiny_sources
from tiny_sources import damaged, images_and_texts, png, rows, saved_pairs, write_shard

from clip_moe.data import columns
from clip_moe.data.arguments import DataArguments
from clip_moe.data.columns import select_columns
from clip_moe.data.identity import data_fingerprint, identity, image_digests
from clip_moe.data.images import decode_image
from clip_moe.data.pairs import load_pairs
from clip_moe.data.readable import read_pair
from clip_moe.data.texts import present_captions
from clip_moe.training.loader import PairLoader
from clip_moe.training.samplers import Share

STREAMING = pytest.mark.parametrize("streaming", [False, True], ids=["loaded", "streamed"])
TAR = {"image_column": "png", "caption_column": "txt"}


def test_pairs_without_images_are_all_that_have_a_caption(tmp_path, monkeypatch):
    arguments = DataArguments(**damaged(tmp_path, 0.02), max_unreadable=0.05)
    monkeypatch.setattr("clip_moe.data.readable.decode_image", None)  # calling it would fail
    assert len(load_pairs(arguments, images=False)) == 199  # three images cannot be read, a caption is empty
    with pytest.raises(ValueError, match="1 of 200 pairs .*: its caption is empty. More than max_unreadable = 0%"):
        load_pairs(dataclasses.replace(arguments, max_unreadable=0.0), images=False)


def test_images_are_looked_at_again_with_another_pillow(tmp_path, monkeypatch):
    """Or with other code that reads them; else what can be read is known from before."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    arguments, numbers = DataArguments(**saved_pairs(tmp_path / "rows", ["a dog", "a cat"])), []
    for version in ("13.0", "13.0", "0.1"):
        monkeypatch.setattr("PIL.__version__", version)
        assert len(load_pairs(arguments)) == 2
        numbers.append(len(list((tmp_path / "cache" / "looks").glob("*.arrow"))))
    monkeypatch.setattr(columns, "file_digests", lambda files: ["other code"])
    assert len(load_pairs(arguments)) == 2
    numbers.append(len(list((tmp_path / "cache" / "looks").glob("*.arrow"))))
    assert numbers == [1, 1, 2, 3]


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


PNGS = [png(number) for number in range(4)]
TEXTS = [base64.b64encode(content).decode() for content in PNGS]
COLUMNS = {
    "binary_view": pyarrow.array(PNGS, pyarrow.binary_view()),
    "large_binary": pyarrow.array(PNGS, pyarrow.large_binary()),
    "fixed_size": pyarrow.array([content.ljust(100, b"\0") for content in PNGS], pyarrow.binary(100)),
    "dictionary": pyarrow.array(PNGS).dictionary_encode(),
    "string_view": pyarrow.array([f"{number}.png" for number in range(4)], pyarrow.string_view()),
    "views": pyarrow.array([{"bytes": png} for png in PNGS], pyarrow.struct({"bytes": pyarrow.binary_view()})),
    "structs": pyarrow.array([[{"bytes": content, "path": None}] for content in PNGS]),
    "lists": pyarrow.array([[content] for content in PNGS]),
    "list_of_paths": pyarrow.array([[f"{number}.png"] for number in range(4)]),
    "base64": pyarrow.array(TEXTS),
    "base64_lines": pyarrow.array([f"{text[:40]}\n{text[40:]}" for text in TEXTS]),
    "base64_list": pyarrow.array([[text] for text in TEXTS]),
    "base64_bytes": pyarrow.array([text.encode() for text in TEXTS]),
    "url": pyarrow.array([f"data:image/png;base64,{text}" for text in TEXTS], pyarrow.large_string()),
}


@STREAMING
@pytest.mark.parametrize("kind", [*COLUMNS, "several"])
def test_images_in_columns_of_every_kind(tmp_path, kind, streaming):
    if kind == "fixed_size" and datasets.__version__ < "5.2":
        pytest.skip("datasets 5.0 reads no column of bytes of a fixed size: it says so in one line")
    tiny_sources.write_pictures(tmp_path)
    several = pyarrow.array([[PNGS[0]] * 2] * 4)
    table = pyarrow.table({"image": COLUMNS.get(kind, several), "caption": list("abcd")})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    arguments = DataArguments(
        source=str(tmp_path / "x.parquet"), image_root=str(tmp_path), streaming=streaming, num_samples=4
    )
    if kind == "several":
        problems = [read_pair(row, arguments)[0] for row in load_pairs(arguments)] if streaming else []
        assert problems == ["its image cannot be read: no image, or a list of several"] * 4 * streaming
        with pytest.raises(ValueError, match="4 of 4 pairs .* no image, or a list of several"):
            load_pairs(dataclasses.replace(arguments, streaming=False))
        return
    for number, row in enumerate(load_pairs(arguments)):
        assert np.array_equal(decode_image(row["image"]), tiny_sources.picture(number))
    if not streaming and kind != "string_view":  # base64 is part of the file, and no name
        assert identity(arguments)["files"] == (5 if kind == "list_of_paths" else 1)
        assert len(set(image_digests(load_pairs(arguments)["image"]))) == 4


@pytest.mark.parametrize("name", ["iVBORw0KGgoAAAANSUhEUgAAABAAAAAQ", "_9j_4AAQSkZJRgABAQAAAQABAAD", "BMW8"])
def test_a_path_is_not_base64(tmp_path, name):
    (tmp_path / name).write_bytes(png())
    (tmp_path / "x.csv").write_text(f"image,caption\n{name},a\n")
    arguments = DataArguments(source=str(tmp_path / "x.csv"), image_root=str(tmp_path))
    assert len(load_pairs(arguments)) == 1 and identity(arguments)["files"] == 2


@STREAMING
def test_a_range_of_pixels_is_part_of_the_data(tmp_path, streaming, processor, caplog):
    """Of two pictures of 16 bits that use 10."""
    (tmp_path / "x").mkdir()
    values = np.linspace(0, 1023, 256).reshape(16, 16).astype(np.uint16)
    for number, array in enumerate((values, values.T)):
        PIL.Image.fromarray(array).save(tmp_path / "x" / f"{number}.png")
    (tmp_path / "x" / "metadata.csv").write_text("file_name,caption\n0.png,a\n1.png,b\n")
    plain = DataArguments(source=str(tmp_path / "x"), streaming=streaming)
    ranged = dataclasses.replace(plain, pixel_range=[0, 1023])
    tops = []
    for arguments in (plain, ranged):
        rows = load_pairs(arguments)
        tops.append(max(np.asarray(decode_image(row["image"])).max() for row in rows))
    assert tops == [4, 255]
    if streaming:
        next(PairLoader(load_pairs(plain), processor, plain, Share(2)).batches(0))
        return
    assert "of 2 pictures of more than 8 bits, none has a value above 1023 of 65535" in caplog.text
    assert "set pixel_range, such as [0, 1023]" in caplog.text
    sides = [load_pairs(arguments) for arguments in (plain, ranged)]
    assert len({data_fingerprint(rows) for rows in sides}) == 2
    assert set(image_digests(sides[0]["image"])).isdisjoint(image_digests(sides[1]["image"]))
    caplog.clear()
    load_pairs(dataclasses.replace(plain, pixel_range=[0, 511]))
    assert "2 have values beyond pixel_range, from 0 to 1023, which become black or white" in caplog.text
    sides[1].save_to_disk(tmp_path / "saved")
    rows = load_pairs(DataArguments(source=str(tmp_path / "saved")))
    assert [np.asarray(decode_image(row["image"])).max() for row in rows] == [255, 255]


@pytest.mark.parametrize("streaming", [False, True])
def test_gaps_are_counted(tmp_path, streaming, processor, caplog):
    (tmp_path / "x").mkdir()
    for number, gap in enumerate((np.nan, -9999, 0, 0)):
        array = np.linspace(0, 1, 256, dtype=np.float32).reshape(16, 16)
        array[:8] = gap if gap else array[:8]
        PIL.Image.fromarray(array).save(tmp_path / "x" / f"{number}.tif")
        (tmp_path / "x" / f"{number}.txt").write_text(f"picture {number}")
    arguments = DataArguments(source=str(tmp_path / "x"), streaming=streaming)
    rows = load_pairs(arguments)
    if streaming:
        batches = PairLoader(rows, processor, arguments, Share(4)).batches(0)
        next(batches), next(batches)
    gaps = "x: of 4 pictures of more than 8 bits, 2 have gaps (NaN, infinite or no-data values), on average 50.00% of"
    assert caplog.text.count(gaps) == 1


@pytest.mark.parametrize("value", [[1, 0], [0, 0], [0], [0, float("nan")], [0, float("inf")], [0, 1, 2]])
def test_ranges_that_are_none(value):
    with pytest.raises(ValueError, match="pixel_range"):
        DataArguments(source="x", pixel_range=value)


def read(processor, source, streaming, batches=30, **settings):
    """Everything, as training reads it: loaded, or streamed by two workers."""
    settings = {"num_workers": 2 * streaming, **settings}
    arguments = DataArguments(source=str(source), streaming=streaming, **settings)
    loader = PairLoader(load_pairs(arguments), processor, arguments, Share(1))
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
    assert f"the text of {tmp_path / '1.tar'}, 40.txt is skipped: 'utf-8' codec can't decode" in caplog.text


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
        ("x.png", "x.png is not a supported file: name a folder, a dataset on the Hub, or files that end in .t"),
        ("empty", str(tmp_path / "empty")),
        *((name, name) for name in ("nowhere", "nowhere-*.tar", "nowhere.parquet", "nowhere.json")),
    ):
        assert message in error_of(processor, tmp_path / source, False)
    assert "user/nowhere" in error_of(processor, "user/nowhere", False)
    settings = tiny_sources.parquet(tmp_path) | {"caption_column": "text"}
    with pytest.raises(ValueError, match="no column 'text'; its columns are 'picture', 'caption'"):
        load_pairs(DataArguments(**settings))
    with pytest.raises(ValueError, match="streaming excludes"):
        DataArguments(source="x", streaming=True, in_memory=True)


def test_nothing_is_written_beside_the_users_data(tmp_path):
    """Results computed for a dataset of `save_to_disk` are kept elsewhere, also where its images are named."""
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
