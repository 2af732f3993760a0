"""Damaged models, data, results and runs: the commands that measure, report and publish end in one line, or in success;
never in a traceback, and nothing half-written is left.

`pytest tests/test_fuzz_evaluation.py` prints the number of cases of each command at its end (with `-s`).
"""

import collections
import functools
import itertools
import json
import logging as python_logging
import math
import random
import resource
import shutil
import tempfile
from pathlib import Path

import datasets
import numpy as np
import PIL.Image
import pytest
import yaml
from converters import make_sources
from converters import run as convert
from safetensors.numpy import load_file
from test_fuzz_conversion import CONFIGURATIONS, HALVES, NO_OBJECT, SKIP, WEIGHTS, bytes_of, field, text
from test_report import result
from tiny_clip import WORDS
from transformers import logging

from conversion.commands import publish as publish_command
from conversion.publishing import bundle
from data.sources import DataArguments
from evaluation.commands import evaluate, experts, report
from evaluation.own_data import retrieval_task
from evaluation.tasks import TASKS
from model_cards import seeds
from records.provenance import weights_fingerprint
from records.result_schema import read_result
from training.recipe import load_recipe
from training.runner import run_recipe

pytestmark = pytest.mark.slow

MAINS = {"evaluate": evaluate.main, "report": report.main, "seeds": seeds.write_seeds.main, "experts": experts.main}
MAINS["publish"] = publish_command.main
# What may stand in place of any value of a JSON file
VALUES = [
    ...,
    None,
    True,
    0,
    -1,
    10**400,
    1e308,
    math.nan,
    math.inf,
    "",
    "x",
    "\ud800",
    "\0",
    "a\nb",
    "../x",
    "x" * 300,
]
VALUES += [[], [1], {}, {"": ""}, {"x": None}, {"recall": "x"}, json.loads("[" * 900 + "]" * 900)]
cases = collections.Counter()


def rows(number=12):
    """Images of 32 pixels in two classes, with captions of words that the tokenizer knows."""
    generator = np.random.default_rng(number)
    pixels = generator.integers(0, 256, (number, 32, 32, 3), np.uint8)
    columns = {
        "image": [PIL.Image.fromarray(image) for image in pixels],
        "caption": [WORDS[i % len(WORDS)] for i in range(number)],
        "label": [WORDS[i % 2] for i in range(number)],
    }
    return datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())


@pytest.fixture(scope="module", autouse=True)
def quiet():
    # Warnings quote what is in the files, also what cannot be sent from one process of pytest to another
    python_logging.disable()
    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()
    logging.enable_progress_bar()
    python_logging.disable(python_logging.NOTSET)
    print(f"\n{sum(cases.values())} cases: {dict(cases)}")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Models, data, a file of classes, results of two seeds, and a run."""
    folder = tmp_path_factory.mktemp("sources")
    make_sources(folder)
    assert convert("assemble", folder, folder / "mixture") is None
    (folder / "data").mkdir()
    for split in ("train", "test"):
        rows().to_parquet(folder / "data" / f"{split}.parquet")
    (folder / "classes.txt").write_text(f"{WORDS[0]}\n{WORDS[1]}\n")
    for seed in range(2):
        (folder / f"seed_{seed}").mkdir()
        for model in "ab":
            weights = {"weights": f"{model}{seed}", "data": {"split": "test"}, "num_captions": 3}
            texts = {"kind": "captions", "number": 3, "max_length": 16, "cut": 1, "alike": 0, "repeated": 0}
            content = result(model, value=0.5 + seed / 10, texts=texts, **weights)
            (folder / f"seed_{seed}" / f"retrieval--{model}.json").write_text(json.dumps(content))
    stage = {"name": "sparse", "stage": "upcycle", "model": str(folder / "dense"), "preset": "clip_moe"}
    (folder / "run.yaml").write_text(yaml.safe_dump({"output_dir": str(folder / "run"), "stages": [stage]}))
    run_recipe(load_recipe(folder / "run.yaml"))
    weights = weights_fingerprint(str(folder / "run" / "sparse"))
    score = {"task": "symbols_pairs", "metrics": {"group": 0.5}, "primary": {"group": "group score"}}
    (folder / "run" / "scores").mkdir()
    content = result("sparse", **score, weights=weights, source="sparse")
    (folder / "run" / "scores" / "symbols_pairs--sparse.json").write_text(json.dumps(content))
    spread = {"mean": 0.5, "lowest": 0.25, "highest": 0.75}
    collapse = [{"title": "pairs: group score", "routed": 0.5, "mean": 0.25, "error": 0.1}]
    summary = {"collapse": collapse, "entropy": spread, "most_entropy": 1.0, "agreement": spread}
    analysis = {"weights": weights, "source": "sparse", "summary": summary}
    (folder / "run" / "scores" / "experts.json").write_text(json.dumps(analysis))
    (folder / "run" / "scores" / "report.png").write_bytes(b"a picture")
    return folder


@pytest.fixture
def small_tasks(sources, monkeypatch):
    """The tasks of `evaluation.experts`, on a dozen images."""
    arguments = DataArguments(source=str(sources / "data"), split="test", caption_column="caption")
    monkeypatch.setitem(TASKS, "small", retrieval_task(arguments))


def arguments(sources, out, command, model):
    match command:
        case "evaluate":
            data = ["--dataset", sources / "data", "--classes", sources / "classes.txt"]
            tasks = ["--tasks", "retrieval, zero_shot, linear_probe"]
            return ["--model", sources / model, *data, *tasks, "--output-dir", out]
        case "experts":
            return ["--model", sources / model, "--tasks", "small", "--output-dir", out]
        case "report":
            return [*sorted((sources / "seed_0").glob("*.json")), "--output-dir", out, "--baseline", "a"]
        case "seeds":
            return [sources / "seed_0", sources / "seed_1", "--output-dir", out, "--baseline", "a"]
        case "publish":
            return [sources / model, "user/clip", "--dry-run", out]


def replaced(argv, option=None, value=None):
    """The arguments with another value of an option, or with one more."""
    if option in argv:
        place = argv.index(option)
        return [*argv[:place], option, value, *argv[place + 2 :]]
    return [*argv, option, value] if option else argv


def ended(command, argv):
    """What a command ended with in this process: None, or its line of error; 2 of argparse."""
    try:
        MAINS[command]([str(argument) for argument in argv])
    except SystemExit as stop:
        return stop.code
    return None


@pytest.fixture
def check(sources, tmp_path, monkeypatch):
    """Runs a command on sources one file of which is damaged, and mends it.

    `publish` starts a process to check what it wrote, which takes seconds: where `is_checked` is not set, it ends
    before.
    """

    def checked(command, file=None, damage=None, *more, model="dense", may_succeed=False, kept=(), is_checked=False):
        place = tmp_path / "place"
        place.mkdir()
        path, whole = file and sources / file, file and (sources / file).read_bytes()
        if kept:
            shutil.copytree(kept, place / "out")
        if not is_checked:
            monkeypatch.setattr(bundle, "verify", lambda model, folder: None)
        try:
            if damage is not None and damage(path) is SKIP:
                place.rmdir()
                return
            error = ended(command, replaced(arguments(sources, place / "out", command, model), *more))
        finally:
            if file:
                path.write_bytes(whole)
        cases[command] += 1
        what = (command, file, damage, more, error)
        if error is None:
            assert may_succeed and (place / "out").is_dir(), what
        else:
            is_line = isinstance(error, str) and error.startswith("error: ") and "\n" not in error
            assert (is_line and len(error) > len("error: ")) or error == 2, what
            left = [path for path in place.rglob("*") if path.is_file()]
            assert left or not list(place.iterdir()), what
            for path in () if kept else left:  # of what was done before
                assert command == "evaluate" and ("embeddings" in path.parts or read_result(path)), what
        for embeddings in () if kept else place.glob("out/embeddings/*/0*"):
            assert np.isfinite(load_file(embeddings)["embeds"]).all()
        hidden = [path for path in place.rglob("*") if path.name.endswith((".partial", ".tmp", ".lock"))]
        assert not hidden, what
        shutil.rmtree(place)

    return checked


def sample(damages, key, number):
    return random.Random(key).sample(damages, number)


def cut(share, content):
    return content[: int(share * (len(content) - 2))]


CUTS = [functools.partial(bytes_of, functools.partial(cut, share)) for share in (0.1, 0.5, 0.98)]


def fields(keys):
    return [functools.partial(field, key if isinstance(key, tuple) else (key,), v) for key in keys for v in VALUES]


# ---- evaluation

MODELS = [("evaluate", "dense"), ("evaluate", "sparse"), ("experts", "sparse"), ("publish", "sparse")]
MIXTURE = [("evaluate", "mixture"), ("publish", "mixture")]


@pytest.mark.parametrize("command, model", MODELS)
def test_models(check, small_tasks, command, model):
    for damage in sample(CONFIGURATIONS, command + model, 16):
        harmless = damage.func is field and damage.args[0] != ("model_type",)
        check(command, f"{model}/config.json", damage, model=model, may_succeed=harmless)
    for damage in WEIGHTS.values():
        check(command, f"{model}/model.safetensors", damage, model=model)
    for file, damage in sample(HALVES, command + model, 16):
        check(command, f"{model}/{file}", damage, model=model, may_succeed=damage.func is field)


@pytest.mark.parametrize("command, model", MIXTURE)
def test_mixtures(check, command, model):
    for damage in sample(CONFIGURATIONS, command + model, 8):
        harmless = damage.func is field and damage.args[0] != ("model_type",)
        check(command, f"{model}/expert_1/config.json", damage, model=model, may_succeed=harmless)
    for damage in sample(fields(["experts", "centers", "model_type", "temperature"]), command, 20):
        check(command, f"{model}/config.json", damage, model=model, may_succeed=True)
    for damage in sample(list(WEIGHTS.values()), command, 6):
        check(command, f"{model}/expert_1/model.safetensors", damage, model=model)


def of_rows(change, path):
    change(rows()).to_parquet(path)


DATA = [functools.partial(bytes_of, lambda content: b""), functools.partial(bytes_of, lambda content: b"x" * 100)]
DATA += CUTS
for change in (
    lambda r: r.select([]),
    lambda r: r.select([0]),
    lambda r: r.remove_columns("image"),
    lambda r: r.remove_columns("caption"),
    lambda r: r.remove_columns("label"),
    lambda r: r.rename_column("image", "Image"),
    *(
        lambda r, column=column, value=value: r.remove_columns(column).add_column(column, [value] * len(r))
        for column, value in itertools.product(
            ("image", "caption", "label"), (None, "", "no file", 3, 0.5, True, b"x", [], ["a"], [None], {"a": 1}, [[1]])
        )
    ),
):
    DATA.append(functools.partial(of_rows, change))


def test_data(check):
    for number, damage in enumerate(DATA):
        check("evaluate", f"data/{('test', 'test', 'train')[number % 3]}.parquet", damage, may_succeed=True)


@pytest.mark.parametrize("content", ["", "\n", "\0", "a\na\n", f"{WORDS[0]}\n", "\ud800", b"\xff\xfe\x00", b"\x89PNG"])
def test_classes(check, content):
    content = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
    check("evaluate", "classes.txt", functools.partial(bytes_of, lambda _: content))


FOLDERS = ("", "x\0y", "/dev/null", "/dev/null/x", "x" * 300)
# Command -> its options -> values of each
OPTIONS = {
    "evaluate": {
        "--templates": ("", "{", "{}{}", "{0.__class__}", "{!r}", "a", "\0", "{:9999999}"),
        "--batch-size": ("0", "-1", "x", "1e3"),
        "--num-samples": ("0", "-1", "x", "1e3"),
        "--device": ("meta", "nope", "cuda:99", "", "cpu:x"),
        "--split": ("", "nonsense", "test[", "test[:0]", "*", "../x"),
        "--train-split": ("", "nonsense"),
        "--dataset": ("", "nowhere", "/", "symbols/x", "a/b/c", "{nope}.tar", "x\0y", "*.parquet"),
        "--image-column": ("", "caption", "label", "nope"),
        "--caption-column": ("", "image", "nope"),
        "--label-column": ("", "image", "nope"),
        "--classes": ("nowhere", ".", "x\0y"),
        "--tasks": ("", ",", "nope", "retrieval,retrieval", "symbols_pairs,,"),
        "--name": ("", " ", "\n"),
        "--model": ("", "nowhere", "/", "a/b/c", "x\0y", ".."),
        "--output-dir": FOLDERS,
    },
    "experts": {
        "--num-experts-per-tok": ("0", "-1", "5", "9" * 30, "x"),
        "--tasks": ("", "nope", "small,small", ","),
        "--batch-size": ("0",),
        "--device": ("meta",),
        "--model": ("", "nowhere"),
        "--output-dir": FOLDERS,
    },
    "report": {"--baseline": ("", "nope"), "--output-dir": FOLDERS},
    "seeds": {"--baseline": ("", "nope"), "--output-dir": FOLDERS},
    "publish": {"--base-model": ("/x", ""), "--license": ("a\nb",)},
}
ARGUMENTS = [
    (command, option, value)
    for command, options in OPTIONS.items()
    for option, values in options.items()
    for value in values
]
MAY_SUCCEED = [("publish", "--license", "a\nb")]


@pytest.mark.parametrize("command, option, value", ARGUMENTS, ids=lambda part: repr(part)[:40])
def test_arguments(check, small_tasks, command, option, value):
    model = {"experts": "sparse", "publish": "run/sparse"}.get(command, "dense")
    check(command, None, None, option, value, model=model, may_succeed=(command, option, value) in MAY_SUCCEED)


@pytest.mark.parametrize("path", ["nowhere", ".", "/dev/null", "x\0y"])
@pytest.mark.parametrize("command", ["report", "seeds"])
def test_results_that_are_not_there(sources, command, path):
    cases[command] += 1
    assert ended(command, [path, path, "--output-dir", sources / "nothing"]).startswith("error: ")
    assert not (sources / "nothing").exists()


RESULT_FILE = [functools.partial(text, content) for content in NO_OBJECT]
RESULT_FILE += CUTS + [functools.partial(bytes_of, lambda content: b"\xff" + content)]


RESULT_FIELDS = fields([*result("a"), "weights", "data", "num_captions", "texts", ("texts", "cut"), ("texts", "kind")])
RESULT_FIELDS += fields([("metrics", "recall"), ("primary", "recall")])


def test_results_that_are_there_and_kept_embeddings(check, sources, tmp_path):
    """Damaged, of the same evaluation: each is named, or what it holds has no part in the result."""
    kept = tmp_path / "kept"
    assert ended("evaluate", arguments(sources, kept, "evaluate", "dense")) is None
    whole = {path: path.read_bytes() for path in kept.rglob("*") if path.is_file()}
    damages = sample(RESULT_FILE, "kept", 5) + sample(RESULT_FIELDS, "kept", 8)
    damages = {".json": damages, ".safetensors": [d for k, d in WEIGHTS.items() if k not in ("one less", "not finite")]}
    for path, content in whole.items():
        for damage in damages[path.suffix]:
            damage(path)
            check("evaluate", kept=kept, may_succeed=True)
            path.write_bytes(content)


def test_report_and_seeds(check):
    for damage in RESULT_FILE + RESULT_FIELDS:
        harmless = damage.func is field
        for command in ("report", "seeds"):
            check(command, "seed_0/retrieval--b.json", damage, may_succeed=harmless)


def test_models_without_experts_and_data_of_experts(check, small_tasks):
    for model in ("dense", "mixture", "heads_of_64", "llava"):
        check("experts", model=model, may_succeed=model == "heads_of_64")
    for damage in sample(DATA, "experts", 10):
        check("experts", "data/test.parquet", damage, model="sparse", may_succeed=True)


@pytest.fixture
def full_disk(capsys):
    """Makes files end at a number of bytes for this process, as a full disk does; what it prints goes to none."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [0, 10, 1000, 20_000], ids=["nothing", "no text", "no result", "no picture"])
@pytest.mark.parametrize("command", MAINS)
def test_full_disk(sources, small_tasks, tmp_path, full_disk, monkeypatch, command, size):
    """One line, and of what is there nothing is half written. What was done before is kept."""
    model = {"publish": "run/sparse", "experts": "sparse"}.get(command, "dense")
    argv = arguments(sources, tmp_path / "out", command, model)
    if command in ("evaluate", "experts"):  # data that a library prepares in folders of its own
        with tempfile.TemporaryDirectory() as other:
            assert ended(command, arguments(sources, Path(other) / "out", command, model)) is None
    full_disk(size)
    error = ended(command, argv)
    full_disk(resource.RLIM_INFINITY)
    cases[command] += 1
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    if error is None:  # its files are smaller
        assert left and max(path.stat().st_size for path in left) <= size
        return
    assert error.startswith("error: ") and "\n" not in error
    assert left or not list(tmp_path.iterdir())
    for path in left:
        assert command == "evaluate" and (path.parent.name == "embeddings" and load_file(path) or read_result(path))


# ---- publishing

RUN = {
    "manifest.json": ["stage", "inputs", ("stage", "data"), ("stage", "model"), ("stage", "preset"), ("stage", "name")],
    "../recipe.yaml": [],
    "../scores/experts.json": [
        *("weights", "source", "summary"), ("summary", "collapse"), ("summary", "entropy"), ("summary", "agreement")
    ],
    "../scores/symbols_pairs--sparse.json": [
        *result("a"), "weights", ("metrics", "group"), ("primary", "group"), ("versions", "torch")
    ],
}  # fmt: skip
NO_RECORD = [*NO_OBJECT, "[null]", "[1]", "[{}]", '["x"]', "{}", '{"stage": {}}', "a: *b", "&a [*a]", "- !!python/x y"]
ATTEMPT = {"device": "cpu", "num_processes": 1, "commit": None, "seconds": 1.0}


@pytest.mark.parametrize("file", RUN)
def test_runs_that_are_published(check, file):
    damages = [functools.partial(text, content) for content in NO_RECORD] + fields(RUN[file])
    damages += CUTS
    if file == "manifest.json":
        for key, value in itertools.product(ATTEMPT, VALUES[1:]):
            damages.append(functools.partial(text, json.dumps({"stage": {}, "attempts": [ATTEMPT | {key: value}]})))
    if file == "../recipe.yaml":
        for value in VALUES[1:]:
            damages.append(functools.partial(text, json.dumps({"output_dir": value, "stages": value, "x": value})))
    for damage in sample(damages, file, min(len(damages), 28)):
        check("publish", f"run/sparse/{file}", damage, model="run/sparse", may_succeed=True)


@pytest.mark.parametrize("name", ["report.png", "routing.png"])
def test_pictures_that_are_no_files(check, sources, name):
    place = sources / "run" / "scores" / name
    before = place.read_bytes() if place.exists() else None
    for make in (Path.mkdir, lambda p: p.symlink_to("nowhere"), lambda p: p.symlink_to(p), lambda p: p.symlink_to("/")):
        place.unlink(missing_ok=True)
        make(place)
        check("publish", model="run/sparse", may_succeed=True)
        place.rmdir() if place.is_dir() and not place.is_symlink() else place.unlink()
    if before is not None:
        place.write_bytes(before)


def test_what_is_published_is_checked(check):
    """With the process that loads it."""
    check("publish", model="run/sparse", may_succeed=True, is_checked=True)
    damage = functools.partial(text, json.dumps({"output_dir": None, "stages": None}))
    check("publish", "run/recipe.yaml", damage, model="run/sparse", may_succeed=True, is_checked=True)
