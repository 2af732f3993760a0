"""Damaged runs: publishing ends in one line, or in success; never in a traceback, and nothing half-written is left."""

import functools
import itertools
import json
from pathlib import Path

import fuzz_evaluation
import pytest
from fuzz_evaluation import CUTS, VALUES, fields, sample
from test_fuzz_conversion import NO_OBJECT, text
from test_report import result

pytestmark = pytest.mark.slow

quiet, sources, check = fuzz_evaluation.quiet, fuzz_evaluation.sources, fuzz_evaluation.check

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


@pytest.mark.parametrize("words", [["--base-model", "/x"], ["--base-model", ""], ["--license", "a\nb"]], ids=repr)
def test_arguments_of_publish(check, words):
    check("publish", None, None, *words, model="run/sparse", may_succeed=words[0] == "--license")


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
