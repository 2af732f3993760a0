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

from clip_moe.data.arguments import DataArguments
from clip_moe.data.identity import data_fingerprint, identity
from clip_moe.data.pairs import load_pairs
from clip_moe.engine import digests
from clip_moe.engine.digests import file_digests, short_digest
from clip_moe.engine.provenance import Record, model_fingerprint
from clip_moe.training import loop


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


PATHS = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
# Type of the column, None in a table of JSON -> an image by its name
COLUMNS = [
    *((kind, str) for kind in (pyarrow.string(), pyarrow.string_view(), pyarrow.dictionary("int8", "string"))),
    *((kind, lambda name: [name]) for kind in (pyarrow.list_(pyarrow.string()), None)),
    (pyarrow.list_(PATHS), lambda name: [{"path": name}]),
    (None, lambda name: {"path": name, "bytes": None}),
]


@pytest.mark.parametrize(("kind", "image_of"), COLUMNS)
def test_images_that_rows_name_by_texts_count(kind, image_of, tmp_path):
    """As pandas and polars write texts, and in lists of one."""
    images, source = list(map(image_of, write_pictures(tmp_path / "images"))), tmp_path / "x.parquet"
    if kind is None:
        source = tmp_path / "x.jsonl"
        source.write_text("\n".join(json.dumps({"image": image, "caption": "a caption"}) for image in images))
    else:
        column = pyarrow.array(images).cast(kind)
        pyarrow.parquet.write_table(pyarrow.table({"image": column, "caption": ["a caption"] * 8}), source)
    data = DataArguments(source=str(source), image_root=str(tmp_path / "images"))
    assert len(load_pairs(data)) == 8
    before = identity(data)
    write_pictures(tmp_path / "images", first=100)
    assert before["files"] == 9 and identity(data) != before


# Kind of rows -> the pattern of their files
BY_PATHS = {"parquet": "x.parquet", "parquet folder": "", "arrow": "*.arrow", "saved": ""}


def named_by_paths(kind, folder, with_bytes=()):
    """Rows in a new folder whose images, in `images` beside it, are paths beside empty bytes, as `save_to_disk` and
    pandas write them; those of `with_bytes` have bytes."""
    value = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}  # an Image would get its bytes
    features = datasets.Features({"image": value, "caption": datasets.Value("string")})
    paths = [folder.parent / "images" / name for name in write_pictures(folder.parent / "images")]
    images = [{"bytes": None, "path": str(path)} for path in paths]
    for number in with_bytes:
        images[number]["bytes"] = paths[number].read_bytes()
    rows = datasets.Dataset.from_dict({"image": images, "caption": CAPTIONS}, features)
    if kind.startswith("parquet"):
        folder.mkdir()
        rows.to_parquet(folder / "x.parquet", batch_size=3)
    else:
        rows.save_to_disk(folder)
    return DataArguments(source=str(folder / BY_PATHS[kind]))


@pytest.mark.parametrize("kind", BY_PATHS)
@pytest.mark.parametrize("with_bytes", [(), range(7)], ids=["all named", "the last named"])
def test_images_that_rows_name_by_paths_without_bytes_count(kind, with_bytes, tmp_path):
    """Changed in place, with their sizes and times kept; a copy of the images elsewhere is the same data."""
    data = named_by_paths(kind, tmp_path / "rows", with_bytes)
    before, images = identity(data), sorted((tmp_path / "images").iterdir())
    assert before["files"] == len(images) - len(with_bytes) + {"saved": 3}.get(kind, 1)
    (tmp_path / "images" / "unnamed.png").write_bytes(images[0].read_bytes())
    assert identity(data) == before
    stat, content = images[-1].stat(), bytearray(images[-1].read_bytes())
    content[-20] ^= 1
    images[-1].write_bytes(content)
    os.utime(images[-1], ns=(stat.st_atime_ns, stat.st_mtime_ns))
    changed = identity(data)
    assert changed["files"] == before["files"] and changed != before
    images[0].write_bytes(images[1].read_bytes())
    assert (identity(data) == changed) is bool(with_bytes)  # whose bytes are in the rows
    assert identity(replace(data, image_column="nowhere"))["files"] == {"saved": 3}.get(kind, 1)


@pytest.mark.parametrize("kind", BY_PATHS)
def test_rows_whose_named_images_are_gone_have_an_identity_where_others_have_bytes(kind, tmp_path):
    some, none = named_by_paths(kind, tmp_path / "some", range(7)), named_by_paths(kind, tmp_path / "none")
    (tmp_path / "images" / "7.png").unlink()
    assert identity(some)["files"] == {"saved": 3}.get(kind, 1) and identity(none)["files"] > 7
    shutil.rmtree(tmp_path / "images")
    assert identity(some) is not None and identity(none) is None


def test_a_stage_whose_named_images_were_all_exchanged_is_not_done(tmp_path, train):
    data = {"source": named_by_paths("parquet", tmp_path / "rows").source}
    train(data)
    train(data)
    write_pictures(tmp_path / "images", first=100)
    with pytest.raises(ValueError, match="tuned was made with other data"):
        train(data)


def test_rows_with_bytes_are_not_read_for_their_names(tmp_path, monkeypatch):
    data = named_by_paths("parquet", tmp_path / "rows", range(7))
    read, original = [], pyarrow.parquet.ParquetFile.read_row_group
    monkeypatch.setattr(
        pyarrow.parquet.ParquetFile,
        "read_row_group",
        lambda file, number, *columns: read.append(number) or original(file, number, *columns),
    )
    identity(data)
    assert read == [2]  # of three, the last


def test_images_of_rows_that_are_not_used_do_not_count(tmp_path):
    data = DataArguments(**layout("sharegpt4v", tmp_path), skip=1, num_samples=3)
    before = identity(data)
    for number, is_same in ((0, True), (4, True), (3, False)):
        (tmp_path / "images" / f"{number}.png").write_bytes(b"another")
        assert (identity(data) == before) is is_same and before["files"] == 4


def test_digests_in_names_of_results_stay_what_they_are():
    assert short_digest({"b": [1, 2.5], "a": None}) == "6b1d8497"


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
    data, original = layout("parquet", tmp_path / "a"), loop.train

    def train_and_change(*args, **kwargs):
        original(*args, **kwargs)
        layout("parquet", tmp_path / "a", first=100)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train", train_and_change)
        with pytest.raises(ValueError, match=r"data\.parquet changed while the stage read it: restore"):
            train(data)
    assert not (tmp_path / "out" / "tuned").exists()
    layout("parquet", tmp_path / "a")
    train(data)
    assert Record.read(tmp_path / "out" / "tuned").data == identity(DataArguments(**data))
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
    with pytest.raises(ValueError, match="out is inside .*, whose files are all read: choose another"):
        train({"source": str(tmp_path)})


def test_names_of_files_count_in_a_model(tmp_path):
    digests = set()
    for name in ("model", "adapter_model"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.safetensors").write_bytes(b"weights")
        digests.add(model_fingerprint(tmp_path / name))
    assert len(digests) == 2
