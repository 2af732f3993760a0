"""Sources that are damaged, contradictory or dangerous end in one line that names them."""

import itertools
import json
import os
import subprocess
import tarfile
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
from tiny_sources import images_and_texts, png, rows, write_shard

from data.pairs import load_pairs
from data.sources import DataArguments
from data.worlds import build_processor
from training.loader import PairLoader

STREAMING = pytest.mark.parametrize("streaming", [False, True], ids=["loaded", "streamed"])


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """A busy machine may need more than ten seconds to find the file that cannot be read."""
    monkeypatch.setattr("data.sources.SEARCH_SECONDS", 300)


@pytest.fixture(scope="module")
def processor():
    return build_processor("symbols", 16, 16)


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


TAR = {"image_column": "png", "caption_column": "txt"}


def without_its_end(shard, header):
    return shard[: header.offset]


def within_a_header(shard, header):
    return shard[: header.offset + 200]


def within_a_file(shard, header):
    return shard[: header.offset_data + 10]


def no_archive(shard, header):
    return b"this is no archive"


def one_byte_of_a_header(shard, header):
    return shard[: header.offset] + b"\xff" + shard[header.offset + 1 :]


def zeros(shard, header):
    return shard[: header.offset] + bytes(2 * len(shard))


CUT = [without_its_end, within_a_header, within_a_file, no_archive]


def three_shards(folder):
    for number in range(3):
        write_shard(folder / f"{number}.tar", images_and_texts(range(8 * number, 8 * number + 8)))
    return folder / "1.tar"


@pytest.mark.parametrize(
    ("damage", "streaming"),
    [*((damage, True) for damage in CUT), *((damage, False) for damage in [*CUT, one_byte_of_a_header, zeros])],
)
def test_a_shard_that_is_damaged(tmp_path, processor, streaming, damage):
    """Readers of tars take most of it for the end of the shard, and say nothing."""
    shard = three_shards(tmp_path)
    with tarfile.open(shard) as tar:
        header = tar.getmembers()[4]
    shard.write_bytes(damage(shard.read_bytes(), header))
    for _ in range(2):  # nothing was kept
        assert error_of(processor, tmp_path, streaming, **TAR).startswith(f"{shard} is no tar, or is cut")
    pattern = f"{tmp_path}/[01].tar"
    assert error_of(processor, pattern, streaming, **TAR).startswith(f"{pattern} cannot be read: {shard} is no tar")


@STREAMING
@pytest.mark.parametrize("how", ["--format=gnu", "--format=pax", "--record-size=512", "-z"])
def test_a_shard_of_another_program_is_whole(tmp_path, processor, streaming, how):
    three_shards(tmp_path)
    (tmp_path / "files").mkdir()
    with tarfile.open(tmp_path / "1.tar") as tar:
        tar.extractall(tmp_path / "files", filter="data")
    names = sorted(os.listdir(tmp_path / "files"))
    subprocess.run(["tar", "-cf", tmp_path / "1.tar", how, "-C", tmp_path / "files", *names], check=True)
    assert len(list(load_pairs(DataArguments(source=str(tmp_path), streaming=streaming, **TAR)))) == 24


@STREAMING
def test_a_text_that_is_not_utf8(tmp_path, processor, streaming):
    write_shard(tmp_path / "0.tar", images_and_texts(range(8)))
    write_shard(tmp_path / "1.tar", [*images_and_texts(range(10, 18)), ("20.png", png()), ("20.txt", b"caf\xe9")])
    message = error_of(processor, tmp_path, streaming, **TAR)
    assert f"because of {tmp_path / '1.tar'}: UnicodeDecodeError: 'utf-8'" in message


@STREAMING
def test_a_sample_without_its_caption_is_skipped(tmp_path, processor, streaming, caplog):
    write_shard(tmp_path / "0.tar", [*images_and_texts(range(10, 30)), ("3.png", png())])
    read(processor, tmp_path, streaming, max_unreadable=0.1, num_workers=0, **TAR)  # what workers log is not captured
    assert "3.png" in caplog.text and "its caption is empty" in caplog.text


@STREAMING
@pytest.mark.parametrize(
    ("last", "message"),
    [
        (rows(["a"]).add_column("number", [1]).rename_column("caption", "text"), "has no column caption, but"),
        (rows(["a"]), "has no column number, but"),
        (rows(["a"]).add_column("number", [1]).add_column("more", [1]), "has no column more, but"),
        (rows([3]).add_column("number", [1]), "column caption is number in "),
        (rows([["a"]]).add_column("number", [1]), "column caption is list in "),
        (rows(["a"]).add_column("number", ["1"]), "column number is string in "),
    ],
    ids=["renamed", "missing", "more", "number", "list", "other column"],
)
def test_parquet_files_that_do_not_fit_together(tmp_path, processor, streaming, last, message):
    for number in range(2):
        rows(["a caption"] * 8, 10 * number).add_column("number", range(8)).to_parquet(tmp_path / f"{number}.parquet")
    last.to_parquet(tmp_path / "2.parquet")
    found = error_of(processor, tmp_path, streaming)
    assert message in found and str(tmp_path / "2.parquet") in found


@STREAMING
def test_parquet_files_that_do_fit_together(tmp_path, processor, streaming):
    rows(["a caption"] * 4).add_column("number", range(4)).to_parquet(tmp_path / "0.parquet")
    rows(["a caption"] * 4, 4).add_column("number", np.arange(4.0)).to_parquet(tmp_path / "1.parquet")
    rows(["a caption"] * 4, 8).add_column("number", [None] * 4).to_parquet(tmp_path / "2.parquet")
    read(processor, tmp_path, streaming)
    assert (
        len({row["image"]["bytes"] for row in load_pairs(DataArguments(source=str(tmp_path), streaming=streaming))})
        == 12
    )


@STREAMING
@pytest.mark.parametrize("damage", ["text", "cut"])
def test_a_parquet_file_that_is_damaged(tmp_path, processor, streaming, damage):
    for number in range(2):
        rows(["a caption"] * 8, 10 * number).to_parquet(tmp_path / f"{number}.parquet")
    whole = (tmp_path / "1.parquet").read_bytes()
    (tmp_path / "1.parquet").write_bytes(b"no parquet" if damage == "text" else whole[:-50])
    assert f"{tmp_path / '1.parquet'} is no parquet file or is damaged" in error_of(processor, tmp_path, streaming)


def test_no_file_is_looked_for_after_an_error_that_names_it(tmp_path, processor):
    for number in range(2):
        rows(["a caption"] * 8, 10 * number).to_parquet(tmp_path / f"{number}.parquet")
    (tmp_path / "1.parquet").write_bytes(b"no parquet")
    pattern = tmp_path / "*.parquet"
    message = error_of(processor, pattern, False)
    assert message.startswith(f"{pattern} cannot be read: {tmp_path / '1.parquet'} is no parquet file or is damaged")


def test_a_file_that_cannot_be_read_is_not_looked_for_longer_than_is_set(tmp_path, processor, monkeypatch):
    """By a clock that goes three seconds at every look, the last file is not reached."""
    for number in range(5):
        write_shard(tmp_path / f"{number}.tar", images_and_texts(range(10 * number, 10 * number + 2)))
    write_shard(tmp_path / "5.tar", [*images_and_texts(range(50, 57)), ("60.png", png()), ("60.txt", b"caf\xe9")])
    monkeypatch.setattr("data.sources.SEARCH_SECONDS", 10)
    ticks = itertools.count(0, 3)
    monkeypatch.setattr("data.sources.time", SimpleNamespace(monotonic=lambda: next(ticks)))
    assert error_of(processor, tmp_path, False, **TAR).startswith(f"{tmp_path} cannot be read: Unicode")


@STREAMING
def test_a_page_of_a_parquet_file_that_is_damaged(tmp_path, processor, streaming):
    for number in range(2):
        rows(["a caption"] * 8, 10 * number).to_parquet(tmp_path / f"{number}.parquet")
    whole = bytearray((tmp_path / "1.parquet").read_bytes())
    whole[4:400] = bytes(396)  # the footer is whole
    (tmp_path / "1.parquet").write_bytes(whole)
    assert f"cannot be read because of {tmp_path / '1.parquet'}: " in error_of(processor, tmp_path, streaming)


@STREAMING
def test_a_saved_dataset_that_is_damaged(tmp_path, processor, streaming):
    rows(["a caption"] * 8).save_to_disk(tmp_path / "x")
    (file,) = (tmp_path / "x").glob("*.arrow")
    file.write_bytes(file.read_bytes()[:100])
    assert f"{tmp_path / 'x'} cannot be read because of {file}: Arrow" in error_of(processor, tmp_path / "x", streaming)
    (tmp_path / "x" / "state.json").write_text("{")
    assert "JSONDecodeError" in error_of(processor, tmp_path / "x", streaming)


def image_folder(folder, metadata):
    folder.mkdir()
    for number in range(2):
        (folder / f"{number}.png").write_bytes(png(number))
    (folder / "metadata.jsonl").write_text(metadata)
    return folder


@STREAMING
@pytest.mark.parametrize(
    "metadata",
    [
        "not JSON",
        '{"file_name": "0.png", "caption": "a"}\n{"file_name": "1.png", "cap',
        '{"caption": "a"}\n{"caption": "b"}',
        '{"file_name": 3, "caption": "a"}',
        '{"file_name": "0.png", "caption": "a"}\n{"file_name": "1.png", "caption": 5}',
        "[]",
        "null",
        "",
    ],
)
def test_metadata_that_is_damaged(tmp_path, processor, streaming, metadata):
    folder = image_folder(tmp_path / "x", metadata)
    assert str(folder) in error_of(processor, folder, streaming)


@STREAMING
@pytest.mark.parametrize("name", ["../secret.png", "sub/../../secret.png", "/secret.png", "file:///secret.png"])
def test_metadata_cannot_name_files_outside_of_its_folder(tmp_path, processor, streaming, name):
    (tmp_path / "secret.png").write_bytes(png())
    name = name.replace("/secret.png", str(tmp_path / "secret.png")) if name[0] in "/f" else name
    entries = [{"file_name": "0.png", "caption": "a"}, {"file_name": name, "caption": "b"}]
    folder = image_folder(tmp_path / "x", "\n".join(map(json.dumps, entries)))
    message = error_of(processor, folder, streaming)
    assert f"{folder} cannot be read because of {folder / 'metadata.jsonl'}: Invalid metadata file_name" in message


@pytest.mark.parametrize(
    "content", ["", "{", "{}", "3", '[{"image": 3, "conversations": [{"from": "gpt", "value": "a"}]}]']
)
def test_a_sharegpt4v_file_that_is_damaged(tmp_path, processor, content):
    (tmp_path / "x.json").write_text(content)
    assert str(tmp_path / "x.json") in error_of(processor, tmp_path / "x.json", False)


@STREAMING
def test_an_empty_folder(tmp_path, processor, streaming):
    assert str(tmp_path) in error_of(processor, tmp_path, streaming)


def test_a_file_of_another_kind(tmp_path, processor):
    rows(["a caption"])["image"][0].save(tmp_path / "x.png")
    error = error_of(processor, tmp_path / "x.png", False)
    assert "x.png is a file that holds no pairs: name a folder, a dataset on the Hub, or files that end in .t" in error


def test_no_such_folder(tmp_path, processor):
    assert "nowhere" in error_of(processor, tmp_path / "nowhere", False)
    assert "user/nowhere" in error_of(processor, "user/nowhere", False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": ""}, "source is empty"),
        ({"source": "  "}, "source is empty"),
        ({"source": "x", "image_column": "caption"}, "the column caption cannot hold both the images and"),
        ({"source": "symbols"}, "num_samples"),
        ({"source": "x", "streaming": True, "in_memory": True}, "streaming"),
    ],
)
def test_arguments_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        DataArguments(**settings)


def test_files_beside_those_that_are_read_do_not_matter(tmp_path, processor):
    write_shard(tmp_path / "0.tar", images_and_texts(range(4)))
    for name in ("test.json", "x.md", "broken.parquet"):
        (tmp_path / name).write_text("something else")
    assert len(os.listdir(tmp_path)) == 4
    read(processor, tmp_path, False, **TAR)
    assert len(load_pairs(DataArguments(source=str(tmp_path), **TAR))) == 4


@pytest.mark.parametrize("name", ["v[12]", "run*", "[a]", "q?", "{b,c}"])
def test_the_name_of_a_folder_is_no_pattern(tmp_path, name):
    for folder in (name, "v1", "v2", "run_old", "qq", "a"):
        (tmp_path / folder).mkdir()
        rows([f"of {folder}"] * 3).to_parquet(str(tmp_path / folder / "0.parquet"))
    for streaming in (False, True):
        pairs = load_pairs(DataArguments(source=str(tmp_path / name), streaming=streaming))
        assert [pair["caption"] for pair in pairs] == [f"of {name}"] * 3


def test_a_folder_whose_name_cannot_be_read(tmp_path, processor):
    (tmp_path / "a::b").mkdir()
    (tmp_path / "a::b" / "0.parquet").touch()
    assert f"{tmp_path / 'a::b'}: rename" in error_of(processor, tmp_path / "a::b", False)


@STREAMING
@pytest.mark.parametrize(
    "files",
    [["train/0.parquet", "test/train-style/0.parquet"], ["train-0.parquet", "test-train-overlap.parquet"]],
    ids=["folders", "files"],
)
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_file_of_two_splits_is_refused(tmp_path, processor, streaming, files, split):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        rows(["a caption"] * 3).to_parquet(str(tmp_path / name))
    message = error_of(processor, tmp_path, streaming, split=split)
    assert files[1] in message and "split train" in message and "split test" in message


def test_a_class_called_as_a_split_is_refused(tmp_path):
    for name in ("train/bus", "train/train", "test/bus", "test/train"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "0.png").write_bytes(png())
    with pytest.raises(ValueError, match=r"test/train/0.png is in the split test and in the split train"):
        load_pairs(DataArguments(source=str(tmp_path), split="test", caption_column="label"))


def test_notes_of_two_splits_do_not_matter(tmp_path):
    for name in ("train", "test"):
        image_folder(tmp_path / name, json.dumps({"file_name": "0.png", "caption": name}))
    (tmp_path / "test-train.txt").write_text("notes")
    assert load_pairs(DataArguments(source=str(tmp_path), split="test"))["caption"] == ["test"]


def set_back(path):
    os.utime(path, (1e9, 1e9))


def test_rows_are_read_anew_from_a_file_that_kept_its_time(tmp_path):
    for word in ("red", "new"):
        rows([word] * 3).to_parquet(str(tmp_path / "0.parquet"))
        set_back(tmp_path / "0.parquet")
        assert load_pairs(DataArguments(source=str(tmp_path)))["caption"] == [word] * 3


@pytest.mark.parametrize("column", ["texts", "paths"])
def test_images_that_rows_only_name_are_looked_at_again_when_they_change(tmp_path, column):
    (tmp_path / "images").mkdir()
    for number in range(4):
        (tmp_path / "images" / f"{number}.png").write_bytes(png(number))
    names = [f"{number}.png" for number in range(4)]
    images = names if column == "texts" else [{"bytes": None, "path": name} for name in names]
    table = datasets.Dataset.from_dict({"image": images, "caption": names})
    (tmp_path / "rows").mkdir()
    table.to_parquet(str(tmp_path / "rows" / "0.parquet"))
    arguments = DataArguments(source=str(tmp_path / "rows"), image_root=str(tmp_path / "images"), max_unreadable=0.5)
    image = tmp_path / "images" / "1.png"
    for content, number in ((png(1), 4), (b"broken", 3), (png(1), 4)):
        image.write_bytes(content)
        set_back(image)
        assert len(load_pairs(arguments)) == number
    image.unlink()
    assert len(load_pairs(arguments)) == 3


def test_a_dataset_that_was_saved_alone_has_no_slices(tmp_path):
    datasets.Dataset.from_dict({"image": ["a.png"] * 4, "caption": ["a"] * 4}).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"saved as one split: it has no test\[:2\]"):
        load_pairs(DataArguments(source=str(tmp_path / "saved"), split="test[:2]"))
