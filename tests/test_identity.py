"""Labels, stages and checkpoints know their data: what is the same, what is not, and what is read again."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tiny_runs
from tiny_runs import ended_by_a_checkpoint
from tiny_sources import CAPTIONS, image_folder, rows, sharegpt4v, write_pictures

from data.identity import data_fingerprint, identity
from data.pairs import load_pairs
from data.sources import DataArguments
from records import digests
from records.digests import file_digests
from training import engine


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of its own."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def layout(kind, folder, first=0):
    """The same eight pairs, in a source of each kind; of another `first`, others under the same names."""
    folder.mkdir(parents=True, exist_ok=True)
    match kind:
        case "folder":
            return image_folder(folder, first)
        case "parquet":
            rows(CAPTIONS, first).to_parquet(folder / "data.parquet")
            return {"source": str(folder / "data.parquet")}
        case "sharegpt4v":
            return sharegpt4v(folder, first)
        case "saved":
            names = [str(folder / "images" / name) for name in write_pictures(folder / "images", first)]
            if not (folder / "saved").exists():
                datasets.Dataset.from_dict({"image": names, "caption": CAPTIONS}).save_to_disk(folder / "saved")
            return {"source": str(folder / "saved")}


KINDS = ["folder", "parquet", "sharegpt4v", "saved"]


@pytest.mark.parametrize("kind", KINDS)
def test_data_are_known_by_names_and_contents(kind, tmp_path, monkeypatch):
    """Other images under the same names are other data; a copy elsewhere is the same, and so is a part of a split."""
    data = DataArguments(**layout(kind, tmp_path / "a"))
    pairs, source = data_fingerprint(load_pairs(data)), identity(data)
    if kind != "saved":
        copy = DataArguments(**(settings := layout(kind, tmp_path / "b")))
        assert (data_fingerprint(load_pairs(copy)), identity(copy)) == (pairs, source)
        monkeypatch.chdir(tmp_path)
        paths = {key: os.path.relpath(settings[key]) for key in ("source", "image_root") if key in settings}
        assert identity(DataArguments(**settings | paths)) == source
    if kind in ("folder", "parquet"):
        for split in ("train[:3]", "train[:2]+train[6:]"):
            assert identity(replace(data, split=split)) == source
            assert 0 < len(load_pairs(replace(data, split=split))) < len(load_pairs(data))
    assert source["files"] == {"folder": 9, "parquet": 1, "sharegpt4v": 9, "saved": 11}[kind]
    layout(kind, tmp_path / "a", first=100)
    assert data_fingerprint(load_pairs(data)) != pairs
    assert identity(data)["files"] == source["files"] and identity(data)["sha256"] != source["sha256"]


@pytest.mark.parametrize(
    "kind", [pyarrow.string(), pyarrow.string_view(), pyarrow.dictionary("int8", "string")], ids=str
)
def test_images_that_rows_name_by_texts_count(kind, tmp_path):
    """As pandas and polars write texts."""
    names = write_pictures(tmp_path / "images")
    table = pyarrow.table({"image": pyarrow.array(names).cast(kind), "caption": ["a caption"] * 8})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    data = DataArguments(source=str(tmp_path / "x.parquet"), image_root=str(tmp_path / "images"))
    before = identity(data)
    write_pictures(tmp_path / "images", first=100)
    assert before["files"] == 9 and identity(data) != before


@pytest.mark.parametrize("kind", ["parquet", "arrow", "saved"])
def test_images_that_rows_name_by_paths_without_bytes_count(kind, tmp_path):
    names = write_pictures(tmp_path / "images")
    named = [{"bytes": None, "path": str(tmp_path / "images" / name)} for name in names]
    image = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}  # an Image would get its bytes
    features = datasets.Features({"image": image, "caption": datasets.Value("string")})
    rows = datasets.Dataset.from_dict({"image": named, "caption": ["a caption"] * 8}, features)
    rows.to_parquet(str(tmp_path / "x.parquet"))
    rows.save_to_disk(tmp_path / "saved")
    sources = {"parquet": "x.parquet", "arrow": "saved/*.arrow", "saved": "saved"}
    data = DataArguments(source=str(tmp_path / sources[kind]))
    before = identity(data)
    write_pictures(tmp_path / "images", first=100)
    assert identity(data) != before
    assert identity(replace(data, image_column="nowhere"))["files"] == {"saved": 3}.get(kind, 1)


def test_a_file_is_read_again_only_where_it_changed(tmp_path, monkeypatch):
    files = [tmp_path / name for name in "abc"]
    for file in files:
        file.write_bytes(b"x" * 100)
        os.utime(file, (1, 1))
    read, original = [], digests.file_digest
    monkeypatch.setattr(digests, "file_digest", lambda path: read.append(Path(path)) or original(path))
    first = file_digests(files)
    assert read == files and len(set(first)) == 1
    assert file_digests(files) == first and read == files
    files[1].write_bytes(b"y" * 100)
    os.utime(files[1], (1, 1))  # as rsync -t leaves it: only the time of the inode tells
    assert file_digests(files)[1] != first[1] and read == [*files, files[1]]
    (tmp_path / "new").write_bytes(b"x")  # its times could stay while it changes
    new = file_digests([tmp_path / "new"])
    (tmp_path / "new").write_bytes(b"y")
    assert file_digests([tmp_path / "new"]) != new


def test_large_files_are_read_whole(tmp_path):
    content = np.random.default_rng(0).integers(0, 256, 40 * 2**20, dtype=np.uint8)
    contents = [content, content[:-1]]
    for changed in (0, 18 * 2**20 + 5, len(content) - 1):
        contents.append(content.copy())
        contents[-1][changed] ^= 1
    different = set()
    for other in contents:
        (tmp_path / "large").write_bytes(other.tobytes())
        different |= set(file_digests([tmp_path / "large"]))
    assert len(different) == 5


@pytest.mark.parametrize("damage", ["a folder", "no database"])
def test_digests_do_not_need_their_cache(damage, tmp_path, cache):
    (tmp_path / "a").write_bytes(b"x")
    expected = file_digests([tmp_path / "a"])
    shutil.rmtree(cache)
    database = cache / "clip_moe_sha256.sqlite"
    (database if damage == "a folder" else cache).mkdir(parents=True)
    if damage == "no database":
        database.write_text("no database " * 1000)
    assert file_digests([tmp_path / "a"]) == expected


@pytest.fixture
def train(tmp_path):
    return lambda data: tiny_runs.train(tmp_path, data=data, max_steps=4, save_steps=2, global_batch_size=4)


@pytest.mark.parametrize("streaming", [False, True], ids=["loaded", "streamed"])
def test_a_finished_stage_knows_its_data(streaming, tmp_path, train, capsys):
    """It stays done where they are carried to or gone, and is refused where they are others."""
    data = layout("parquet", tmp_path / "a") | {"streaming": streaming}
    train(data)
    shutil.copy(data["source"], tmp_path / "copy")
    os.replace(tmp_path / "copy", data["source"])  # other times, another inode
    train(data)
    Path(data["source"]).unlink()
    train(data)
    assert capsys.readouterr().out.count("tuned: done before, skipped") == 2
    layout("parquet", tmp_path / "a", first=100)
    with pytest.raises(ValueError, match=r"tuned was made with other data .* Delete it"):
        train(data)


@pytest.mark.parametrize("text", ["{", '{"_data_files": 3}'])
def test_a_damaged_record_of_a_saved_dataset_is_named(tmp_path, text):
    data = DataArguments(**layout("saved", tmp_path / "a"))
    (tmp_path / "a" / "saved" / "state.json").write_text(text)
    with pytest.raises(ValueError, match="saved cannot be read"):
        identity(data)


def test_data_that_change_while_a_stage_reads_them_or_after_it_was_killed(tmp_path, train, monkeypatch):
    data, original = layout("parquet", tmp_path / "a"), engine.train

    def train_and_change(*args, **kwargs):
        original(*args, **kwargs)
        layout("parquet", tmp_path / "a", first=100)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "train", train_and_change)
        with pytest.raises(ValueError, match=r"data\.parquet changed while the stage read it: put back"):
            train(data)
    assert not (tmp_path / "out" / "tuned").exists()
    layout("parquet", tmp_path / "a")
    train(data)
    manifest = json.loads((tmp_path / "out" / "tuned" / "manifest.json").read_text())
    assert manifest["data"] == identity(DataArguments(**data))
    shutil.rmtree(tmp_path / "out")
    with ended_by_a_checkpoint():
        train(data)
    layout("parquet", tmp_path / "a", first=100)
    with pytest.raises(ValueError, match=r"tuned.partial was made with other data .* Delete it"):
        train(data)


def test_only_the_files_of_the_split_count(tmp_path):
    for split in ("train", "test"):
        (tmp_path / "data" / split).mkdir(parents=True)
        image_folder(tmp_path / "data" / split)
    data = DataArguments(source=str(tmp_path / "data"))
    before = identity(data)
    image_folder(tmp_path / "data" / "test", first=100)
    assert identity(data) == before
    image_folder(tmp_path / "data" / "train", first=100)
    assert identity(data) != before
    for source in ("nobody/nothing", "symbols"):
        assert identity(DataArguments(source=source, num_samples=1)) is None
