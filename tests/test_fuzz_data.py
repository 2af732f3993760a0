"""Damaged files of pairs and of benchmarks: each is read, or refused in one line that names it."""

import pytest
from benchmark_folders import make_copy
from test_annotations import coco, karpathy, table
from test_fuzz import DAMAGES
from tiny_sources import saved_to_disk, sharegpt4v

from data.pairs import load_pairs
from data.sources import DataArguments, reading
from evaluation.benchmarks.loading import benchmark_task
from evaluation.benchmarks.specs import BENCHMARKS

pytestmark = pytest.mark.slow

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


def require_read_or_refused(tmp_path, file, load):
    whole = file.read_bytes()
    for name, damage in DAMAGES.items():
        file.write_bytes(damage(whole))
        try:
            load()
        except (ValueError, OSError) as error:
            assert "\n" not in str(error) and str(tmp_path) in str(error), (name, error)


@pytest.mark.parametrize("name", FILES)
def test_benchmarks(tmp_path, name):
    benchmark, (number, file) = BENCHMARKS[name], FILES[name]
    make_copy(benchmark, benchmark.layouts[number], tmp_path / name)
    require_read_or_refused(tmp_path, tmp_path / name / file, lambda: benchmark_task(benchmark, tmp_path).load())


def tsv(tmp_path):
    return table(tmp_path, "pairs.tsv")


@pytest.mark.parametrize("streaming", [False, True], ids=["loaded", "streamed"])
@pytest.mark.parametrize(
    ("source", "file"),
    [*((source, "*.*") for source in (table, tsv, coco, karpathy, sharegpt4v)), (saved_to_disk, "disk/state.json")],
)
def test_sources(tmp_path, source, file, streaming):
    arguments = DataArguments(**source(tmp_path), streaming=streaming)
    (file,) = tmp_path.glob(file)

    def load():
        with reading(arguments):  # as the loader reads streams
            list(load_pairs(arguments))

    require_read_or_refused(tmp_path, file, load)
