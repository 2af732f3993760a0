"""Benchmarks by name: every one on a tiny data set in each of its layouts, copies that are not as they should be, class
names and templates of packages, and the Hub."""

import json
import re
import runpy
import shutil
import sys

import numpy as np
import pytest
from benchmark_folders import COPIES, NUMBER, STEP, WEBDATASETS, WORDS, make_copy, shards, write_names
from documents import ROOT

from clip_moe.data.images import decode_image
from clip_moe.engine.hub import hub_commit
from clip_moe.engine.recipe import load_recipe
from clip_moe.evaluation.benchmarks import loading
from clip_moe.evaluation.benchmarks.loading import CLASSES, TEMPLATES, benchmark_task
from clip_moe.evaluation.benchmarks.specs import BENCHMARKS, GROUPS
from clip_moe.evaluation.evaluate import evaluate_model
from clip_moe.evaluation.stages.evaluate import EvaluateStage
from clip_moe.evaluation.tasks import find_tasks
from clip_moe.training.train_settings import MeasuredTasks

# LLaVA-1.5's benchmarks are lmms-eval's
AT_THE_PAPERS_SIZE = sorted(
    path
    for folder in ("training", "lab")
    for path in (ROOT / folder / "recipes").glob("*.yaml")
    if not re.search("symbol|icons|names|worlds|demo|llava|photographs|own_|finetune|relu", path.stem)
)
# Groups whose tables have other columns than those of the kind of task -> the titles of the columns
RECALLS = [f"R@{k} {way}" for k in (1, 5, 10) for way in ("image→text", "text→image")]
# One of each kind, with each metrics, in each sort of layout
MEASURED = {(row.kind, *row.metrics, type(row.layouts[0])): name for name, row in BENCHMARKS.items()}
COLUMNS = {"clip_moe_table_2": RECALLS, "clip_fmoe_table_2": RECALLS[:4]}
COLUMNS["clip_up_table_2"] = ["accuracy", "top-5 accuracy", *RECALLS[:4]]
COLUMNS["mode_26"] = ["accuracy", "mean per class", "mean of top-1 and top-5", "ROC AUC"]


def brightness(value):
    return round(np.asarray(decode_image(value)).mean() / STEP)


# ---- what a copy gives


def test_all_have_copies_and_groups():
    assert BENCHMARKS.keys() == {name for names in GROUPS.values() for name in names}
    assert COPIES.keys() == BENCHMARKS.keys()
    hubs = {benchmark.hub for benchmark in BENCHMARKS.values() if benchmark.hub}
    assert hubs == {f"clip-benchmark/{name}" for name in WEBDATASETS}
    assert hubs == {BENCHMARKS[name].hub for name in GROUPS["clip_benchmark"]}
    for name, copies in COPIES.items():
        assert len(copies) == len(BENCHMARKS[name].layouts)
        assert BENCHMARKS[name].hub is None or BENCHMARKS[name].hub.split("/")[1] == copies[0][0]
    sizes = {"clip_benchmark": 40, "mode_26": 26, "clip_fmoe_table_1": 11, "clip_fmoe_table_6": 17}
    assert sizes | {"clip_fmoe_table_4": 13} == {group: len(GROUPS[group]) for group in [*sizes, "clip_fmoe_table_4"]}


@pytest.mark.parametrize(
    ("name", "number"), [(name, number) for name, copies in COPIES.items() for number in range(len(copies))]
)
def test_a_copy_in_each_layout(tmp_path, name, number):
    """Under the name of the folder that its authors gave it."""
    benchmark, (folder, make) = BENCHMARKS[name], COPIES[name][number]
    (tmp_path / folder).mkdir(parents=True)
    expected = make(tmp_path / folder)
    task = benchmark_task(benchmark, tmp_path)
    assert not re.search(r"\d,\d{3}", task.protocol)  # no number of images that was not read
    rows, skipped = task.load()
    if benchmark.kind == "pairs":
        found = [(brightness(row[f"image_{side}"]), row[f"caption_{side}"]) for row in rows for side in range(2)]
        assert rows["attribute"][:] == ["Color and Appearance"] * 4 + ["Texts"] * 3
    else:
        found = [(brightness(row["image"]), row["caption"]) for row in rows]
    assert found == expected and skipped == 0
    if task.classes:
        assert [task.classes[label] for label in rows["label"]] == list(rows["caption"])
        assert set(task.templates) <= {"a photo of a {}.", "the {}."}
    if benchmark.kind == "linear_probe":
        assert len(task.load_train()[0]) == NUMBER


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    root = tmp_path_factory.mktemp("copies")
    for name in BENCHMARKS:
        make(root, name)
    return root


def test_other_names_of_benchmarks_and_of_their_folders(copies, tmp_path):
    assert list(find_tasks(["imagenet", "imagenet1k"], copies)) == ["imagenet1k"]
    above, within = (find_tasks(["imagenet"], root)["imagenet1k"] for root in (copies, copies / "imagenet1k"))
    assert above.data["version"] == within.data["version"]
    for benchmark in BENCHMARKS.values():
        for name in benchmark.folders:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).symlink_to(copies / benchmark.name)
            assert loading._find(benchmark, tmp_path) == (tmp_path / name, benchmark.layouts[0])
            (tmp_path / name).unlink()


def test_one_of_each_sort_is_measured(dense, copies, tmp_path):
    tasks = find_tasks(list(MEASURED.values()), copies)
    by_task = {result["task"]: result for result in evaluate_model(dense, tasks, tmp_path)}
    assert list(by_task) == list(tasks)
    for name, result in by_task.items():
        assert set(BENCHMARKS[name].metrics) <= set(result["primary"]) <= set(result["metrics"]), name
        assert json.loads((tmp_path / f"{name}--dense.json").read_text()) == result
        assert result["data"]["split"] == BENCHMARKS[name].split
        assert str(copies) not in result["protocol"]  # a copy elsewhere is the same
    assert by_task["mmvp_vlm"]["primary"] == {"image": "image score"}
    assert {"image/Texts", "image/Color and Appearance"} <= set(by_task["mmvp_vlm"]["metrics"])
    kinetics = by_task["kinetics700"]["metrics"]
    assert kinetics["mean_of_top1_and_top5"] == (kinetics["accuracy"] + kinetics["accuracy_top5"]) / 2
    assert by_task["flickr30k_all"]["num_samples"] == NUMBER + 1 and by_task["iiw"]["num_captions"] == 2 * NUMBER


def test_columns_of_the_papers_tables(copies):
    for group, titles in COLUMNS.items():
        tasks = find_tasks(GROUPS[group], copies).values()
        assert set(titles) <= {title for task in tasks for title in task.primary.values()}, group


@pytest.mark.parametrize("path", AT_THE_PAPERS_SIZE, ids=lambda path: path.stem)
def test_recipes_at_the_papers_size_end_with_their_benchmarks(path):
    """Tables of the paper that the recipe is named after, of its own model beside the one that it starts from; what the
    header gives to change the latter changes the row of the baseline, too."""
    paper, stages = re.match("clip_up|clip_moe|clip_fmoe|mode", path.stem)[0], load_recipe(path).stages
    measuring = [stage for stage in stages if isinstance(stage, MeasuredTasks)]
    assert measuring and stages[-len(measuring) :] == measuring
    assert all(task.startswith(paper) and task in GROUPS for stage in measuring for task in stage.tasks)
    (evaluation,) = (stage for stage in measuring if isinstance(stage, EvaluateStage))
    assert evaluation.baseline and set(evaluation.models.values()) & {stage.name for stage in stages}
    header = path.read_text().partition("\noutput_dir")[0].replace("\n#", " ")
    for model in re.findall(r"--(?:base|upcycled|defaults\.train)\.model (\S+/\S+)", header):
        (title,) = re.findall(rf"--evaluation\.models\.(\w+) {model}(?:\s|$)", header)
        stages = load_recipe(path, {f"evaluation.models.{title}": model}).stages
        (evaluation,) = (stage for stage in stages if isinstance(stage, EvaluateStage))
        assert evaluation.models[evaluation.baseline] == model


def test_the_table_of_benchmarks(capsys, monkeypatch):
    """Printed by `python -m clip_moe.evaluation.benchmarks`."""
    monkeypatch.setattr(sys, "argv", ["clip_moe.evaluation.benchmarks"])
    with pytest.raises(SystemExit):
        runpy.run_module("clip_moe.evaluation.benchmarks", run_name="__main__")
    table, _, copies, *_, groups = capsys.readouterr().out.strip().split("\n\n")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert [row[0] for row in rows] == list(BENCHMARKS)
    (kinetics_line,) = (line for line in copies.splitlines() if line.endswith("kinetics700"))
    assert "val/CLASS/NAME.jpg" in kinetics_line and "- mode_table_4: mscoco_captions, flickr30k" in groups


# ---- copies that are not as they should be (JSON, csv and lists with wrong content: test_fuzz.py)


def make(root, name, layout=0):
    """A copy in one of a benchmark's layouts, and its folder."""
    make_copy(name, root / name, layout)
    return root / name


def loaded(root, name):
    return benchmark_task(BENCHMARKS[name], root).load()[0]


def damage(path, change):
    """Removes a file or folder (None), writes a file, or replaces or appends a part of it."""
    path.parent.mkdir(exist_ok=True)
    if change is None:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    elif isinstance(change, bytes):
        path.write_bytes(change)
    elif isinstance(change, tuple):
        path.write_text(path.read_text().replace(*change) if len(change) == 2 else path.read_text() + change[0])
    else:
        path.write_text(change)


@pytest.mark.parametrize(
    ("name", "file", "change", "message"),
    [
        ("imagenet1k_linear_probe", "train", None, "expected test/0.tar, .*, and the same for train; or move it away"),
        ("cars", "test/1.tar", None, "nshards.txt says '2.*', but there are 1 shards: copy them all"),
        ("cars", CLASSES, "one\ntwo\n", "has the label 2, but its 2 classes have the labels 0 to 1"),
        ("cars", CLASSES, "one\n", "cars needs two or more classes, but has only .'one'."),
        ("cars", CLASSES, "n00000001\none\n", "the class 'n00000001' is WordNet's id.*: give names.*classnames.txt"),
        ("cars", CLASSES, "0\n1\n2\n3\n", "classnames.txt has the classes 0, 1, 2, which mean nothing to a model"),
        ("imagenet1k", CLASSES, "n00000002 b\nn00000001 a\n", "but only one of them has n00000001"),
        ("imagenet1k", "val/n01440770/val_00000013.JPEG", None, "but has 2 of red and 1 of light: copy all of them"),
        ("imagenetv2", CLASSES, ("violet\n",), "needs as many .* of every class, but has 2 of red and 0 of violet"),
        ("imagenet_a", "n01440764", None, "needs images of all 7 classes in .*txt, but has 6 classes, from n0144"),
        ("ucf101", TEMPLATES, None, "ucf101 lacks templates with {c} for the name: write .* into .*_templates.txt"),
        ("cub200", CLASSES, "Blue-Bird\nb\nc\nd\ne\nf\ng\n", "line 1 of .* is 'Blue-Bird', but .* 'Red bird'"),
        ("ucf101", "test/Empty/.hidden.jpg", b"", "test/Empty has no images: each folder in .*test must hold"),
        ("docci_long", "docci_descriptions.jsonlines", ("test", "qual"), "docci_long has no images of the split test"),
        ("cars", TEMPLATES, "the.", "templates need one {}.*, got .'the.'"),
        ("urban1k", "image/003.jpg", None, "1 images or captions have no partner, such as 003"),
    ],
)
def test_copies_that_are_not_as_they_should_be(tmp_path, name, file, change, message):
    damage(make(tmp_path, name, int(name in ("imagenet1k", "imagenet_a"))) / file, change)
    with pytest.raises((ValueError, OSError), match=message) as error:
        loaded(tmp_path, name)
    assert "\n" not in str(error.value)


def test_few_classes_have_no_top_5(tmp_path):
    folder = make(tmp_path, "imagenet1k", 1)
    for synset in sorted((folder / "val").iterdir())[3:]:
        damage(synset, None)
    write_names(folder, WORDS[:3])
    assert benchmark_task(BENCHMARKS["imagenet1k"], tmp_path).metrics == ["accuracy"]


def test_what_lies_in_folders(tmp_path):
    """Files of systems do not matter. All images within the folder of a class are its own, also in folders of their
    own and where two differ in their suffixes alone. Classes of one name, as ImageNet has some, keep their numbers."""
    folder = make(tmp_path, "ucf101") / "test"
    whole = benchmark_task(BENCHMARKS["ucf101"], tmp_path)
    for name in (".ipynb_checkpoints/0.jpg", "__MACOSX/0.jpg", "Do0RedThings/.DS_Store", "Do0RedThings/._0.jpg"):
        damage(folder / name, b"")
    task = benchmark_task(BENCHMARKS["ucf101"], tmp_path)
    assert (task.classes, task.data) == (whole.classes, whole.data) and len(task.load()[0]) == 14
    folder = make(tmp_path, "imagenet_a", 1) / "n01440764"
    (image, *_) = sorted(folder.iterdir())
    for name in ("images/1.jpeg", f"{image.stem}.png"):
        damage(folder / name, image.read_bytes())
    assert list(loaded(tmp_path, "imagenet_a")["label"][:5]) == [0, 0, 0, 0, 1]
    write_names(make(tmp_path, "cars"), ["crane", "crane", *"abcde"])
    assert list(loaded(tmp_path, "cars")["label"]) == [n % 7 for n in range(14)]


@pytest.mark.parametrize(("name", "layout", "step"), [("imagenet1k", 1, -1), ("cars", 0, 1)])
def test_names_after_their_ids(tmp_path, name, layout, step):
    """They belong to the folders of these ids; those of shards are in the order of the classes."""
    lines = [f"n{1440764 + number:08} {word}" for number, word in enumerate(WORDS)]
    write_names(make(tmp_path, name, layout), lines[::step])
    assert list(benchmark_task(BENCHMARKS[name], tmp_path).classes) == WORDS


def test_one_unreadable_image_of_many_is_no_less_an_error(tmp_path):
    """Elsewhere, 1 % may be."""
    folder = make(tmp_path, "urban1k")
    for number in range(14, 200):
        for kind, suffix in (("image", "jpg"), ("caption", "txt")):
            shutil.copy(folder / kind / f"001.{suffix}", folder / kind / f"{number:03}.{suffix}")
    (folder / "image" / "007.jpg").write_bytes(b"")
    with pytest.raises(ValueError, match="1 of 200 pairs of .*urban1k cannot be used; the first is .*7.jpg"):
        loaded(tmp_path, "urban1k")


def test_what_the_hub_does_not_have_and_is_not_asked_for(tmp_path):
    for root in (None, tmp_path):
        with pytest.raises(ValueError, match="mmvp_vlm is not on the Hub: put it into .*mmvp_vlm .data_root."):
            benchmark_task(BENCHMARKS["mmvp_vlm"], root)
    with pytest.raises(ValueError, match="data_root: there is no folder .*nope with copies of benchmarks"):
        find_tasks(["mode_26"], tmp_path / "nope")
    folder = make(tmp_path, "cub200")
    shutil.rmtree(folder / "test")
    with pytest.raises(ValueError, match=f"^{folder} is not a copy of cub200"):
        find_tasks(["cub200"], tmp_path)


# ---- what tells copies apart


def exchange_pictures(folder):
    """Names and sizes stay."""
    one, other = [path for path in sorted(folder.rglob("*")) if path.suffix in (".jpg", ".png")][:2]
    contents = one.read_bytes(), other.read_bytes()
    assert contents[0] != contents[1]
    other.write_bytes(contents[0]), one.write_bytes(contents[1])


def exchange_labels(folder):
    shards(folder, "test", "cls", [f"{(number + 1) % 7}" for number in range(NUMBER)])


@pytest.mark.parametrize(
    ("name", "key", "change"),
    [
        ("cars", "templates", lambda folder: damage(folder / TEMPLATES, "a {c}\n")),
        ("cars", "version", lambda folder: damage(folder / "test/0.tar", b"x")),
        ("imagenet1k_linear_probe", "version", lambda folder: damage(folder / "train/1.tar", b"x")),
        ("mscoco_val2017", "version", lambda folder: damage(next(folder.glob("annotations/*")), ("3 1", "3 8"))),
        ("mscoco_val2017", "version", exchange_pictures),
        ("ucf101", "version", exchange_pictures),
        ("cars", "version", exchange_labels),
    ],
)
def test_what_was_exchanged_within_a_copy_makes_it_another_one(tmp_path, name, key, change):
    folder = make(tmp_path / "one", name)
    shutil.copytree(folder, tmp_path / "two" / name)
    one = benchmark_task(BENCHMARKS[name], tmp_path / "one").data
    assert benchmark_task(BENCHMARKS[name], tmp_path / "two").data == one  # wherever it lies
    change(tmp_path / "two" / name)
    two = benchmark_task(BENCHMARKS[name], tmp_path / "two").data
    assert key in {key for key in one if one[key] != two[key]} <= {key, "layout"}


@pytest.fixture
def add(hub, tmp_path):
    """Puts a data set on the Hub. Returns its commit, and what a copy has."""

    def add(name):
        expected = make_copy(name, tmp_path / "hub" / name)
        return hub.put(BENCHMARKS[name].hub, tmp_path / "hub" / name, "datasets"), expected

    return add


def test_from_the_hub(add, hub, tmp_path):
    """Its commit is part of its scores; offline, it comes from the cache."""
    with pytest.raises(ValueError, match="^cannot get flickr8k from the Hub as clip-benchmark/wds_flickr8k.* or put"):
        find_tasks(["flickr8k"])
    (tmp_path / "copies").mkdir()
    for name in ("caltech101", "flickr8k"):
        commit, expected = add(name)
        for is_online in (True, False):
            hub.online(is_online)
            task = find_tasks([name], tmp_path / "copies")[name]  # where there is none
            assert list(task.load()[0]["caption"]) == [text for _, text in expected]
            assert task.data["version"] == f"commit {commit}"
        hub.online()
        make(tmp_path / "copies", name)
        copied = find_tasks([name], tmp_path / "copies")[name].data
        assert {key for key in copied.keys() | task.data.keys() if copied[key] != task.data[key]} == {"version"}
    hub.clear()
    hub.online()
    assert hub_commit(BENCHMARKS["flickr8k"].hub, "dataset") == commit  # from the cache


def test_names_and_templates_come_from_the_hub_where_the_data_have_ids(add, tmp_path):
    folder = make(tmp_path, "imagenet1k", 1)
    for name in (CLASSES, TEMPLATES):
        damage(folder / name, None)
    with pytest.raises(ValueError, match="or write the names of its classes into .*names.txt, one a line$"):
        find_tasks(["imagenet"], tmp_path)
    add("imagenet1k")
    (task,) = find_tasks(["imagenet"], tmp_path).values()
    assert list(task.load()[0]["caption"]) == [word for word in WORDS for _ in range(2)]
    assert task.templates == ["a photo of a {}.", "the {}."] and task.data["layout"] == "ClassFolders"
