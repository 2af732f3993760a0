"""Tasks: their names, and datasets given by columns."""

import contextlib
import dataclasses
import json

import datasets
import numpy as np
import PIL.Image
import pytest
import small_evaluation
from small_evaluation import evaluated, shard

from data import symbols
from data.sources import DataArguments
from evaluation import evaluate, experts
from evaluation.embedder import Embedder
from evaluation.evaluate import evaluate_model
from evaluation.own_data import linear_probe_task, read_classes, retrieval_task, zero_shot_task
from evaluation.tasks import MORE, TASKS, find_tasks, problems_of_tasks, symbol_tasks

dense, small_tasks = small_evaluation.dense, small_evaluation.small_tasks


def test_all_unknown_names_are_told_at_once():
    assert problems_of_tasks(["symbols_pairs", "symbols_zero_shot"]) == []
    assert problems_of_tasks(["symbols_pair", "x", "symbols_zero_shot", "symbols_zero_shot", "retreival", ""]) == [
        "unknown task symbols_pair: did you mean 'symbols_pairs'?",
        f"unknown task x: known are {', '.join(sorted(TASKS))}, {MORE}",
        "the task symbols_zero_shot occurs twice",
        "unknown task retreival: did you mean 'symbols_retrieval'?",
        f"unknown task '': known are {', '.join(sorted(TASKS))}, {MORE}",
    ]
    with pytest.raises(ValueError, match=r"unknown task a: known are .*; the task symbols_pairs occurs twice$"):
        find_tasks(["a", "symbols_pairs", "symbols_pairs"])
    assert list(find_tasks(["symbols_pairs", "symbols_zero_shot"])) == ["symbols_pairs", "symbols_zero_shot"]


def test_another_seed_has_other_pictures_of_the_same_kinds():
    for name, task in TASKS.items():
        other = find_tasks([name], seed=7)[name]
        loads = [(task.load, other.load)] + [(task.load_train, other.load_train)] * bool(task.load_train)
        for load, load_other in loads:
            rows, others = load()[0], load_other()[0]
            column = next(column for column in rows.column_names if column.startswith("image"))
            assert [image.tobytes() for image in rows[column]] != [image.tobytes() for image in others[column]], name
            assert len(rows) == len(others) and load_other()[0][:] == others[:]
        assert (task.data, other.data) == ({}, {"seed": 7}) and task.protocol == other.protocol
    assert find_tasks([name], seed=0)[name] is task
    with pytest.raises(ValueError, match="the seed of the test pictures is -1, must be at least 0"):
        find_tasks([name], seed=-1)


@pytest.mark.parametrize("command", [evaluate.main, experts.main])
def test_a_command_says_the_same_of_names_as_a_recipe(tmp_path, command):
    with pytest.raises(SystemExit) as exit:
        command(["--model", "nowhere", "--tasks", "symbols_pair,symbol_retrieval", "--output-dir", str(tmp_path)])
    assert exit.value.code == f"error: {'; '.join(problems_of_tasks(['symbols_pair', 'symbol_retrieval']))}"
    assert exit.value.code.count("did you mean") == 2


def test_a_misspelt_task_on_own_data(tmp_path):
    with pytest.raises(SystemExit, match="error: unknown task retreival: did you mean 'retrieval'?"):
        evaluate.main(["--model", "nowhere", "--tasks", "retreival", "--output-dir", str(tmp_path)])


def test_the_tables_numbers_are_those_of_the_rows():
    """What the protocols say is what is loaded, and as it has been since the first results."""
    assert TASKS["symbols_retrieval"].protocol == "40 test pictures of two symbols, one detailed caption each"
    for name, task in TASKS.items():
        assert task.protocol.startswith(f"{len(task.load()[0])} "), name
    probe = TASKS["symbols_linear_probe"]
    assert len(probe.load_train()[0]) == 1500 and probe.protocol.endswith("regression on 1,500 training pictures")
    published = {name: task.protocol for name, task in symbol_tasks().items()}
    of_one = "3,000 test pictures of one symbol"
    assert published["symbols_zero_shot"] == f"{of_one}; all 189 kinds are candidates, 5 templates"
    assert published["symbols_linear_probe"] == f"{of_one} of 189 kinds; logistic regression on 6,000 training pictures"


def labeled(tmp_path, labels, features=None):
    images = [PIL.Image.fromarray(np.full((8, 8, 3), 20 * i, np.uint8)) for i in range(len(labels))]
    rows = datasets.Dataset.from_dict({"image": images, "label": labels}).cast_column("image", datasets.Image())
    if features is not None:
        rows = rows.cast_column("label", features)
    rows.to_parquet(tmp_path / "labeled.parquet")
    return DataArguments(source=str(tmp_path / "labeled.parquet"), split="test", caption_column="label")


@pytest.mark.parametrize(
    ("labels", "features", "classes"),
    [
        ([0, 1, 1, 0], datasets.ClassLabel(names=["one", "two"]), None),
        ([0, 1, 1, 0], None, ["one", "two"]),
        (["one", "two", "two", "one"], None, None),
    ],
    ids=["class labels", "numbers", "texts"],
)
def test_labels_of_every_sort(tmp_path, labels, features, classes):
    task = zero_shot_task(labeled(tmp_path, labels, features), ["a {}"], classes)
    rows, skipped = task.load()
    assert list(task.classes) == ["one", "two"] and skipped == 0
    assert list(rows["caption"]) == ["one", "two", "two", "one"]


@pytest.mark.parametrize(
    ("labels", "classes", "templates", "message"),
    [
        ([0, 1], None, ["a {}"], "column label holds no names"),
        ([0, 2], ["one", "two"], ["a {}"], "labels go from 0 to 2, but there are 2"),
        (["one", "three"], ["one", "two"], ["a {}"], "no class: three"),
        (["one"], None, ["a photo"], "a photo"),
        (["one"], None, ["{} and {}"], "one {} for the class's name"),
        (["one"], None, ["a {name}"], "one {} for the class's name"),
        (["one"], None, ["a {"], "one {} for the class's name, got .'a {'"),
        (["one"], None, ["a {}}"], "one {} for the class's name"),
        (["one"], None, ["a {:d}"], "one {} for the class's name"),
        (["one"], None, ["a {!r}"], "one {} for the class's name"),
        (["one"], None, ["a {:{}}"], "one {} for the class's name"),
        (["one"], None, ["a {0.x}"], "one {} for the class's name"),
        (["one"], None, [], "got none"),
        (["one", ""], None, ["a {}"], "class 0 has no name"),
        ([0, 1], ["one", " "], ["a {}"], "class 1 has no name"),
        ([0, None], ["one", "two"], ["a {}"], "row 1 of column label has None"),
        (["one", None], None, ["a {}"], "row 1 of column label has None"),
        ([0.0, 1.0], ["one", "two"], ["a {}"], "row 0 of column label has 0.0"),
        ([0, 1], ["crane", "crane"], ["a {}"], r"the same but for spaces and .*NFD\): 'crane', 'crane'"),
        (["emu", "emu ", "e\u0301", "\xe9"], None, ["a {}"], r"NFD\): 'emu', 'emu ', 'e\\u0301', '\\xe9'"),
        (["n01440764", "cat", "n01443537"], None, ["a {}"], "calls its classes cat, n01440764, n01443537, ..., which"),
        (["N01440764", "cat", "dog"], None, ["a {}"], "calls its classes N01440764, cat, dog, ..., which"),
        (["-1", "1.0", "cat"], None, ["a {}"], "calls its classes -1, 1.0, cat, ..., which"),
        (["a", "b"], ["n01440764 tench", "cat"], ["a {}"], "the class 'n01440764 tench' is WordNet's id"),
        (["10", "9", "2"], None, ["a {}"], r"calls its classes 2, 9, 10, .* their 3 names .*, one a line, as tench"),
        (["10", "9", "2"], ["a", "b"], ["a {}"], "their 3 names in this order .*, 3 lines and not 2, as tench"),
        (["0", "1"], ["1", "2"], ["a {}"], "labels that are no class: 0; "),
        (["one", "one"], None, ["a {}"], "two classes or more to belong to, but there is only 'one'"),
    ],
)
def test_labels_that_do_not_fit(tmp_path, labels, classes, templates, message):
    with pytest.raises(ValueError, match=message):
        zero_shot_task(labeled(tmp_path, labels), templates, classes)


@pytest.mark.parametrize("features", [None, datasets.ClassLabel(names=["one", "three", "two"])])
def test_a_part_of_the_rows_has_all_classes_as_candidates(tmp_path, features):
    labels = ["one", "two", "three", None] if features is None else [0, 2, 1, None]
    arguments = dataclasses.replace(labeled(tmp_path, labels, features), num_samples=1)
    task = zero_shot_task(arguments, ["a {}"])
    assert list(task.classes) == ["one", "three", "two"] and list(task.load()[0]["caption"]) == ["one"]


def class_folders(root, **names):
    """An image folder with two images of each class of each split."""
    for split, classes in names.items():
        for name in classes:
            (root / split / name).mkdir(parents=True)
            for number in range(2):
                PIL.Image.new("RGB", (8, 8), (number, 0, 0)).save(root / split / name / f"{name}{number}.png")
    return DataArguments(source=str(root), split="test", caption_column="label")


def test_classes_are_those_of_the_column_by_name(tmp_path):
    column = datasets.ClassLabel(names=["cat", "dog", "emu"])
    arguments = labeled(tmp_path, [0, 1, 1, 0], column)
    for classes in (["dog", "cat"], ["ant", "cat", "dog"]):
        rows, _ = zero_shot_task(arguments, ["{}"], classes).load()
        assert list(rows["caption"]) == ["cat", "dog", "dog", "cat"]
    with pytest.raises(ValueError, match="no class: dog; the classes need the column's own names, and are cat, emu"):
        zero_shot_task(arguments, ["{}"], ["cat", "emu"])


@pytest.mark.parametrize("classes", [None, ["a", "b", "c", "d"]])
def test_a_probe_knows_the_classes_of_both_splits_by_name(tmp_path, classes):
    arguments = class_folders(tmp_path / "folders", train="acd", test="bcd")
    task = linear_probe_task(arguments, "train", classes)
    assert sorted(task.classes) == ["a", "b", "c", "d"]
    for load, expected in ((task.load, "bbccdd"), (task.load_train, "aaccdd")):
        assert "".join(load()[0]["caption"]) == expected


@pytest.mark.parametrize(
    ("labels", "classes", "captions"),
    [
        (["n01443537", "n01440764"], ["tench", "goldfish"], ["goldfish", "tench"]),
        (["10", "9", "3"], ["three", "nine", "ten"], ["ten", "nine", "three"]),
        (["0", "1"], ["0", "1"], ["0", "1"]),  # digits that are called so
        (["cat", "1", "dog"], None, ["cat", "1", "dog"]),
    ],
)
def test_names_for_classes_that_the_data_number(tmp_path, labels, classes, captions):
    for features in (None, datasets.ClassLabel(names=sorted(labels))):
        task = zero_shot_task(labeled(tmp_path, labels, features), ["a {}"], classes)
        assert list(task.load()[0]["caption"]) == captions and list(task.classes) == (classes or sorted(labels))
    part = dataclasses.replace(labeled(tmp_path, labels), num_samples=1)
    assert list(zero_shot_task(part, ["a {}"], classes).load()[0]["caption"]) == captions[:1]


def test_folders_of_ids(tmp_path):
    """A probe takes them for labels as they are; prompts need names."""
    arguments = class_folders(tmp_path / "folders", train=["n01440764", "n01443537"], test=["n01440764", "n01443537"])
    assert list(linear_probe_task(arguments, "train").classes) == ["n01440764", "n01443537"]
    with pytest.raises(ValueError, match="folders calls its classes n01440764, n01443537, ..., which say nothing"):
        zero_shot_task(arguments, ["{}"])
    rows, _ = zero_shot_task(arguments, ["{}"], ["tench", "goldfish"]).load()
    assert list(rows["caption"]) == ["tench"] * 2 + ["goldfish"] * 2


@pytest.mark.parametrize(
    ("names", "refused"), [(["\xe9", "e\u0301"], True), (["a b", "a  b"], True), (["a", "A"], False)]
)
def test_labels_of_a_probe_differ_as_texts(tmp_path, names, refused):
    arguments = labeled(tmp_path, names * 4)
    arguments = dataclasses.replace(arguments, split="test[:4]")
    with pytest.raises(ValueError, match="the same but for spaces") if refused else contextlib.nullcontext():
        assert sorted(linear_probe_task(arguments, "test[4:]").classes) == sorted(names)


@pytest.mark.parametrize(
    ("kind", "splits", "samples", "message"),
    [
        ("file", ("test", "train"), None, "test and train of .* have 10 in common"),
        ("file", ("test[:5]", "train[3:]"), None, r"test\[:5\] and train\[3:\] of .* have 2 in common"),
        ("file", ("test[:50%]", "train[50%:]"), None, None),
        ("file", ("test", "test[5:]"), 5, None),
        ("folder", ("train", "train"), None, "train and train of .* have 4 in common: set split and train_split"),
        ("folder", ("test[:1]", "train+test"), None, "have 1 in common"),
        ("folder", ("test", "train"), None, None),
        ("saved", ("test", "train"), None, "have 10 in common"),
        ("saved", ("test[:5]", "test[5:]"), None, r"saved as one split: it has no test\[:5\]; take its name alone"),
    ],
)
def test_a_probe_is_not_fitted_to_what_it_is_tested_on(tmp_path, kind, splits, samples, message):
    arguments = labeled(tmp_path, ["one", "two"] * 5)
    if kind == "folder":
        arguments = class_folders(tmp_path / "folder", train="ab", test="ab")
    if kind == "saved":
        rows = datasets.Dataset.from_parquet(arguments.source).to_list()
        datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
        arguments = dataclasses.replace(arguments, source=str(tmp_path / "saved"))
    arguments = dataclasses.replace(arguments, split=splits[0], num_samples=samples)
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        task = linear_probe_task(arguments, splits[1])
        assert len(task.load()[0]) == len(task.load_train()[0]) == (4 if kind == "folder" else 5)


def test_images_below_a_root(dense, tmp_path):
    """Paths that start from --image-root score as the same images inside the dataset do."""
    rows = symbols.load("test", "web", 20)
    rows.to_parquet(tmp_path / "symbols.parquet")
    (tmp_path / "images").mkdir()
    entries = []
    for number, row in enumerate(rows):
        row["image"].save(tmp_path / "images" / f"{number}.png")
        answer = {"from": "gpt", "value": row["caption"]}
        entries.append({"image": f"{number}.png", "conversations": [answer]})
    (tmp_path / "symbols.json").write_text(json.dumps(entries))
    scores = []
    for source, root in (("symbols.parquet", None), ("symbols.json", str(tmp_path / "images"))):
        arguments = DataArguments(source=str(tmp_path / source), split="train", image_root=root)
        found = {"retrieval": retrieval_task(arguments)}
        scores += evaluate_model(dense, found, tmp_path / "scores")
    assert scores[0]["metrics"] == scores[1]["metrics"]


def test_command_on_columns(dense, tmp_path, capsys):
    rows = symbols.load("test", "web", 20, captions_per_image=2).rename_columns({"image": "jpg", "caption": "texts"})
    rows.to_parquet(tmp_path / "symbols.parquet")
    command = ["--model", str(dense), "--dataset", str(tmp_path / "symbols.parquet"), "--image-column", "jpg"]
    command += ["--caption-column", "texts", "--label-column", "kind", "--tasks", "retrieval,zero_shot"]
    evaluate.main([*command, "--output-dir", str(tmp_path / "scores")])
    out = capsys.readouterr().out
    assert out.count("(20 samples, 0 skipped)") == 2 and "retrieval-symbols.parquet-texts-" in out
    (file,) = (tmp_path / "scores").glob("zero_shot-symbols.parquet-kind-*--dense.json")
    assert json.loads(file.read_text())["protocol"] == (
        f"all rows of symbols.parquet, columns jpg and kind; {len(set(rows['kind']))} classes, 1 templates: 'a photo "
        "of a {}.'"
    )
    (file,) = (tmp_path / "scores").glob("retrieval-*.json")
    result = json.loads(file.read_text())
    assert result["protocol"] == "all rows of symbols.parquet, columns jpg and texts"
    assert result["num_captions"] == 40 and result["local"] == [str(tmp_path / "symbols.parquet")]


@pytest.mark.parametrize(
    ("source", "split", "told"),
    [
        ("clinic/patients", "test", "all rows of patients, split test, columns"),
        ("clinic/*.parquet", "test", "all rows of *.parquet, columns"),
        ("clinic/patients/a.csv", "test[:10%]", "all rows of a.csv, split [:10%], columns"),
        ("user/pairs", "test", "all rows of user/pairs, split test, columns"),
        ("symbols", "test", "the first 5 rows of symbols, split test, columns"),
    ],
)
def test_what_a_reader_knows_data_by(tmp_path, monkeypatch, source, split, told):
    """The folder above the data is nobody's business."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clinic" / "patients").mkdir(parents=True)
    for name in ("all.parquet", "patients/a.csv"):
        (tmp_path / "clinic" / name).write_text("")
    task = retrieval_task(DataArguments(source=source, split=split, num_samples=5 if source == "symbols" else None))
    name = source if source in ("user/pairs", "symbols") else source.split("/")[-1]
    assert task.title == f"retrieval, {name}" and task.protocol.startswith(told)


def test_skipped_images_are_in_the_result(dense, tmp_path):
    rows = symbols.load("test", "web", 20).cast_column("image", datasets.Image(decode=False)).to_list()
    rows[3]["image"]["bytes"] = rows[3]["image"]["bytes"][:40]
    features = datasets.Features({name: datasets.Value("string") for name in rows[0]} | {"image": datasets.Image()})
    datasets.Dataset.from_list(rows, features=features).to_parquet(tmp_path / "damaged.parquet")
    arguments = DataArguments(source=str(tmp_path / "damaged.parquet"), split="test", max_unreadable=0.1)
    found = {"retrieval": retrieval_task(arguments)}
    (result,) = evaluate_model(dense, found, tmp_path)
    assert (result["num_samples"], result["num_skipped"]) == (19, 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"one\n\ntwo\n", "classes.txt has no class in line 2"),
        (b"one\n  \t\ntwo", "classes.txt has no class in line 2"),
        (b"\none\ntwo", "classes.txt has no class in line 1"),
        (b"one\ntwo\n\n", "classes.txt has no class in line 3"),
        (b"", "classes.txt has no class in line 1"),
        (b"one\ntwo \xff", "classes.txt is no text in UTF-8"),
        (b"one\none", "the same but for spaces and Unicode's forms (NFC, NFD): 'one', 'one'"),
        (None, "classes.txt"),
    ],
)
def test_lists_of_classes(dense, tmp_path, content, message):
    if content is None:
        (tmp_path / "classes.txt").mkdir()
    else:
        (tmp_path / "classes.txt").write_bytes(content)
    arguments = ["--label-column", "number", "--classes", str(tmp_path / "classes.txt")]
    with pytest.raises(SystemExit) as exit:
        evaluated(dense, tmp_path, *arguments, tasks="zero_shot")
    assert exit.value.code.startswith("error: ") and message in exit.value.code


def test_a_list_of_classes_as_other_programs_write_it(dense, tmp_path):
    r"""With a byte order mark, \r\n and a line separator within a name, which `str.splitlines` takes for a new line."""
    (tmp_path / "classes.txt").write_bytes("\ufeffone\u2028half \r\ntwo\r\n".encode())
    assert read_classes(tmp_path / "classes.txt") == ["one\u2028half", "two"]


@pytest.mark.parametrize("task", ["retrieval", "zero_shot", "linear_probe"])
def test_one_column_is_not_two(dense, tmp_path, task):
    column = "--caption-column" if task == "retrieval" else "--label-column"
    with pytest.raises(SystemExit) as exit:
        evaluated(dense, tmp_path, column, "image", tasks=task)
    assert "the column image cannot hold both the images and" in exit.value.code


def measured_texts(monkeypatch):
    """Filled with the texts that are embedded."""
    original, measured = Embedder.texts, []
    monkeypatch.setattr(Embedder, "texts", lambda self, texts: measured.extend(texts) or original(self, texts))
    return measured


def test_retrieval_of_captions_one_a_line(dense, tmp_path, monkeypatch):
    texts, measured = shard(tmp_path / "x"), measured_texts(monkeypatch)
    options = ["--split", "train", "--image-column", "png", "--caption-column", "txt", "--captions-per-line"]
    command = ["--model", str(dense), "--tasks", "retrieval", "--dataset", str(tmp_path / "x"), *options]
    evaluate.main([*command, "--output-dir", str(tmp_path / "scores")])
    assert measured == texts


def test_captions_that_are_missing_are_no_queries(dense, tmp_path, monkeypatch):
    rows = symbols.load("test", "web", 4, captions_per_image=2)
    captions = [["a", None], ["b", " "], ["", "c"], ["d", "e"]]
    rows.remove_columns("caption").add_column("caption", captions).to_parquet(tmp_path / "x.parquet")
    measured = measured_texts(monkeypatch)
    found = {"retrieval": retrieval_task(DataArguments(source=str(tmp_path / "x.parquet")))}
    evaluate_model(dense, found, tmp_path)
    assert measured == ["a", "b", "c", "d", "e"]


def test_a_split_that_is_not_there_ends_in_one_line(dense, tmp_path):
    shard(tmp_path / "x")
    command = ["--model", str(dense), "--tasks", "retrieval", "--dataset", str(tmp_path / "x")]
    with pytest.raises(SystemExit) as exit:
        evaluate.main([*command, "--output-dir", str(tmp_path / "scores")])
    assert exit.value.code == f"error: {tmp_path / 'x'} has no split 'test', only train: set split (--split)"
