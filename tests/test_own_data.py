"""Tasks: their names, and datasets given by columns."""

import contextlib
import dataclasses

import datasets
import PIL.Image
import pytest
import small_evaluation
import torch
from pydantic import ValidationError
from tiny_sources import png, write_pictures
from transformers import AutoProcessor

from clip_moe.conversion.processors import own_template
from clip_moe.data import names, symbols
from clip_moe.data.arguments import DataArguments
from clip_moe.data.symbols import SYMBOLS
from clip_moe.evaluation.embedder import Embedder
from clip_moe.evaluation.evaluate import evaluate_model
from clip_moe.evaluation.measures import measure
from clip_moe.evaluation.own_data import (
    linear_probe_task,
    own_fingerprint,
    pairs_task,
    read_classes,
    read_templates,
    retrieval_task,
    zero_shot_task,
)
from clip_moe.evaluation.own_task import OwnTask
from clip_moe.evaluation.tasks import MORE, TASKS, find_tasks, require_tasks

small_tasks = small_evaluation.small_tasks


# ---- names of tasks, and the built-in ones


def test_all_unknown_names_are_told_at_once():
    own = OwnTask(task="retrieval", dataset="x", name="symbols_pairs")
    with pytest.raises(ValueError) as error:
        require_tasks(["symbols_pair", "x", "symbols_zero_shot", "retreival", "", own])
    assert str(error.value).split("; ") == [
        "unknown task symbols_pair: did you mean 'symbols_pairs'?",
        f"unknown task x: known are {', '.join(sorted(TASKS))}, {MORE}",
        "unknown task retreival: did you mean 'symbols_retrieval'?",
        f"unknown task '': known are {', '.join(sorted(TASKS))}, {MORE}",
        "two tasks are called symbols_pairs: give each a name of its own",
    ]
    with pytest.raises(ValidationError, match="title"):
        OwnTask(task="retrieval", dataset="x", title=" ")  # a result has a title
    assert list(find_tasks(["symbols_pairs", "symbols_zero_shot"])) == ["symbols_pairs", "symbols_zero_shot"]


@pytest.mark.slow
def test_another_seed_has_other_pictures_of_the_same_kinds():
    for name, task in TASKS.items():
        other = find_tasks([name], seed=7)[name]
        loads = [(task.load, other.load)] + [(task.load_train, other.load_train)] * bool(task.load_train)
        for load, load_other in loads:
            rows, others = load()[0], load_other()[0]
            column = next(column for column in rows.column_names if column.startswith("image"))
            assert rows[0][column].tobytes() != others[0][column].tobytes() and len(rows) == len(others), name
            if load is task.load:
                assert task.protocol.startswith(f"{len(rows)} "), name
        same = find_tasks([name], seed=0)[name]  # with the packages that it is drawn from
        assert other.data == same.data | {"seed": 7} and task.protocol == other.protocol == same.protocol
        assert same.load is task.load


# ---- labels


def labeled(tmp_path, labels, feature=None):
    images = [PIL.Image.new("RGB", (8, 8), (20 * number,) * 3) for number in range(len(labels))]
    rows = datasets.Dataset.from_dict({"image": images, "label": labels})
    rows = rows.cast_column("label", feature) if feature else rows
    rows.to_parquet(tmp_path / "labeled.parquet")
    return DataArguments(source=str(tmp_path / "labeled.parquet"), split="test", caption_column="label")


@pytest.mark.parametrize(
    ("labels", "features", "classes", "captions"),
    [
        ([0, 1, 1], None, ["one", "two"], ["one", "two", "two"]),
        (["one", "two", "two"], None, None, ["one", "two", "two"]),
        ([0, 1, 1], datasets.ClassLabel(names=["cat", "dog", "emu"]), ["dog", "cat"], ["cat", "dog", "dog"]),  # by name
        (["n01443537", "n01440764"], None, ["tench", "goldfish"], ["goldfish", "tench"]),
        (["n01443537", "n01440764"], None, ["n01440764 tench", "n01443537\tgoldfish"], ["goldfish", "tench"]),
        ([1, 0], None, ["n01443537 goldfish", "n01440764 tench"], ["tench", "goldfish"]),
        (["10", "9", "3"], None, ["three", "nine", "ten"], ["ten", "nine", "three"]),
        (["0", "1"], None, ["zero", "one"], ["zero", "one"]),
        (["cat", "1", "NA"], None, None, ["cat", "1", "NA"]),
        ([0, 1, 1], None, ["0,cat", "1,dog"], ["cat", "dog", "dog"]),
        ([0, 1, 1], None, ["1: dog", "0: cat, tabby"], ["cat, tabby", "dog", "dog"]),
        ([17, 3, 3], None, ["3\tdog", "17\tcat", "20\temu"], ["cat", "dog", "dog"]),
        (["1", "0"], None, ["0;cat", '1;"dog"'], ["dog", "cat"]),
        (["cat", "dog"], None, ["0. cat", "1. dog"], ["cat", "dog"]),
        ([1, 0], None, ["3 objects", "10:30 am"], ["10:30 am", "3 objects"]),
        ([1, 0], None, ["2,4-dioxane", "1,3,5-trioxane"], ["1,3,5-trioxane", "2,4-dioxane"]),
    ],
)
def test_labels_of_every_sort(tmp_path, labels, features, classes, captions):
    """Numbers, texts, and ids; a part of the rows has all classes as candidates."""
    are_texts = features is None and isinstance(labels[0], str)
    for feature in [features, *([datasets.ClassLabel(names=sorted(set(labels)))] if are_texts else [])]:
        arguments = labeled(tmp_path, labels, feature)
        task = zero_shot_task(arguments, ["a {}"], classes)
        rows, skipped = task.load()
        assert list(rows["caption"]) == captions and skipped == 0
        part = zero_shot_task(dataclasses.replace(arguments, num_samples=1), ["a {}"], classes)
        assert list(part.classes) == list(task.classes) and list(part.load()[0]["caption"]) == captions[:1]


@pytest.mark.parametrize(
    ("labels", "classes", "message"),
    [
        ([0, 1], None, "column label has no class names"),
        (["one", "three"], ["one", "two"], "not classes: three; the classes must have the column's own names, but are"),
        (["one", None], ["one", "two"], "column label has labels that are not classes: None; the classes"),
        (["n01440764", "n01443537"], ["n01440764 tench"], "has no name for 1 classes, such as n01443537"),
        (["n01440764", "n01443537"], ["n01440764 tench", "n01443537"], "the class 'n01440764 tench' is WordNet's id"),
        (["10", "9", "2"], None, "has the classes 2, 9, 10, .* their 3 names .*, one a line, such as tench"),
        (["10", "9"], ["9", "10"], "classes has '9', a label .*: give a file of names"),
        ([0, 1], ["id,name", "0,cat", "1,dog"], "2 of 3 classes have a number .*, and 'id,name' has none: number all"),
        ([0, 1], ["0,cat", "0,dog", "1,emu"], "2 of 3 classes have a number of their own .*, and '0,cat' has none"),
        ([False, True], ["cat", "dog"], "column label has labels that are not classes: False, True; the classes"),
        ([0, 1], ["1,cat", "2,dog"], "column label has labels that are not classes: 0; .* but are 1, 2"),
        (["one", "one"], None, "classes needs two or more distinct names, got 'one'"),
    ],
)
def test_labels_that_do_not_fit(tmp_path, labels, classes, message):
    with pytest.raises(ValueError, match=message):
        zero_shot_task(labeled(tmp_path, labels), ["a {}"], classes)


@pytest.mark.parametrize("template", ["a photo", "{} and {}", "a {name}", "a {", "a {:d}", "a {!r}", None])
def test_templates_have_one_place_for_a_name(tmp_path, template):
    with pytest.raises(ValueError, match="templates need one {} for the class's name, got "):
        zero_shot_task(labeled(tmp_path, ["a", "b"]), [template] if template else [])


@pytest.mark.slow
def test_a_model_is_asked_by_its_own_template(tmp_path):
    """The bundled one was trained on names alone; what its processor is saved as says so, too."""
    towns = names.NAMES.load("test", "web", 4)
    arguments = labeled(tmp_path, towns["kind"])
    towns.rename_column("kind", "label").select_columns(["image", "label"]).to_parquet(arguments.source)
    model = Embedder("training/name_clip_moe", None, 4, torch.device("cpu"))
    others = [names.name_of(town) for town in range(4096)]
    result = measure(zero_shot_task(arguments, classes=others), model)
    assert (result["template"], result["metrics"]["accuracy"]) == ("{}", 1)
    assert measure(zero_shot_task(arguments, ["a photo of a {}"], others), model)["metrics"]["accuracy"] < 1
    for name, template in (("name_clip_moe", "{}"), ("symbol_clip/half", "a picture of a {}")):
        AutoProcessor.from_pretrained(f"training/{name}").save_pretrained(tmp_path / "saved")
        assert own_template(AutoProcessor.from_pretrained(tmp_path / "saved").tokenizer) == template


def test_templates_and_classes_of_a_file(tmp_path):
    r"""Also with a byte order mark, \r\n and a line separator within a name, at which `str.splitlines` cuts."""
    file = tmp_path / "names.txt"
    file.write_bytes("\ufeffa {c}.\u2028 \r\nthe {}!\r\n".encode())
    assert read_templates([str(file)]) == ["a {}.", "the {}!"] and read_templates(["a {c}", "{}"]) == ["a {}", "{}"]
    file.write_bytes("\ufeffone\u2028half \r\ntwo\r\n".encode())
    assert read_classes(file) == ["one\u2028half", "two"]
    for content, message in ((b"one\n \t\ntwo", "line 2"), (b"", "line 1"), (b"one\ntwo \xff", "UTF-8")):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=f"names.txt .*{message}"):
            read_classes(file)


# ---- linear probes


IDS = ["n00000001", "n00000002"]


def class_folders(root, **names):
    """An image folder with two images of each class of each split."""
    for split, classes in names.items():
        for name in classes:
            (root / split / name).mkdir(parents=True)
            for number in range(2):
                PIL.Image.new("RGB", (8, 8), (number, 0, 0)).save(root / split / name / f"{name}{number}.png")
    return DataArguments(source=str(root), split="test", caption_column="label")


@pytest.mark.parametrize(
    ("folders", "classes", "expected", "test", "train"),
    [
        (("acd", "bcd"), None, ["a", "b", "c", "d"], "bbccdd", "aaccdd"),
        (("acd", "bcd"), ["a", "b", "c", "d"], ["a", "b", "c", "d"], "bbccdd", "aaccdd"),
        ((IDS, IDS), ["A", "B"], ["A", "B"], "AABB", "AABB"),
        ((IDS, IDS), ["n00000002 B", "n00000001 A"], ["A", "B"], "AABB", "AABB"),
    ],
)
def test_a_probe_knows_the_classes_of_both_splits_by_name(tmp_path, folders, classes, expected, test, train):
    """Also where the folders are called by ids."""
    arguments = class_folders(tmp_path / "folders", train=folders[0], test=folders[1])
    task = linear_probe_task(arguments, "train", classes)
    assert sorted(task.classes) == expected
    assert ["".join(load()[0]["caption"]) for load in (task.load, task.load_train)] == [test, train]


@pytest.mark.parametrize(
    ("kind", "splits", "samples", "message"),
    [
        ("file", ("test", "train"), None, "test and train of .* have 10 in common"),
        ("file", ("test[:50%]", "train[50%:]"), None, None),
        ("file", ("test", "test[5:]"), 5, None),
        ("folder", ("train", "train"), None, "train and train of .* have 4 in common: set split and train_split"),
    ],
)
def test_a_probe_is_not_fitted_to_what_it_is_tested_on(tmp_path, kind, splits, samples, message):
    arguments = labeled(tmp_path, ["one", "two"] * 5)
    if kind == "folder":
        arguments = class_folders(tmp_path / "folder", train="ab", test="ab")
    arguments = dataclasses.replace(arguments, split=splits[0], num_samples=samples)
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        task = linear_probe_task(arguments, splits[1])
        assert len(task.load()[0]) == len(task.load_train()[0]) == 5


# ---- retrieval


def test_one_row_a_caption_scores_as_one_row_an_image(dense, tmp_path):
    rows = SYMBOLS.load("test", "web", 8, captions_per_image=3).cast_column("image", datasets.Image(decode=False))
    lists = [{"image": row["image"], "caption": row["caption"]} for row in rows]
    apart = [{**row, "caption": row["caption"][number]} for number in range(3) for row in lists]
    tasks = {}
    for name, entries in (("lists", lists), ("apart", apart)):
        datasets.Dataset.from_list(entries).to_parquet(tmp_path / f"{name}.parquet")
        tasks[name] = retrieval_task(DataArguments(source=str(tmp_path / f"{name}.parquet"), split="train"))
    one, other = evaluate_model(dense, tasks, tmp_path / "scores")
    assert one["metrics"] == other["metrics"] and (other["num_samples"], other["num_captions"]) == (8, 24)


def test_data_that_were_changed_in_place_are_other_data(tmp_path):
    write_pictures(tmp_path / "pictures")
    table = tmp_path / "pairs.csv"
    table.write_text("image,caption\n0.png,a dog\n1.png,a cat\n")
    arguments = DataArguments(source=str(table), image_root=str(tmp_path / "pictures"))
    before = retrieval_task(arguments).data
    assert retrieval_task(arguments).data == before
    (tmp_path / "pictures" / "0.png").write_bytes(png(5))
    assert retrieval_task(arguments).data != before
    (tmp_path / "pictures" / "0.png").write_bytes(png(0))
    assert retrieval_task(arguments).data == before
    table.write_text(table.read_text().replace("dog", "cow"))
    assert retrieval_task(arguments).data != before


# ---- pairs


def test_pairs_of_paths_on_other_columns_and_below_a_root(dense, tmp_path):
    entries = []
    (tmp_path / "pictures").mkdir()
    for number, row in enumerate(symbols.load_minimal_pairs("test", 4)):
        entry = {f"text_{side}": row[f"caption_{side}"] for side in range(2)}
        for side in range(2):
            entry[f"photo_{side}"] = f"{number}_{side}.png"
            row[f"image_{side}"].save(tmp_path / "pictures" / entry[f"photo_{side}"])
        entries.append(entry)
    datasets.Dataset.from_list(entries).to_parquet(tmp_path / "pairs.parquet")
    columns = {"image_column": "photo", "caption_column": "text", "image_root": str(tmp_path / "pictures")}
    own = OwnTask(task="pairs", dataset=str(tmp_path / "pairs.parquet"), **columns)
    fingerprints = [own_fingerprint(own)]
    (result,) = evaluate_model(dense, find_tasks([own]), tmp_path / "scores")
    assert result["task"].startswith("pairs-pairs-text-") and result["num_samples"] == 4
    for name in ("2_0.png", "2_1.png"):  # images of both sides are part of the fingerprint
        assert own_fingerprint(own) == fingerprints[-1]
        PIL.Image.new("RGB", (8, 8), (9, 9, 9)).save(tmp_path / "pictures" / name)
        fingerprints.append(own_fingerprint(own))
    assert len(set(fingerprints)) == 3


def test_a_pair_of_which_one_side_cannot_be_read_is_left_out(tmp_path):
    pairs = symbols.load_minimal_pairs("test", 12)
    captions = list(pairs["caption_1"])
    captions[3] = " "
    pairs.remove_columns("caption_1").add_column("caption_1", captions).to_parquet(tmp_path / "pairs.parquet")
    arguments = DataArguments(source=str(tmp_path / "pairs.parquet"), split="test", max_unreadable=0.1)
    rows, skipped = pairs_task(arguments).load()
    whole = [*pairs["caption_0"][:3], *pairs["caption_0"][4:]]
    assert (len(rows), skipped) == (11, 1) and rows["caption_0"][:] == whole
