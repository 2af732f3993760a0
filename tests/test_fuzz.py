"""Damage to whatever is read: it ends in one line, or in a whole result; never in a traceback, and nothing half-written
is left."""

import functools
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from benchmark_folders import COPIES, make_copy
from converters import COMMANDS, run, sources
from safetensors.torch import load, save
from test_annotations import coco, karpathy, table
from tiny_sources import saved_to_disk, sharegpt4v

from clip_moe.data.arguments import DataArguments
from clip_moe.data.local_data import reading
from clip_moe.data.pairs import load_pairs
from clip_moe.evaluation.benchmarks.loading import benchmark_task
from clip_moe.evaluation.benchmarks.specs import BENCHMARKS

pytestmark = pytest.mark.slow
sources  # noqa: B018, a fixture

# --- Damages


def not_finite(state):
    [tensor for _, tensor in sorted(state.items()) if tensor.is_floating_point()][-1].fill_(math.nan)
    return state


def changed_tensors(change):
    return lambda content: save(change(load(content)), {"format": "pt"})


def flipped(content):
    """With other bytes near its start, where most of what can go wrong is said."""
    rng, changed = np.random.default_rng(0), bytearray(content)
    for place in rng.integers(min(len(content), 4000), size=8):
        changed[place] = rng.integers(256)
    return bytes(changed)


DAMAGES = {
    "no object": lambda content: b"[3]",
    "half": lambda content: content[: len(content) // 2],
    "flipped": flipped,
}
# Weights that no command takes
TENSORS = {
    "one less": changed_tensors(lambda state: {key: state[key] for key in state if key != sorted(state)[5]}),
    "flat": changed_tensors(lambda state: {key: one.flatten() if one.dim() > 1 else one for key, one in state.items()}),
    "not finite": changed_tensors(not_finite),
}


# --- Converters

# Command -> the model of which it takes one tower, or the processor alone
TAKEN_IN_PART = {"llava": "sparse", "openai": "dense", "released-clip-moe": "dense"}


@pytest.mark.parametrize("command", COMMANDS.keys() - {"average", "dense", "long-context"})  # which load as upcycle
def test_damaged_files(sources, tmp_path, command):
    """Every file that a converter reads. It may succeed where a damage leaves all that it takes as it was."""
    named = [path for path in COMMANDS[command](sources) if isinstance(path, Path)]
    files = {file for path in named for file in ([path] if path.is_file() else path.rglob("*.*"))}
    for path in sorted(file for file in files if file.suffix in (".json", ".safetensors")):
        file, whole = path.relative_to(sources).as_posix(), path.read_bytes()
        is_read = file.endswith(("/config.json", ".safetensors")) and file.split("/")[0] != TAKEN_IN_PART.get(command)
        for damage, change in (DAMAGES | (TENSORS if file.endswith(".safetensors") else {})).items():
            path.write_bytes(change(whole))
            try:
                error = run(command, sources, tmp_path / "out")
            finally:
                path.write_bytes(whole)
            if error is None:
                assert damage == "flipped" or not is_read, (file, damage)
                shutil.rmtree(tmp_path / "out")
            else:
                assert error.startswith("error: ") and "\n" not in error and len(error) > len("error: "), (file, damage)
            assert not list(tmp_path.iterdir()), (file, damage)


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
            make_copy(benchmark.name, root / benchmark.name, number)
            load = benchmark_task(benchmark, root).load
            for file in filter(Path.is_file, sorted(root.rglob("*"))):
                kind = type(layout), re.sub(r"\d+", "", file.name)
                if file.suffix.lower() not in (".png", ".jpg", ".jpeg", ".ppm") and kind not in known:
                    known.add(kind)
                    require_read_or_refused(root, file, load)
    assert len(known) > 15


ONE_FILE = [table, functools.partial(table, name="pairs.tsv"), coco, karpathy, sharegpt4v]


@pytest.mark.parametrize("streaming", [False, True], ids=["loaded", "streamed"])
@pytest.mark.parametrize(
    ("source", "file"), [*((source, "*.*") for source in ONE_FILE), (saved_to_disk, "disk/state.json")]
)
def test_sources(tmp_path, source, file, streaming):
    arguments = DataArguments(**source(tmp_path), streaming=streaming)
    (file,) = tmp_path.glob(file)

    def load():
        with reading(arguments.source):  # as the loader reads streams
            list(load_pairs(arguments))

    require_read_or_refused(tmp_path, file, load)
