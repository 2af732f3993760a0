"""Benchmarks: copies that are not as they should be, class names and templates of packages, and the Hub."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest
from benchmark_folders import make_copy, png, write_image, write_lines, write_names
from tiny_sources import write_shard

from evaluation import evaluate
from evaluation.benchmarks.loading import CLASSES, TEMPLATES, NotDownloaded, benchmark_task
from evaluation.benchmarks.specs import BENCHMARKS
from evaluation.tasks import find_tasks, problems_of_data


def make(root, name, number=0):
    """A copy in one of a benchmark's layouts, and its folder."""
    benchmark = BENCHMARKS[name]
    make_copy(benchmark, benchmark.layouts[number], root / name)
    return root / name


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


ANNOTATIONS = "annotations/captions_val2017.json"
CLASS = "test/Do0RedThings"


@pytest.mark.parametrize(
    ("name", "file", "change", "message"),
    [
        ("cars", "test", None, "is no copy of cars: there must be test/0.tar, test/1.tar, .* and a cls each"),
        ("imagenet1k_linear_probe", "train", None, "must be test/0.tar, .* a cls each.*, and the same for train$"),
        ("cars", "test/1.tar", None, "nshards.txt says '2', but there are 1 shards: copy all"),
        ("cars", "test/1.tar", b"x", "1.tar is no tar, or is cut"),
        ("cars", CLASSES, "one\n", "label 1 is none of the numbers of 1 classes, from 0 on"),
        ("cars", CLASSES, ("\n\n",), "classnames.txt has no class in line 8: every line needs one"),
        ("cars", CLASSES, b"\xff", "classnames.txt is no text in UTF-8"),
        (
            "mnist",
            CLASSES,
            None,
            "mnist lacks the names of its classes.*: write them into .*/classnames.txt, or install",
        ),
        ("cars", CLASSES, None, "cars lacks the names of its classes .*: write them into .*/classnames.txt$"),
        ("cars", TEMPLATES, None, "cars lacks templates with {c} .*: write them into .*_templates.txt, or install"),
        ("ucf101", TEMPLATES, None, "ucf101 lacks templates with {c} .*: write them into .*_templates.txt$"),
        ("cars", TEMPLATES, "a photo\n", "need one {c} for the class's name, got 'a photo'"),
        (
            "food101",
            "meta",
            None,
            "no copy of food101: there must be images/CLASS/NAME.jpg and meta/test.txt .classes in the order of their "
            "folders. or test/0",
        ),
        ("food101", "meta/test.txt", ("a/b\n",), "1 images of the split test are not in .*; one is a/b"),
        ("cub200", "images.txt", "1\n", "images.txt or .*train_test_split.txt is not as it should be"),
        ("cub200", CLASSES, "one\n", "has 1 classes, but there are 7 folders of classes"),
        (
            "food101",
            CLASSES,
            "Red-Food\n2\n3\ngreen food\n5\n6\n7\n",
            "line 1 of .* is 'Red-Food', but the folder .* is 'blue food': put",
        ),
        ("ucf101", f"{CLASS}/v_0.txt", "", "v_0.txt is no image: the folder of a class must hold its images and"),
        ("ucf101", f"{CLASS}/video/0.jpg", b"", "Do0RedThings/video is no image"),
        ("ucf101", "test/Empty/.hidden.jpg", b"", "test/Empty has no images: the folder of a class"),
        ("ucf101", f"{CLASS}/v_Do0RedThings_g00.png", b"", "_g00.jpg and .*_g00.png have one name: remove one"),
        ("food101", "images/red_food/7.png", b"", "7.jpg and .*7.png have one name"),
        ("ucf101", "test", None, "no copy of ucf101: there must be test/CLASS/NAME.jpg .* or test/0"),
        ("hateful_memes", "dev.jsonl", "{", "line 1 of .*dev.jsonl is no JSON"),
        ("hateful_memes", "dev.jsonl", "3", "dev.jsonl holds no objects; there must be dev.jsonl with images in"),
        ("hateful_memes", "dev.jsonl", '{"img": "x"}', r"dev.jsonl .* \(KeyError\('label'\)\).* the keys img, label"),
        (
            "hateful_memes",
            "dev.jsonl",
            ('"label": 0', '"label": 0.7'),
            "the label 0.7 is no whole number.* keys img",
        ),
        ("hateful_memes", "dev.jsonl", ('"label": 0', '"label": true'), "the label True is no whole number"),
        ("hateful_memes", "dev.jsonl", ('"label": 0', '"label": 1e999'), "the label inf is no whole number"),
        ("hateful_memes", "dev.jsonl", ('"label": 0', f'"label": {10**30}'), r"dev.jsonl is not as .*\(OverflowError"),
        ("hateful_memes", "dev.jsonl", ('{"img": "img/00000.png", "label": 1}',), "img/00000.png has two labels"),
        (
            "flickr30k_all",
            "results_20130124.token",
            ("\nx\n",),
            "line 32 of .*results_20130124.token is not as it should",
        ),
        ("flickr30k_all", "flickr30k-images/3.jpg", None, "1 of 15 pairs of .* cannot be used; the first is .*/3.jpg"),
        ("docci_long", "docci_descriptions.jsonlines", ("test", "qual"), "docci_long has no images of the split test"),
        ("docci", "annotations/test_annotations.json", "[]", "annotations.json holds no objects; there must be"),
        ("mscoco_val2017", ANNOTATIONS, "{}", r"\(KeyError\('images'\)\); there must be annotations/"),
        ("mscoco_val2017", ANNOTATIONS, ('"id": 103', '"id": "x"'), r"captions_val2017.json is not as .*\(TypeError"),
        ("mscoco_val2017", ANNOTATIONS, ('"3 1"', "5"), r"captions_val2017.json .*\(TypeError\('caption holds no text"),
        ("mscoco_val2017", ANNOTATIONS, ('"3 1"', "null"), r"\(TypeError\('caption holds no text"),
        ("mscoco_val2017", ANNOTATIONS, ('"3 1"', r'"\ud800"'), r"captions_val2017.json .*\(UnicodeEncodeError"),
        ("mmvp_vlm", "Questions.csv", ('""odd""', '"odd""'), r"Questions.csv is not as it should be \(Error"),
        ("mmvp_vlm", "Questions.csv", ("3,Color", '"3,Color'), r"Questions.csv is not as it should be \(Error"),
        ("mmvp_vlm", "Questions.csv", ("odd", "o\ndd"), "three cells each, none blank or of several lines"),
        ("mmvp_vlm", "Questions.csv", ("15,Texts, \n16,Texts,b\n",), "three cells each, none blank"),
        ("mmvp_vlm", "Questions.csv", (f"15,Texts,{140000 * 'x'}\n",), r"Questions.csv .*\(Error.'field larger than"),
        ("mmvp_vlm", "Questions.csv", ("14,Texts", "15"), "must have pairs of rows with three cells each"),
        ("mmvp_vlm", "MLLM_VLM Images/Texts", None, "pairs .* cannot be used; the first is pair 4"),
        ("iiw", "docci_aar", None, "cannot be used; the first is pair .*docci_aar/"),
        ("mscoco_val2017", "val2017/000000000003.jpg", None, "1 of 14 pairs of .* cannot be used"),
    ],
)
def test_copies_that_are_not_as_they_should_be(tmp_path, name, file, change, message):
    damage(make(tmp_path, name) / file, change)
    with pytest.raises((ValueError, OSError), match=message) as error:
        benchmark_task(BENCHMARKS[name], tmp_path).load()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("image/003.jpg", None, "1 images in .*urban1k have no caption or captions no image; one is 003"),
        ("caption/005.txt", None, "1 images in .*urban1k have no caption or captions no image; one is 005"),
        ("image/003.png", b"", "003.jpg and .*003.png have one name"),
    ],
)
def test_a_second_layout_that_is_not_as_it_should_be(tmp_path, file, change, message):
    damage(make(tmp_path, "urban1k", 1) / file, change)
    with pytest.raises(ValueError, match=message):
        benchmark_task(BENCHMARKS["urban1k"], tmp_path).load()


def test_what_systems_leave_in_folders_does_not_matter(tmp_path):
    folder = make(tmp_path, "ucf101") / "test"
    whole = benchmark_task(BENCHMARKS["ucf101"], tmp_path)
    for name in (".ipynb_checkpoints/0.jpg", "__MACOSX/0.jpg", "Do0RedThings/.DS_Store", "Do0RedThings/._0.jpg"):
        damage(folder / name, b"")
    task = benchmark_task(BENCHMARKS["ucf101"], tmp_path)
    assert (task.classes, task.data) == (whole.classes, whole.data) and len(task.load()[0]) == 14


def test_a_folder_of_a_class_may_hold_avif(tmp_path):
    (image, *_) = (make(tmp_path, "ucf101") / CLASS).iterdir()
    image.rename(image.with_suffix(".avif"))  # whatever it holds
    assert len(benchmark_task(BENCHMARKS["ucf101"], tmp_path).load()[0]) == 14


def test_one_unreadable_image_of_many_is_no_less_an_error(tmp_path):
    """Elsewhere, 1 % may be."""
    for number in range(200):
        write_image(tmp_path / "Urban1k" / "image" / f"{number}.jpg", number % 14)
        write_lines(tmp_path / "Urban1k" / "caption" / f"{number}.txt", [f"number {number}"])
    assert len(benchmark_task(BENCHMARKS["urban1k"], tmp_path).load()[0]) == 200
    (tmp_path / "Urban1k" / "image" / "7.jpg").write_bytes(b"")
    with pytest.raises(ValueError, match="1 of 200 pairs of .*Urban1k cannot be used; the first is .*7.jpg"):
        benchmark_task(BENCHMARKS["urban1k"], tmp_path).load()


def test_shards_of_something_else(tmp_path):
    (tmp_path / "cars" / "test").mkdir(parents=True)
    write_names(tmp_path / "cars", ["one"])
    write_shard(tmp_path / "cars" / "test" / "0.tar", [("0.png", png(1)), ("0.json", b"{}")])
    with pytest.raises(ValueError, match="have png, json, but need a webp, png or jpg and a cls"):
        benchmark_task(BENCHMARKS["cars"], tmp_path).load()


@pytest.mark.parametrize("name", ["mmvp_vlm", "food101"])
def test_what_the_hub_does_not_have(tmp_path, name):
    message = f"{name} is not read from the Hub: put it into .*{name} .--data-root., with "
    for root in (None, tmp_path):
        with pytest.raises(ValueError, match=message):
            benchmark_task(BENCHMARKS[name], root)


def test_a_command_ends_in_one_line(tmp_path):
    command = ["--model", "training/symbol_clip", "--output-dir", str(tmp_path / "out"), "--tasks", "mode_26"]
    with pytest.raises(SystemExit, match="^error: there is no folder .*nope with copies of benchmarks .--data-root.$"):
        evaluate.main([*command, "--data-root", str(tmp_path / "nope")])
    with pytest.raises(SystemExit, match="^error: unknown task mode_62: did you mean 'mode_26'?"):
        evaluate.main([*command[:-1], "mode_62"])
    assert not (tmp_path / "out").exists()


def test_problems_are_told_at_once_and_the_hub_is_not_asked(tmp_path):
    folder = make(tmp_path, "cub200")
    shutil.rmtree(folder / "images")
    problems = problems_of_data(["clip_benchmark", "cub200", "mmvp_vlm", "symbols_pairs"], tmp_path)
    assert [problem.split(" is ")[0] for problem in problems] == [str(folder), "mmvp_vlm"]


INSTALLED = importlib.util.find_spec("clip_benchmark")


@pytest.fixture(autouse=True)
def no_packages(monkeypatch):
    """Whatever is installed here."""
    for name in ("clip_benchmark", "open_clip"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Installs a package, as far as importing tells."""
    monkeypatch.syspath_prepend(tmp_path / "site")

    def install(name, files):
        (tmp_path / "site" / name).mkdir(parents=True)
        for file, content in ({"__init__.py": ""} | files).items():
            (tmp_path / "site" / name / file).parent.mkdir(exist_ok=True)
            (tmp_path / "site" / name / file).write_text(content)
        monkeypatch.delitem(sys.modules, name, raising=False)

    yield install
    for name in ("clip_benchmark", "open_clip"):
        sys.modules.pop(name, None)


def test_names_of_an_installed_clip_benchmark(tmp_path, package):
    """Files beside the data come first, then the data, then packages."""
    names = {"mnist": [f"digit {number}" for number in range(7)], "food101": ["x"] * 7}
    templates = {"mnist": ["my {c}."], "food101": ["a dish of {c}."]}
    package("clip_benchmark", {
        "datasets/en_classnames.json": json.dumps(names),
        "datasets/en_zeroshot_classification_templates.json": json.dumps(templates),
    })  # fmt: skip
    mnist, food = make(tmp_path, "mnist"), make(tmp_path, "food101")
    assert benchmark_task(BENCHMARKS["mnist"], tmp_path).classes[0] == "red"
    for folder in (mnist, food):
        (folder / TEMPLATES).unlink()
    (mnist / CLASSES).unlink()
    task = benchmark_task(BENCHMARKS["mnist"], tmp_path)
    assert (task.classes, task.templates) == (names["mnist"], ["my {}."])
    assert task.load()[0]["caption"][1] == "digit 1"
    task = benchmark_task(BENCHMARKS["food101"], tmp_path)
    assert task.classes[0] == "blue food" and task.templates == ["a dish of {}."]


def test_caltech101_has_the_names_of_vtab(tmp_path, package):
    """CLIP_benchmark has two lists in different orders; its shards have VTAB's (`build_vtab_dataset`)."""
    package("clip_benchmark", {
        "datasets/en_classnames.json": json.dumps({"caltech101": list("abcdefg"), "caltech101_vtab": list("gfedcba")}),
        "datasets/en_zeroshot_classification_templates.json": json.dumps({"caltech101": ["a {c}."]}),
    })  # fmt: skip
    folder = make(tmp_path, "caltech101")
    (folder / CLASSES).unlink()
    (folder / TEMPLATES).unlink()
    task = benchmark_task(BENCHMARKS["caltech101"], tmp_path)
    assert (task.classes, task.templates) == (list("gfedcba"), ["a {}."])


@pytest.mark.skipif(INSTALLED is None, reason="clip-benchmark is not installed")
def test_the_installed_clip_benchmark_has_what_the_specs_say():
    folder = Path(INSTALLED.submodule_search_locations[0]) / "datasets"
    classes = json.loads((folder / "en_classnames.json").read_text())
    templates = json.loads((folder / "en_zeroshot_classification_templates.json").read_text())
    for benchmark in BENCHMARKS.values():
        assert benchmark.classes_of is None or benchmark.classes_of in classes
        assert benchmark.templates_of is None or benchmark.templates_of in templates
        if benchmark.kind == "zero_shot":
            assert benchmark.classes_of or benchmark.name not in classes
            assert benchmark.templates_of or benchmark.name not in templates


def test_names_of_an_installed_open_clip(tmp_path, package):
    code = "IMAGENET_CLASSNAMES = tuple('abcdefg')\nOPENAI_IMAGENET_TEMPLATES = (lambda c: f'a {c}.',)\n"
    package("open_clip", {"__init__.py": code})
    for name in ("imagenetv2", "cars"):
        folder = make(tmp_path, name)
        (folder / CLASSES).unlink()
        (folder / TEMPLATES).unlink()
    task = benchmark_task(BENCHMARKS["imagenetv2"], tmp_path)
    assert (task.classes, task.templates) == (list("abcdefg"), ["a {}."])
    with pytest.raises(ValueError, match="cars lacks the names"):
        benchmark_task(BENCHMARKS["cars"], tmp_path)


def test_classes_of_one_name_keep_their_numbers(tmp_path):
    """ImageNet has two pairs of such."""
    folder = make(tmp_path, "cars")
    (folder / CLASSES).write_text("crane\ncrane\na\nb\nc\nd\ne\n")
    task = benchmark_task(BENCHMARKS["cars"], tmp_path)
    assert list(task.load()[0]["label"]) == [number % 7 for number in range(14)]


def test_other_classes_and_templates_are_another_task(tmp_path):
    folder = make(tmp_path, "cars")
    one = benchmark_task(BENCHMARKS["cars"], tmp_path).data
    (folder / TEMPLATES).write_text("a {c}\n")
    two = benchmark_task(BENCHMARKS["cars"], tmp_path).data
    assert one != two and {key for key in one if one[key] != two[key]} == {"templates"}


@pytest.mark.parametrize(
    ("name", "file", "change"),
    [
        ("hateful_memes", "dev.jsonl", ('"label": 0', '"label": 1')),
        ("cars", "test/0.tar", b"x"),
        ("ucf101", "test/Do0RedThings/v_Do0RedThings_g00.jpg", None),
        ("food101", "meta/test.txt", ("red_food/7\n", "")),
        ("flickr30k_all", "results_20130124.token", ("#0\ta", "#0\tno")),
        ("flickr30k_all", "results_20130124.token", None),  # Karpathy's file is left
        ("urban1k", "annotations/annotations.json", ("red", "blue")),
        ("mscoco_val2017", ANNOTATIONS, ("3 1", "3 8")),
        ("mmvp_vlm", "Questions.csv", ("odd", "even")),
        ("imagenet1k_linear_probe", "train/1.tar", b"x"),
    ],
)
def test_another_copy_is_another_task(tmp_path, name, file, change):
    folder = make(tmp_path / "one", name)
    shutil.copytree(folder, tmp_path / "two" / name)
    one = benchmark_task(BENCHMARKS[name], tmp_path / "one").data
    assert benchmark_task(BENCHMARKS[name], tmp_path / "two").data == one  # wherever it lies
    damage(tmp_path / "two" / name / file, change)
    two = benchmark_task(BENCHMARKS[name], tmp_path / "two").data
    assert "version" in {key for key in one if one[key] != two[key]} <= {"version", "layout"}


def test_the_two_files_of_hateful_memes_are_two_tasks(tmp_path):
    make(tmp_path, "hateful_memes")
    one = benchmark_task(BENCHMARKS["hateful_memes"], tmp_path).data
    entries = (tmp_path / "hateful_memes" / "dev.jsonl").read_text().splitlines()
    (tmp_path / "hateful_memes" / "dev.jsonl").unlink()
    write_lines(tmp_path / "hateful_memes" / "dev_seen.jsonl", entries[1:])
    assert benchmark_task(BENCHMARKS["hateful_memes"], tmp_path).data != one


def test_the_protocol_says_where_a_copy_departs_from_it(tmp_path):
    for name, number, words in (
        ("flickr30k_all", 1, "Karpathy's list alone"),
        ("docci", 1, "not those of FLAIR's file"),
    ):
        for place in (0, number):
            make(tmp_path / f"{place}", name, place)
            protocol = benchmark_task(BENCHMARKS[name], tmp_path / f"{place}").protocol
            assert (words in protocol) == (place == number)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A cache of the Hub, with the files of a data set, as `huggingface_hub` leaves it."""
    cache = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))

    def add(name):
        benchmark = BENCHMARKS[name]
        folder = cache / f"datasets--{benchmark.hub.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text("0" * 40)
        return make_copy(benchmark, benchmark.layouts[0], folder / "snapshots" / ("0" * 40))

    return add


@pytest.mark.parametrize("name", ["caltech101", "flickr8k"])
def test_from_the_hub(hub, tmp_path, name):
    expected = hub(name)
    (tmp_path / "copies").mkdir()
    task = find_tasks([name], tmp_path / "copies")[name]  # where there is none
    assert list(task.load()[0]["caption"]) == [text for _, text in expected]
    make(tmp_path / "copies", name)
    copied = find_tasks([name], tmp_path / "copies")[name].data  # of which nothing tells that it is that of the commit
    assert task.data["version"] == f"commit {'0' * 40}"
    assert copied.keys() == task.data.keys() and {key for key in copied if copied[key] != task.data[key]} == {"version"}


def test_a_hub_out_of_reach(hub):
    with pytest.raises(NotDownloaded, match="caltech101 cannot be had from the Hub as clip-benchmark/wds_vtab-c"):
        find_tasks(["caltech101"])
