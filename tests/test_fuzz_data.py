"""Hostile files of pairs and of benchmarks: each is read, or refused in one line that names it."""

import copy
import json
import math
import random

import pytest
from benchmark_folders import make_copy
from test_annotations import coco, karpathy, table
from tiny_sources import saved_to_disk, sharegpt4v

from data.pairs import load_pairs
from data.sources import DataArguments, reading
from evaluation.benchmarks.loading import benchmark_task
from evaluation.benchmarks.specs import BENCHMARKS

pytestmark = pytest.mark.slow

GONE = object()
VALUES = [GONE, None, True, -1, 0.7, 10**40, math.nan, "", "\0", "\ud800", "a\nb", "../x", "x" * 300, [], [None], {}]
BYTES = [b"", b"\0", b"\xff", b'"', b"\t", b"\n\n", b",", b"#", b"{", b"[" * 2000, b"9" * 5000, b"x" * 140_000]
# Benchmark -> which of its layouts, and the file that says what it holds
FILES = {
    "hateful_memes": (0, "dev.jsonl"),
    "mscoco_val2017": (0, "annotations/captions_val2017.json"),
    "flickr30k_all": (0, "results_20130124.token"),
    "flickr30k": (1, "dataset_flickr30k.json"),
    "urban1k": (0, "annotations/annotations.json"),
    "dci": (0, "annotations/sa_003.json"),
    "docci_long": (0, "docci_descriptions.jsonlines"),
    "iiw_long": (0, "IIW-400/data.jsonl"),
    "food101": (0, "meta/test.txt"),
    "cub200": (0, "train_test_split.txt"),
    "mmvp_vlm": (0, "Questions.csv"),
}


def places(content, place=()):
    """The ways to all values of a JSON; of a list, to the first one alone."""
    yield place
    keys = content if isinstance(content, dict) else range(min(len(content), 1)) if isinstance(content, list) else ()
    for key in keys:
        yield from places(content[key], (*place, key))


def with_value(content, place, value):
    content = copy.deepcopy([content])
    *way, last = (0, *place)
    part = content
    for key in way:
        part = part[key]
    if value is GONE:
        del part[last]
    else:
        part[last] = value
    return content[0] if content else None


def damaged(whole, rng):
    """Contents of a file in place of its whole one."""
    try:
        lines = [json.loads(line) for line in whole.decode().split("\n") if line] if b"\n{" in whole else None
        content = lines or json.loads(whole)
    except ValueError:
        content = None
    if content is not None:
        for place in places(content):
            for value in rng.sample(VALUES, 5):
                changed = with_value(content, place, value)
                as_lines = lines and isinstance(changed, list)
                yield "\n".join(map(json.dumps, changed)).encode() if as_lines else json.dumps(changed).encode()
    for more in rng.sample(BYTES, 6 if content is None else 3):
        start, length = rng.randrange(len(whole)), rng.choice([0, 0, 1, 30])
        yield whole[:start] + more + whole[start + length :]
    yield whole[: len(whole) // 2]


def require_read_or_refused(file, load, rng):
    whole = file.read_bytes()
    for content in damaged(whole, rng):
        file.write_bytes(content)
        try:
            load()
        except (ValueError, OSError) as error:
            folder = file.parents[len(file.parents) - 5]  # of the test
            assert "\n" not in str(error) and str(folder) in str(error), (content[:300], error)
    file.write_bytes(whole)


@pytest.mark.parametrize("name", FILES)
def test_benchmarks(tmp_path, name):
    benchmark, (number, file) = BENCHMARKS[name], FILES[name]
    make_copy(benchmark, benchmark.layouts[number], tmp_path / name)
    require_read_or_refused(
        tmp_path / name / file, lambda: benchmark_task(benchmark, tmp_path).load(), random.Random(name)
    )


def tsv(tmp_path):
    return table(tmp_path, "pairs.tsv")


@pytest.mark.parametrize("streaming", [False, True], ids=["loaded", "streamed"])
@pytest.mark.parametrize(
    ("source", "file"),
    [
        *((source, "*.*") for source in (table, tsv, coco, karpathy, sharegpt4v)),
        (saved_to_disk, "disk/state.json"),
    ],
)
def test_sources(tmp_path, source, file, streaming):
    arguments = DataArguments(**source(tmp_path), streaming=streaming)
    (file,) = tmp_path.glob(file)

    def load():
        with reading(arguments):  # as the loader reads streams
            list(load_pairs(arguments))

    require_read_or_refused(file, load, random.Random(source.__name__))
