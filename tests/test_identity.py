"""Labels, stages and checkpoints know their data: what is the same, what is not, and what is read again."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import datasets
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
from records.provenance import model_fingerprint
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
    assert kind == "sharegpt4v" or identity(replace(data, split="train[:3]")) == source
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


def test_images_of_rows_that_are_not_used_do_not_count(tmp_path):
    data = DataArguments(**layout("sharegpt4v", tmp_path), skip=1, num_samples=3)
    before = identity(data)
    for number, is_same in ((0, True), (4, True), (3, False)):
        (tmp_path / "images" / f"{number}.png").write_bytes(b"another")
        assert (identity(data) == before) is is_same and before["files"] == 4


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


def test_all_of_a_folder_counts_but_what_is_written_beside_the_data(tmp_path):
    data = DataArguments(**image_folder(tmp_path))
    before, folder = identity(data), tmp_path / "folder"
    for name in ("cache-1.arrow", "manifest.json", ".hidden"):
        (folder / name).write_text("x")
    assert identity(data) == before
    (folder / "test").mkdir()
    image_folder(folder / "test")
    assert identity(data)["files"] == 2 * before["files"]


def test_data_that_settings_name_have_no_identity():
    for source in ("nobody/nothing", "symbols"):
        assert identity(DataArguments(source=source, num_samples=1)) is None


def test_a_run_does_not_write_into_its_data(tmp_path, train):
    rows(CAPTIONS).to_parquet(tmp_path / "data.parquet")
    with pytest.raises(ValueError, match="out lies inside .*, all of whose files are the data: choose another"):
        train({"source": str(tmp_path)})


def test_names_of_files_count_in_a_model(tmp_path):
    digests = set()
    for name in ("model", "adapter_model"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.safetensors").write_bytes(b"weights")
        digests.add(model_fingerprint(tmp_path / name))
    assert len(digests) == 2
