"""Damage to whatever a command reads, files and arguments: it ends in one line, or in a whole result; never in a
traceback, and nothing half-written is left. The cases are the same in every run; `pytest -s` prints how many they are.
"""

import collections
import contextlib
import functools
import itertools
import json
import logging as python_logging
import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import datasets
import numpy as np
import PIL.Image
import pytest
import yaml
from converters import COMMANDS, make_sources
from converters import run as convert
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file as load_arrays
from safetensors.torch import load, save
from test_report import result
from tiny_clip import WORDS
from transformers import logging

from conversion.commands import publish
from conversion.publishing import bundle
from data.sources import DataArguments
from evaluation.commands import evaluate, experts, report
from evaluation.own_data import retrieval_task
from evaluation.tasks import TASKS
from model_cards.seeds import write_seeds
from records.provenance import weights_fingerprint
from records.result_schema import read_result
from training.recipe import load_recipe
from training.runner import run_recipe

pytestmark = pytest.mark.slow

CASES = 50  # of each command
cases = collections.Counter()

# --- Damages

NO_OBJECT = ["", "null", "[]", "3", '"text"', "{", "nonsense", "\0", "[" * 100_000, '{"a":' * 100_000]
NUMBERS = [0, -1, 1, 3, 10**9, 2**32, 2**63, -(2**63), 10**30, 0.5, 1e300, math.nan, math.inf, -math.inf]
TEXTS = ["", " ", "..", "/", "a/b", "-", "~", "2", "x" * 300, "\0", "\ud800", "a\nb", "*", "{0}", "%s", "None", "bert"]
NESTED = [[], {}, [1], [None], {"": None}, {"x": {}}, [1, "a"], {"recall": "x"}]
ODD = st.sampled_from([None, True, *NUMBERS, *TEXTS, *NESTED])
DEEP = json.loads("[" * 900 + "]" * 900)


def of_matrices(change, state):
    return {key: change(tensor) if tensor.dim() > 1 else tensor for key, tensor in state.items()}


def not_finite(state):
    [tensor for _, tensor in sorted(state.items()) if tensor.is_floating_point()][-1].fill_(math.nan)
    return state


# Weights that no command takes
TENSORS = {
    "none": lambda state: {},
    "one less": lambda state: {key: state[key] for key in state if key != sorted(state)[5]},
    "one more": lambda state: state | {"more": next(iter(state.values())).clone()},
    "flat": functools.partial(of_matrices, lambda tensor: tensor.flatten()),
    "no rows": functools.partial(of_matrices, lambda tensor: tensor[:0]),
    "bytes": lambda state: {key: tensor.char() for key, tensor in state.items()},
    "not finite": not_finite,
}
CELLS = [None, "", "no file", 3, 0.5, True, b"x", [], ["a"], [None], {"a": 1}, [[1]]]


def without(column, table):
    return table.remove_columns(column)


def with_cells(column, cell, table):
    return without(column, table).add_column(column, [cell] * len(table))


COLUMNS = ("image", "caption", "label")
ROWS = [
    lambda table: table.select([]),
    lambda table: table.select([0]),
    lambda table: table.rename_column("image", "Image"),
    *(functools.partial(without, column) for column in COLUMNS),
    *(functools.partial(with_cells, *both) for both in itertools.product(COLUMNS, CELLS)),
]


def places(value, path=()):
    """The paths of all values in nested dictionaries and lists."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def with_value(content, depth, number, value):
    """A nested value with another one, or none for ..., at one of the places of a depth."""
    content = {"whole": content}
    depths = sorted({len(path) for path in places(content)} - {0})
    paths = [path for path in places(content) if len(path) == depths[depth % len(depths)]]
    *parents, last = paths[number % len(paths)]
    inner = content
    for key in parents:
        inner = inner[key]
    inner[last] = {} if value is ... else value
    return content["whole"]


def json_with(content, *damage):
    return as_bytes(json.dumps(with_value(yaml.safe_load(content), *damage)))


def flipped(content, changes):
    changed = bytearray(content)
    for place, byte in changes:
        changed[place % min(len(changed), 4000)] = byte
    return bytes(changed)


def as_bytes(text):
    return text.encode("utf-8", "surrogatepass")


@st.composite
def damages(draw, files):
    """Draws a file, what happens to it, and the function of its content that does so."""
    file = draw(st.sampled_from(files))
    special = {".json": "value", ".yaml": "value", ".safetensors": "tensors", ".parquet": "rows"}.get(Path(file).suffix)
    kind = draw(st.sampled_from(["content", "cut", "flipped", *[special] * 3]))
    match kind:
        case "content":
            detail = draw(st.sampled_from(NO_OBJECT))
            return file, kind, detail, lambda content: as_bytes(detail)
        case "cut":
            detail = draw(st.integers(0, 98))
            return file, kind, detail, lambda content: content[: detail * (len(content) - 2) // 100]
        case "flipped":
            detail = draw(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=8))
            return file, kind, detail, lambda content: flipped(content, detail)
        case "tensors":
            detail = draw(st.sampled_from(list(TENSORS)))
            return file, kind, detail, lambda content: save(TENSORS[detail](load(content)), {"format": "pt"})
        case "rows":
            detail = draw(st.integers(0, len(ROWS) - 1))
            return file, kind, detail, lambda content: parquet(ROWS[detail](rows()))
        case _:
            detail = draw(st.integers(0, 9)), draw(st.integers(0, 10**6)), draw(ODD | st.sampled_from([..., DEEP]))
            return (
                file,
                kind,
                detail,
                lambda content: as_bytes(json.dumps(with_value(yaml.safe_load(content), *detail))),
            )


def fuzz(number):
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=number, derandomize=True, database=None, deadline=None, suppress_health_check=checks)


# --- What is damaged


def rows(number=12):
    """Images of 32 pixels in two classes, with captions of words that the tokenizer knows."""
    pixels = np.random.default_rng(number).integers(0, 256, (number, 32, 32, 3), np.uint8)
    columns = {
        "image": [PIL.Image.fromarray(image) for image in pixels],
        "caption": [WORDS[i % len(WORDS)] for i in range(number)],
        "label": [WORDS[i % 2] for i in range(number)],
    }
    return datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())


def parquet(table):
    with tempfile.NamedTemporaryFile(suffix=".parquet") as file:
        table.to_parquet(file.name)
        return Path(file.name).read_bytes()


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
    for seed, model in itertools.product(range(2), "ab"):
        weights = {"weights": f"{model}{seed}", "data": {"split": "test"}, "num_captions": 3}
        texts = {"kind": "captions", "number": 3, "max_length": 16, "cut": 1, "alike": 0, "repeated": 0}
        (folder / f"seed_{seed}").mkdir(exist_ok=True)
        content = json.dumps(result(model, value=0.5 + seed / 10, texts=texts, **weights))
        (folder / f"seed_{seed}" / f"retrieval--{model}.json").write_text(content)
    stage = {"name": "sparse", "stage": "upcycle", "model": str(folder / "dense"), "preset": "clip_moe"}
    (folder / "run.yaml").write_text(yaml.safe_dump({"output_dir": str(folder / "run"), "stages": [stage]}))
    scores = run_recipe(load_recipe(folder / "run.yaml")) / "scores"
    scores.mkdir()
    of_model = {"weights": weights_fingerprint(str(folder / "run" / "sparse")), "source": "sparse"}
    score = {"task": "symbols_pairs", "metrics": {"group": 0.5}, "primary": {"group": "group score"}}
    (scores / "symbols_pairs--sparse.json").write_text(json.dumps(result("sparse", **score, **of_model)))
    spread = {"mean": 0.5, "lowest": 0.25, "highest": 0.75}
    collapse = [{"title": "pairs: group score", "routed": 0.5, "mean": 0.25, "error": 0.1}]
    summary = {"collapse": collapse, "entropy": spread, "most_entropy": 1.0, "agreement": spread}
    (scores / "experts.json").write_text(json.dumps(of_model | {"summary": summary}))
    (scores / "report.png").write_bytes(b"a picture")
    return folder


@pytest.fixture(autouse=True)
def small(sources, monkeypatch, tmp_path):
    """The tasks of `evaluation.experts` on a dozen images, and no process that checks what is published."""
    data = DataArguments(source=str(sources / "data"), split="test", caption_column="caption")
    monkeypatch.setitem(TASKS, "small", retrieval_task(data))
    monkeypatch.setattr(bundle, "verify", lambda model, folder: None)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def parts(folder, *names):
    return [f"{folder}/{name}" for name in names]


def model_files(folder, *more):
    return parts(folder, "config.json", "model.safetensors", *processor_files(), *more)


def processor_files(folder=None):
    names = ("tokenizer.json", "tokenizer_config.json", "processor_config.json")
    return parts(folder, *names) if folder else names


def evaluation_of(model):
    return lambda s, out: [
        *("--model", s / model, "--tasks", "retrieval, zero_shot, linear_probe", "--output-dir", out),
        *("--dataset", s / "data", "--classes", s / "classes.txt"),
    ]


def publication_of(model):
    return lambda s, out: [s / model, "user/clip", "--dry-run", out]


DATA = ["data/train.parquet", "data/test.parquet", "classes.txt"]
MIXTURE = ["mixture/config.json", *parts("mixture/expert_1", "config.json", "model.safetensors")]
RUN = ["../recipe.yaml", "../scores/experts.json", "../scores/symbols_pairs--sparse.json", "manifest.json"]
CONVERTED = {
    "upcycle": model_files("dense"),
    "dense": model_files("sparse"),
    "average": model_files("dense"),
    "assemble": [*model_files("dense"), *model_files("sparse")],
    "unify": model_files("dense"),
    "long_context": model_files("dense"),
    "llava": [*model_files("llava"), "sparse/config.json", "sparse/model.safetensors"],
    "openai": ["openai.safetensors", *processor_files("dense")],
    "released_clip_moe": ["released.safetensors", *processor_files("dense")],
    "released_clip_moe --reverse": ["heads_of_64/config.json", "heads_of_64/model.safetensors"],
}
# Command -> its function, its arguments for folders of sources and an output, and the files that it reads
READERS = {name: (*COMMANDS[name], files) for name, files in CONVERTED.items()} | {
    "evaluate dense": (evaluate.main, evaluation_of("dense"), [*model_files("dense"), *DATA]),
    "evaluate sparse": (evaluate.main, evaluation_of("sparse"), model_files("sparse")),
    "evaluate mixture": (evaluate.main, evaluation_of("mixture"), MIXTURE),
    "experts": (
        experts.main,
        lambda s, out: ["--model", s / "sparse", "--tasks", "small", "--output-dir", out],
        [*model_files("sparse"), DATA[1]],
    ),
    "report": (
        report.main,
        lambda s, out: [*sorted((s / "seed_0").glob("*.json")), "--output-dir", out, "--baseline", "a"],
        ["seed_0/retrieval--b.json"],
    ),
    "seeds": (
        write_seeds.main,
        lambda s, out: [s / "seed_0", s / "seed_1", "--output-dir", out, "--baseline", "a"],
        ["seed_0/retrieval--b.json"],
    ),
    "publish": (publish.main, publication_of("run/sparse"), model_files("run/sparse", *RUN)),
    "publish mixture": (publish.main, publication_of("mixture"), MIXTURE),
}


def written(change, content):
    """The changed content, or None for a change that no file can hold."""
    with contextlib.suppress(ValueError, TypeError, OSError, IndexError, AttributeError, OverflowError, RecursionError):
        return change(content)


def must_be_seen(command, file, kind, detail):
    """Whether a damage leaves nothing that a command could do as before."""
    unused = command == "llava" and file.startswith("sparse") and detail in ("one less", "one more")
    return kind in ("content", "cut", "tensors") and file.endswith((".json", ".safetensors")) and not unused


def ended(main, arguments):
    """What a command ended with in this process: None, its line of error, or 2 of an argument that it has not."""
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as stop:
        return stop.code
    return None


def check(name, sources, place, *more, may_succeed=True):
    """Runs a command, whose output is `place / "out"`, and removes that."""
    main, arguments, _ = READERS[name]
    error = ended(main, [*arguments(sources, place / "out"), *more])
    cases[name] += 1
    if error is None:
        assert may_succeed, name
    else:
        is_line = isinstance(error, str) and error.startswith("error: ") and "\n" not in error
        assert (is_line and len(error) > len("error: ")) or error == 2, (name, error)
        for path in (path for path in place.rglob("*") if path.is_file()):  # of what was done before
            assert name.startswith("evaluate") and ("embeddings" in path.parts or read_result(path)), path
        for embeddings in place.glob("out/embeddings/*/0*"):
            assert np.isfinite(load_arrays(embeddings)["embeds"]).all()
    hidden = [path for path in place.rglob("*") if path.name.endswith((".partial", ".tmp", ".lock"))]
    assert not hidden, hidden
    shutil.rmtree(place)
    place.mkdir()


@pytest.fixture
def place(tmp_path):
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


@pytest.mark.parametrize("command", READERS)
def test_damaged_files(sources, place, command):
    @fuzz(CASES)
    @given(damage=damages(READERS[command][2]))
    def damaged(damage):
        file, kind, detail, change = damage
        path = sources / file
        whole = path.read_bytes()
        if (changed := written(change, whole)) is None:
            return
        path.write_bytes(changed)
        try:
            check(command, sources, place, may_succeed=not must_be_seen(command, file, kind, detail))
        except Exception as error:
            raise AssertionError(f"{command}: {file}, {kind} {str(detail)[:80]}: {error!r:.300}") from error
        finally:
            path.write_bytes(whole)

    damaged()


def test_damaged_output_of_before(sources, place, tmp_path):
    """Results and embeddings of the same evaluation are named, or what they hold has no part in the result."""
    kept = tmp_path / "kept"
    main, arguments, _ = READERS["evaluate dense"]
    assert ended(main, arguments(sources, kept)) is None
    files = [str(path.relative_to(kept)) for path in kept.rglob("*") if path.suffix in (".json", ".safetensors")]

    @fuzz(CASES // 2)
    @given(damage=damages(files))
    def damaged(damage):
        *what, change = damage
        shutil.copytree(kept, place / "out", dirs_exist_ok=True)
        changed = written(change, (place / "out" / what[0]).read_bytes())
        if changed is not None and what[2] not in ("one less", "not finite"):
            (place / "out" / what[0]).write_bytes(changed)
            error = ended(main, arguments(sources, place / "out"))
            assert error is None or error.startswith("error: "), (*what, error)

    damaged()


OUTPUTS = ["", "x\0y", "/dev/null", "/dev/null/x", "x" * 300]
# Command -> option -> what is wrong
ARGUMENTS = {
    "evaluate dense": {
        "--templates": ["", "{", "{}{}", "{0.__class__}", "{!r}", "a", "\0", "{:9999999}"],
        "--batch-size": ["0", "-1", "x", "1e3"],
        "--num-samples": ["0", "-1", "x", "1e3"],
        "--device": ["meta", "nope", "cuda:99", "", "cpu:x"],
        "--split": ["", "nonsense", "test[", "test[:0]", "*", "../x"],
        "--train-split": ["", "nonsense"],
        "--dataset": ["", "nowhere", "/", "symbols/x", "a/b/c", "{nope}.tar", "x\0y", "*.parquet"],
        "--image-column": ["", "caption", "label", "nope"],
        "--caption-column": ["", "image", "nope"],
        "--label-column": ["", "image", "nope"],
        "--classes": ["nowhere", ".", "x\0y"],
        "--tasks": ["nope", "retrieval,retrieval", "symbols_pairs,,"],
        "--name": ["", " ", "\n"],
        "--model": ["", "nowhere", "/", "a/b/c", "x\0y", ".."],
        "--output-dir": OUTPUTS,
    },
    "experts": {
        "--num-experts-per-tok": ["0", "-1", "5", "9" * 30, "x"],
        "--tasks": ["nope", "small,small"],
        "--batch-size": ["0"],
        "--device": ["meta"],
        "--model": ["", "nowhere"],
        "--output-dir": OUTPUTS,
    },
    "report": {"--baseline": ["", "nope"], "--output-dir": OUTPUTS},
    "seeds": {"--baseline": ["", "nope"], "--output-dir": OUTPUTS},
    "publish": {"--base-model": ["/x", ""]},
}


@pytest.mark.parametrize(
    "command, option", [(command, option) for command, options in ARGUMENTS.items() for option in options]
)
def test_wrong_arguments(sources, place, command, option):
    for value in ARGUMENTS[command][option]:
        check(command, sources, place, option, value, may_succeed=False)
    for source in ("nowhere", ".", "/dev/null", "x\0y") if command in ("report", "seeds") else ():
        error = ended(READERS[command][0], [source, source, "--output-dir", place / "out"])
        assert error.startswith("error: ") and not (place / "out").exists()


@pytest.mark.parametrize("name", ["report.png", "routing.png"])
def test_pictures_that_are_no_files(sources, place, name):
    picture = sources / "run" / "scores" / name
    for make in (Path.mkdir, lambda p: p.symlink_to("nowhere"), lambda p: p.symlink_to(p), lambda p: p.symlink_to("/")):
        picture.unlink(missing_ok=True)
        make(picture)
        check("publish", sources, place)
        picture.rmdir() if picture.is_dir() and not picture.is_symlink() else picture.unlink()


@pytest.mark.parametrize("size", [0, 10, 1000, 20_000], ids=["nothing", "no text", "no result", "no picture"])
@pytest.mark.parametrize("command", ["evaluate dense", "report", "seeds", "experts", "publish"])
def test_full_disk(sources, place, capsys, command, size):
    """One line, and of what is there nothing is half written. What was done before is kept."""
    main, arguments, _ = READERS[command]
    if command in ("evaluate dense", "experts"):  # data that a library prepares in folders of its own
        with tempfile.TemporaryDirectory() as other:
            assert ended(main, arguments(sources, Path(other) / "out")) is None
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))  # files end there for this process
    try:
        error = ended(main, arguments(sources, place / "out"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    left = [path for path in place.rglob("*") if path.is_file()]
    if error is None:  # its files are smaller
        assert left and max(path.stat().st_size for path in left) <= size
        return
    assert error.startswith("error: ") and "\n" not in error
    for path in left:
        assert command.startswith("evaluate")
        if "embeddings" not in path.parts:
            assert read_result(path)
        elif path.suffix == ".safetensors":
            assert load_arrays(path)


def test_in_processes_of_their_own(sources, place):
    """The same through the shell: one line on stderr, a status that is not 0, nothing left."""
    for command, file in (("upcycle", "dense/config.json"), ("dense", "sparse/model.safetensors")):
        whole = (sources / file).read_bytes()
        (sources / file).write_bytes(whole[:-4])
        line = [sys.executable, "-m", f"conversion.{command}", *map(str, READERS[command][1](sources, place / "out"))]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
        done = subprocess.run(line, capture_output=True, text=True, env=environment)
        (sources / file).write_bytes(whole)
        assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("error: cannot load ")
        assert "Traceback" not in done.stderr and not list(place.iterdir())
