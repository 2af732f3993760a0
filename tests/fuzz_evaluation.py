"""What the fuzz of evaluation and of publishing shares: sources, and a check that a command ends in one line."""

import collections
import functools
import json
import logging as python_logging
import math
import random
import shutil

import datasets
import numpy as np
import PIL.Image
import pytest
import yaml
from converters import make_sources
from converters import run as convert
from safetensors.numpy import load_file
from test_fuzz_conversion import SKIP, bytes_of, field
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
            error = ended(command, [*arguments(sources, place / "out", command, model), *more])
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
