"""Folders of pictures as people have them: nothing in one is left out without a word."""

import json
import os

import datasets
import pytest
from datasets import ClassLabel, Dataset
from PIL import Image
from tiny_sources import png

from clip_moe.data.arguments import DataArguments
from clip_moe.data.columns import with_class_names
from clip_moe.data.image_folders import open_folder
from clip_moe.data.pairs import load_pairs
from clip_moe.data.sources import open_rows
from clip_moe.evaluation.own_data import zero_shot_task

CUT = b"\x89PNG cut short"


def write(folder, *names, text=None):
    """Pictures of these names, each another one."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(len(name) + sum(name.encode()) % 50) if text is None else text)


def names(folder, part):
    return [os.path.relpath(path, folder) for path in part["image"]]


# A folder's pictures and the split of each
TOP_ALONE = {"Train/test/1.png": "train", "Train/dog/2.png": "train", "val/dog/3.png": "validation"}


@pytest.mark.parametrize(
    ("pictures", "told"),
    [
        (TOP_ALONE | {"extra/4.png": None, "5.png": None}, "2 files are ignored (2 .png), such as 5.png"),
        ({"train2017/1.png": "train", "val2017/2.png": "validation"}, ""),
        ({"test/1.png": "test", "train_imgs/2.png": None}, "1 file is ignored"),
        ({"train_interior/1.png": "train", "train_station/2.png": "train"}, ""),
        ({"x/train/1.png": "train", "x/val/2.png": "train"}, "x/train/1.png is deeper"),
        ({"test/cat/1.png": "test", "val/cat/2.png": "validation"}, ""),
        ({"train/cat/1.png": "train", "val/cat/2.png": "validation", "extra/3.png": None}, "1 file is ignored"),
        ({"eval/cat/1.png": "test", "training_set/cat/2.png": None}, "1 file is ignored"),
        ({"train/test/1.png": "train", "train/cat/2.png": "train"}, ""),
    ],
)
def test_splits_are_the_folders_at_the_top(tmp_path, caplog, pictures, told):
    write(tmp_path, *pictures)
    found = {split: names(tmp_path, part) for split, part in open_folder(tmp_path).items()}
    splits = {split for split in pictures.values() if split}
    assert found == {split: sorted(path for path, of in pictures.items() if of == split) for split in splits}
    assert told in caplog.text


def test_links_are_followed_but_not_in_a_circle(tmp_path):
    write(tmp_path / "elsewhere", "1.png", "2.png")
    write(tmp_path, "photos/dog/3.png")
    (tmp_path / "photos" / "cat").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "photos" / "dog" / "above").symlink_to(tmp_path / "photos")
    (tmp_path / "photos" / "dog" / "beside").symlink_to(tmp_path / "photos" / "cat")
    part = open_folder(tmp_path / "photos")["train"]
    assert names(tmp_path / "photos", part) == ["cat/1.png", "cat/2.png", "dog/3.png"]
    assert part.features["label"].names == ["cat", "dog"]


def test_classes_are_those_of_all_splits(tmp_path):
    write(tmp_path, "train/ant/1.png", "train/bee/2.png", "train/cow/3.png", "test/bee/4.png", "test/ant/5.png")
    assert all(part.features["label"].names == ["ant", "bee", "cow"] for part in open_folder(tmp_path).values())
    rows = open_rows(DataArguments(source=str(tmp_path), split="train+test"))
    assert [rows.features["label"].int2str(label) for label in rows["label"]] == ["ant", "bee", "cow", "ant", "bee"]


def test_folders_of_several_depths_are_no_classes(tmp_path, caplog):
    write(tmp_path, "train/ant/1.png", "train/bee/2.png", "train/all.png")
    assert open_folder(tmp_path)["train"].column_names == ["image"]
    assert "no labels: folders have different depths, such as those of train/all.png and train/" in caplog.text


def test_a_table_may_name_the_splits(tmp_path):
    write(tmp_path, "1.png", "2.png", "3.png")
    (tmp_path / "metadata.csv").write_text("file_name,caption,split\n1.png,a,train\n2.png,b,test\n3.png,c,train\n")
    parts = open_folder(tmp_path)
    assert {split: names(tmp_path, part) for split, part in parts.items()} == {
        "train": ["1.png", "3.png"], "test": ["2.png"],
    }  # fmt: skip


def test_pictures_by_what_they_are(tmp_path, caplog):
    write(tmp_path, "1.PNG", ".hidden.png", "__MACOSX/2.png")
    Image.new("RGB", (8, 8)).save(tmp_path / "3.avif")
    write(tmp_path, "README", "notes.pdf", "Thumbs.db", text=b"no picture")
    assert names(tmp_path, open_folder(tmp_path)["train"]) == ["1.PNG", "3.avif"]
    assert "3 files are ignored (1 without an ending, 1 .db, 1 .pdf), such as README" in caplog.text
    (tmp_path / "none").mkdir()
    write(tmp_path / "none", "a.txt", text=b"a")
    with pytest.raises(ValueError, match="none has no pictures; formats: .*PNG"):
        open_folder(tmp_path / "none")


def test_links_to_nothing_are_not_read(tmp_path, caplog):
    write(tmp_path, "a.png")
    (tmp_path / "b.png").symlink_to(tmp_path / "gone.png")
    (tmp_path / "metadata.csv").write_text("file_name,caption\na.png,one\nb.png,two\n")
    assert load_pairs(DataArguments(source=str(tmp_path), max_unreadable=0.5))["caption"] == ["one"]
    assert "1 file is ignored (1 .png), such as b.png" in caplog.text and "1 of 2 pairs" in caplog.text


def test_classes_are_captions(tmp_path):
    write(tmp_path, "red_circle/1.png", "star/2.png")
    for streaming in (False, True):
        rows = load_pairs(DataArguments(source=str(tmp_path), caption_column="label", streaming=streaming))
        assert [row["caption"] for row in rows] == ["red circle", "star"]
    labels = Dataset.from_dict({"image": ["a"] * 3, "caption": [-1, None, 1]}).cast_column("caption", ClassLabel(2))
    assert with_class_names(labels, "folder")["caption"] == [None, None, "1"]  # no class is no name
    task = zero_shot_task(DataArguments(source=str(tmp_path), caption_column="label"), ["a {}"])
    assert list(task.classes) == ["red circle", "star"] and task.load()[0]["caption"] == ["red circle", "star"]


@pytest.mark.parametrize("name", ["None", "NA", "null", "None_", "_"])
def test_a_class_that_reads_as_a_missing_caption_is_refused(tmp_path, name):
    write(tmp_path, "cat/0.png", f"{name}/0.png")
    with pytest.raises(ValueError, match=f"a class called '{name}' reads as a missing caption: rename it"):
        load_pairs(DataArguments(source=str(tmp_path), caption_column="label"))


def test_classes_of_one_caption_are_named(tmp_path, caplog):
    write(tmp_path, "Big_cat/0.png", "big cat/0.png", "dog/0.png")
    load_pairs(DataArguments(source=str(tmp_path), caption_column="label"))
    assert "the classes 'Big_cat' and 'big cat' have the same caption and count as one" in caplog.text


def test_texts_beside_pictures(tmp_path, caplog):
    """As kohya's scripts and img2dataset write them."""
    write(tmp_path, "a.png", "b.png", "c.png", "d.png")
    texts = {"a.txt": b"\xef\xbb\xbf a cat\r\n", "b.caption": b"a dog", "c.txt": b"caf\xe9", "e.txt": b""}
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
    pairs = load_pairs(DataArguments(source=str(tmp_path), max_unreadable=0.5))
    assert [caption.strip() for caption in pairs["caption"]] == ["a cat", "a dog"]
    assert f"the text of {tmp_path / 'c.txt'} is skipped: 'utf-8' codec" in caplog.text
    assert "2 of 4 pairs" in caplog.text and "1 file is ignored (1 .txt), such as e.txt" in caplog.text
    assert "1 of 4 pictures have no text file, such as" in caplog.text


TABLES = {
    "metadata.csv": 'file_name,caption\nb.png,"[""one""]"\na.png,"[""two"", ""three""]"\n'
    'nowhere.png,"[""four""]"\nc.png,NA\n',
    "metadata.jsonl": "\n".join(
        json.dumps({"file_name": f"{name}.png", "caption": caption})
        for name, caption in {"b": ["one"], "a": ["two", "three"], "nowhere": ["four"], "c": None}.items()
    ),
}


@pytest.mark.parametrize("name", [*TABLES, "metadata.parquet"])
def test_tables_beside_pictures(tmp_path, caplog, name):
    write(tmp_path, "a.png", "b.png", "c.png", "unsaid.png")
    if name == "metadata.parquet":
        rows = [json.loads(line) for line in TABLES["metadata.jsonl"].splitlines()]
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / name)
    else:
        (tmp_path / name).write_text(TABLES[name])
    pairs = load_pairs(DataArguments(source=str(tmp_path), max_unreadable=0.5))
    assert list(pairs["caption"]) == [["two", "three"], ["one"]]
    assert f"1 of 4 pictures have no row in {tmp_path / name}" in caplog.text
    assert "2 of 4 pairs" in caplog.text


def test_a_table_above_its_pictures_is_that_of_each_split(tmp_path):
    write(tmp_path, "train/1.png", "test/2.png")
    (tmp_path / "metadata.csv").write_text("file_name,caption\ntrain/1.png,one\ntest/2.png,two\n")
    for split, caption in (("train", "one"), ("test", "two")):
        assert load_pairs(DataArguments(source=str(tmp_path), split=split))["caption"] == [caption]


def test_several_pictures_a_line(tmp_path):
    write(tmp_path, "a.png", "b.png")
    (tmp_path / "metadata.csv").write_text(
        "image_0_file_name,image_1_file_name,caption_0,caption_1,image_1\na.png,b.png,one,two,a word\n"
    )
    rows = open_folder(tmp_path)["train"]
    assert rows.column_names == ["image_0", "image_1", "caption_0", "caption_1"] and len(rows) == 1


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"metadata.csv": "name,caption\na.png,one\n"}, "metadata.csv has no column file_name"),
        ({"x/metadata.csv": "file_name,caption\n../a.png,one\n"}, "x/metadata.csv names .*a.png, which is outside"),
        ({"metadata.csv": "file_name,caption\n/etc/a.png,one\n"}, "names /etc/a.png, which is outside its folder"),
        (
            {"metadata.csv": "file_name,caption\na.png,one\n", "metadata.jsonl": '{"file_name": "a.png"}'},
            "has several tables of the same pictures, .*metadata.csv and .*metadata.jsonl: merge them",
        ),
    ],
)
def test_tables_that_do_not_fit(tmp_path, tables, message):
    write(tmp_path, "a.png", "x/b.png")
    for name, text in tables.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        open_folder(tmp_path)


@pytest.mark.parametrize(
    ("classes", "told"),
    [
        (["beach", "lake", "train_interior", "train_station"], ""),  # words in them are no splits
        (["animals/bat", "animals/cat", "sports/bat"], ""),  # two of one name
        *(
            ([name, "cat", "dog"], f"read as classes, not splits: {name}, beside cat, dog. If they are splits")
            for name in ("test", "dev", "val", "eval", "Testing", "valid")
        ),
    ],
)
def test_folders_are_classes(tmp_path, caplog, classes, told):
    write(tmp_path, *(f"{name}/{number}{other}.png" for number, name in enumerate(classes) for other in "ab"))
    ((split, part),) = open_folder(tmp_path).items()
    assert split == "train" and part.features["label"].names == sorted(classes) and len(part) == 2 * len(classes)
    assert told in caplog.text


@pytest.mark.parametrize(
    "hidden",
    [
        "cat/@eaDir/1.png/SYNOPHOTO_THUMB_M.png",
        "@eaDir/cat/1.png",
        "#recycle/cat/1.png",
        "cat/.thumbnails/1.png",
        "$RECYCLE.BIN/S-1/1.png",
        "cat/.ipynb_checkpoints/1-checkpoint.png",
        "__MACOSX/cat/._1.png",
        "@Recycle/1.png",
        "cat/.@__thumb/s1001.png",
    ],
)
def test_hidden_thumbnails_are_passed_over_and_counted(tmp_path, caplog, hidden):
    write(tmp_path, "cat/1.png", "dog/2.png", hidden)
    part = open_folder(tmp_path)["train"]
    assert part.features["label"].names == ["cat", "dog"] and len(part) == 2
    assert f"1 hidden picture is ignored, such as {hidden}" in caplog.text
    (tmp_path / "metadata.csv").write_text(f"file_name,text\ncat/1.png,a cat\n{hidden},a thumbnail\n")
    assert set(open_folder(tmp_path)["train"]["image"]) == {str(tmp_path / "cat" / "1.png"), None}


def test_links_into_a_hidden_folder_are_read_and_not_counted(tmp_path, caplog):
    write(tmp_path, ".annex/1.png", ".annex/2.png")
    for name, number in (("cat", 1), ("dog", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{number}.png").symlink_to(tmp_path / ".annex" / f"{number}.png")
    assert len(open_folder(tmp_path)["train"]) == 2 and "hidden picture" not in caplog.text


@pytest.mark.parametrize(
    ("prepare", "names"),
    [
        (lambda folder: (folder / "cow").mkdir(), "cow is no class"),
        (lambda folder: (folder / "cow" / "deep").mkdir(parents=True), "cow is no class"),
        (lambda folder: write(folder, "cow/notes.txt", "emu/a.csv", text=b"x"), "cow, emu are no classes"),
        (lambda folder: write(folder, "cow/.hidden.png"), "cow is no class"),
        (lambda folder: write(folder, "cow/1.png", text=CUT), "cow is no class"),
    ],
    ids=["empty", "empty below", "no pictures", "hidden", "broken"],
)
def test_a_folder_without_a_picture_is_no_class(tmp_path, caplog, prepare, names):
    write(tmp_path, *(f"{name}/{number}.png" for name in ("ant", "bee") for number in range(100)))
    prepare(tmp_path)
    task = zero_shot_task(DataArguments(source=str(tmp_path), split="train", caption_column="label"), ["a {}"])
    assert list(task.classes) == ["ant", "bee"]
    assert f"2 classes (without a picture that can be read, {names}), 1 templates" in task.protocol
    assert f"{tmp_path}: without a picture that can be read, {names}" in caplog.text
    rows, skipped = task.load()
    assert set(rows["caption"]) == {"ant", "bee"} and skipped == (tmp_path / "cow" / "1.png").is_file()


def test_a_class_has_its_picture_in_any_split(tmp_path):
    write(tmp_path, "train/ant/1.png", "train/bee/2.png", "test/ant/3.png")
    (tmp_path / "test" / "bee").mkdir()
    write(tmp_path, "test/cow/1.png", "train/cow/1.png", "train/ant/0.png", text=CUT)
    parts = open_folder(tmp_path)
    assert all(part.features["label"].names == ["ant", "bee"] for part in parts.values())
    assert parts["test"].info.description.endswith("cow is no class")
    assert list(parts["train"]["label"]) == [0, 0, 1, None]
