"""Damage to whatever a command reads: it ends in one line, or in a whole result; never in a traceback, and nothing
half-written is left."""

import copy
import functools
import itertools
import json
import logging as python_logging
import math
import re
import shutil
from pathlib import Path

import datasets
import numpy as np
import PIL.Image
import pytest
import yaml
from benchmark_folders import COPIES, make_copy
from converters import COMMANDS, make_sources
from converters import run as convert
from published_runs import made, write_analysis, write_result
from safetensors.numpy import load_file as load_arrays
from safetensors.torch import load, save
from test_annotations import coco, karpathy, table
from test_report import result
from tiny_clip import WORDS
from tiny_runs import recipe, same_weights
from tiny_runs import train as run_recipe_until
from tiny_sources import saved_to_disk, sharegpt4v
from transformers import logging

import clip_moe
from conversion.publishing import bundle
from data.pairs import load_pairs
from data.sources import DataArguments, reading
from evaluation.benchmarks.loading import benchmark_task
from evaluation.benchmarks.specs import BENCHMARKS
from evaluation.own_data import retrieval_task
from evaluation.tasks import TASKS
from model_cards.seeds import write_seeds
from training.recipe import Recipe, load_recipe

pytestmark = pytest.mark.slow
made  # noqa: B018, a fixture

# --- Damages


def not_finite(state):
    [tensor for _, tensor in sorted(state.items()) if tensor.is_floating_point()][-1].fill_(math.nan)
    return state


def of_tensors(change):
    return lambda content: save(change(load(content)), {"format": "pt"})


def flipped(content):
    """With other bytes near its start, where most of what can go wrong is said."""
    rng, changed = np.random.default_rng(0), bytearray(content)
    for place in rng.integers(min(len(content), 4000), size=8):
        changed[place] = rng.integers(256)
    return bytes(changed)


DAMAGES = {
    "empty": lambda content: b"",
    "no object": lambda content: b"[3]",
    "half": lambda content: content[: len(content) // 2],
    "flipped": flipped,
}
# Weights that no command takes
TENSORS = {
    "one less": of_tensors(lambda state: {key: state[key] for key in state if key != sorted(state)[5]}),
    "flat": of_tensors(lambda state: {key: one.flatten() if one.dim() > 1 else one for key, one in state.items()}),
    "not finite": of_tensors(not_finite),
}


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


@pytest.fixture(scope="module")
def sources(tmp_path_factory, made):
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
    shutil.copytree(made, folder / "run")
    write_result(folder / "run", "scores")
    write_analysis(folder / "run")
    (folder / "run" / "scores" / "report.svg").write_bytes(b"a picture")
    return folder


@pytest.fixture
def place(sources, monkeypatch, tmp_path):
    """An empty folder; the task of `evaluation.experts` has a dozen images, and no process checks a publication."""
    data = DataArguments(source=str(sources / "data"), split="test", caption_column="caption")
    monkeypatch.setitem(TASKS, "small", retrieval_task(data))
    monkeypatch.setattr(bundle, "verify", lambda model, folder: None)
    for name in ("here", "place"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "place"


def evaluation_of(model):
    def arguments(s, out):
        own = f"dataset: {s / 'data'}, split: test, classes: {s / 'classes.txt'}"
        tasks = [f"{{task: {task}, {own}}}" for task in ("zero_shot", "linear_probe")]
        tasks.append(f"{{task: retrieval, dataset: {s / 'data'}, split: test}}")
        return ["evaluate", out, "--models.a", s / model, "--tasks", *tasks]

    return arguments


def publication_of(model):
    return lambda s, out: ["publish", s / model, "user/clip", "--dry-run", out]


def converter(command):
    return lambda s, out: [command, out, *COMMANDS[command](s)]


# Command -> its arguments for folders of sources and an output
READERS = {
    **{command: converter(command) for command in COMMANDS},
    **{f"evaluate {model}": evaluation_of(model) for model in ("dense", "sparse", "mixture")},
    "analyze": lambda s, out: ["analyze", out, "--model", s / "sparse", "--tasks", "small"],
    "report": lambda s, out: [
        *("report", *sorted((s / "seed_0").glob("*.json"))),
        *("--output-dir", out, "--baseline", "a"),
    ],
    "seeds": lambda s, out: [s / "seed_0", s / "seed_1", "--output-dir", out, "--baseline", "a"],
    "publish": publication_of("run/sparse"),
    "publish mixture": publication_of("mixture"),
}


def files_of(command, sources, place):
    """What a command reads: the files that its arguments name, and those of other stages of the run."""
    named = [path for path in READERS[command](sources, place) if isinstance(path, Path) and path != place]
    named += [sources / "run"] * (command == "publish")
    files = {file for path in named for file in ([path] if path.is_file() else path.rglob("*.*"))}
    return sorted(file for file in files if file.suffix in (".json", ".safetensors", ".txt", ".parquet"))


# Command -> the model of which it takes one tower, or the processor alone
TAKEN_IN_PART = {"llava": "sparse", "openai": "dense", "released-clip-moe": "dense"}


def must_be_seen(command, file, damage):
    """Whether a damage leaves nothing that a command could do as before. A mixture's experts are compared when used."""
    unused = file.split("/")[0] == TAKEN_IN_PART.get(command) or (command, damage) == ("publish mixture", "not finite")
    return file.endswith(("/config.json", ".safetensors")) and damage != "flipped" and not unused


def ended(main, arguments):
    """The end of a command in this process: None, or its line of error."""
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as stop:
        return stop.code
    return None


def check(name, sources, place, may_succeed):
    """Runs a command, whose output is `place / "out"`, and removes that."""
    main = write_seeds.main if name == "seeds" else clip_moe.main
    error = ended(main, READERS[name](sources, place / "out"))
    if error is None:
        assert may_succeed, name
    else:
        assert error.startswith("error: ") and "\n" not in error and len(error) > len("error: "), (name, error)
        assert not (place / "out").exists()
        for embeddings in place.glob("out.partial/embeddings/*/0*"):
            assert np.isfinite(load_arrays(embeddings)["embeds"]).all()
    hidden = [path for path in place.rglob("*") if path.suffix in (".partial", ".tmp", ".lock")]
    hidden = [path for path in hidden if "out.partial" not in path.parts]  # where a stage works
    assert not hidden, hidden
    shutil.rmtree(place)
    place.mkdir()


@pytest.mark.parametrize("command", READERS)
def test_damaged_files(sources, place, command):
    for path in files_of(command, sources, place):
        file, whole = path.relative_to(sources).as_posix(), path.read_bytes()
        for damage, change in (DAMAGES | (TENSORS if file.endswith(".safetensors") else {})).items():
            path.write_bytes(change(whole))
            try:
                check(command, sources, place, may_succeed=not must_be_seen(command, file, damage))
            except Exception as error:
                raise AssertionError(f"{command}: {file}, {damage}: {error!r:.300}") from error
            finally:
                path.write_bytes(whole)


# --- Files of pairs and of benchmarks: each is read, or refused in one line that names it


def require_read_or_refused(tmp_path, file, load):
    whole = file.read_bytes()
    for name, damage in DAMAGES.items():
        file.write_bytes(damage(whole))
        try:
            load()
        except (ValueError, OSError) as error:
            assert "\n" not in str(error) and str(tmp_path) in str(error), (name, error)


def test_benchmarks(tmp_path):
    """Each name of a file in each kind of layout, but images."""
    known = set()
    for benchmark in map(BENCHMARKS.get, COPIES):
        for number, layout in enumerate(benchmark.layouts):
            root = tmp_path / f"{benchmark.name}_{number}"
            make_copy(benchmark, layout, root / benchmark.name)
            load = benchmark_task(benchmark, root).load
            for file in filter(Path.is_file, sorted(root.rglob("*"))):
                kind = type(layout), re.sub(r"\d+", "", file.name)
                if file.suffix.lower() not in (".png", ".jpg", ".jpeg", ".ppm") and kind not in known:
                    known.add(kind)
                    require_read_or_refused(root, file, load)
    assert len(known) > 40


ONE_FILE = [table, functools.partial(table, name="pairs.tsv"), coco, karpathy, sharegpt4v]


@pytest.mark.parametrize("streaming", [False, True], ids=["loaded", "streamed"])
@pytest.mark.parametrize(
    ("source", "file"), [*((source, "*.*") for source in ONE_FILE), (saved_to_disk, "disk/state.json")]
)
def test_sources(tmp_path, source, file, streaming):
    arguments = DataArguments(**source(tmp_path), streaming=streaming)
    (file,) = tmp_path.glob(file)

    def load():
        with reading(arguments):  # as the loader reads streams
            list(load_pairs(arguments))

    require_read_or_refused(tmp_path, file, load)


# --- Recipes: each is read, or refused in a line, or in one for each of its faults

PAIRS = {"data": {"source": "symbols", "num_samples": 16}}
SETTINGS = recipe() | {"seed": 0, "mixed_precision": "no", "trackers": [], "push_to_hub": {}}
SETTINGS["stages"] += [
    {"name": "features", "stage": "embed", "model": "tuned", **PAIRS},
    {"name": "clusters", "stage": "cluster", "features": "features", "num_image_clusters": 2},
    {"name": "scores", "stage": "evaluate", "models": {"a": "tuned"}, "tasks": ["symbols"], "baseline": "a"},
]


def variants(content):
    """Copies of nested dictionaries and lists, in each of which a value is another one, or is left out."""
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        inner = variants(value) if isinstance(value, dict | list) else ()
        for other in (None, True, -1, 0.5, "", "a/b", [], [1, "a"], {"x": {}}, *inner):
            changed = copy.copy(content)
            changed[key] = other
            yield changed
        shorter = copy.copy(content)
        del shorter[key]
        yield shorter


def test_damaged_recipes_are_read_or_refused(tmp_path):
    for settings in variants(SETTINGS):
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(settings))
        try:
            assert isinstance(load_recipe(tmp_path / "recipe.yaml"), Recipe)
        except (ValueError, OSError) as error:
            assert str(error).strip(), settings


def run_until(folder, stop=None):
    """A recipe with all kinds of records: of stages, parts, checkpoints, the best model, results."""
    tasks = [{"task": "retrieval", "dataset": str(folder / "data"), "split": "train"}]
    best = {"tasks": tasks, "every_steps": 2, "keep_best": "retrieval-data/image_to_text_recall@1"}
    settings = {"max_steps": 5, "trainable": r"\.mlp\.experts\.", "evaluation": best}

    def add_stages(recipe):
        recipe["stages"][2:2] = [
            {"name": "features", "stage": "embed", "model": "dense", **PAIRS},
            {"name": "clusters", "stage": "cluster", "features": "features", "num_image_clusters": 2},
            {"name": "scores", "stage": "evaluate", "models": {"a": "dense"}, "tasks": tasks},
        ]

    run_recipe_until(folder, stop, add_stages, **settings, **PAIRS)


def test_damaged_records_end_in_one_line(tmp_path):
    """Every JSON file of a run that was killed after its checkpoint of step 4; where it goes on, as if nothing was."""
    (tmp_path / "data").mkdir()
    rows().to_parquet(tmp_path / "data" / "train.parquet")
    run_until(tmp_path, stop=4)
    shutil.copytree(tmp_path / "out", tmp_path / "stopped")
    run_until(tmp_path)
    (tmp_path / "out").rename(tmp_path / "whole")
    for number, file in enumerate(sorted((tmp_path / "stopped").rglob("*.json"))):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        shutil.copytree(tmp_path / "stopped", tmp_path / "out")
        damage = list(DAMAGES.values())[number % len(DAMAGES)]
        (tmp_path / "out" / file.relative_to(tmp_path / "stopped")).write_bytes(damage(file.read_bytes()))
        for plan in (["--plan"], []):
            end = ended(clip_moe.main, ["run", "--config", tmp_path / "recipe.yaml", *plan])
            assert end is None or end.startswith("error: "), (file, end)
        if end is None:
            assert same_weights(tmp_path / "out" / "tuned", tmp_path / "whole" / "tuned"), file
