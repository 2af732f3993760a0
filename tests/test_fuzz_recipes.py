"""Damaged recipes and arguments, by hypothesis: each is read as a recipe or ends in a line, or one for each of its
faults, never in a traceback.

The cases are the same in every run: RECIPES damaged recipes, TEXTS of pieces of YAML, COMMANDS of damaged arguments.
"""

import contextlib
import copy
import io

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_runs import recipe

from training.commands import train
from training.recipe import Recipe, load_recipe
from training.runner import run_recipe

pytestmark = pytest.mark.slow

RECIPES, TEXTS, COMMANDS = 1200, 500, 200

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 2, 10**9, 2**31, 2**32, 2**62, 2**63, -(2**63), 10**30, 0.5, -0.5, 1e300, 1e-300]),
    st.sampled_from([float("nan"), float("inf"), -float("inf")]),
    st.sampled_from(
        ["", " ", ".", "..", "/", "a/b", "-", "~", "null", "1e999", "9" * 5000, "symbols", "dense", "x" * 300]
    ),
    st.sampled_from(["recipe.yaml", "tuned.partial", "(", "\x00", "\ud800", "é", "\n", "*", "{", "%s", "{0}", "None"]),
    st.sampled_from(
        [[], {}, [[]], [None], {"": None}, {"x": {}}, {1: 2}, {None: 1}, [1, "a"], {"a": {"b": {"c": []}}}]
    ),
    st.text(max_size=8),
    st.integers(),
    st.floats(),
)


def whole():
    settings = recipe()
    data = {"source": "symbols", "num_samples": 8}
    settings["stages"] += [
        {"name": "features", "stage": "embed", "model": "tuned", "data": data},
        {"name": "clusters", "stage": "cluster", "features": "features", "num_image_clusters": 2},
        {"name": "scores", "stage": "evaluate", "models": {"a": "tuned"}, "tasks": ["symbols"], "baseline": "a"},
    ]
    return settings | {"seed": 0, "mixed_precision": "no", "trackers": [], "push_to_hub": {}}


def places(value, path=()):
    """The paths of all values in nested dictionaries and lists."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


@st.composite
def damaged(draw):
    """A recipe with up to three values replaced, left out, doubled or put under another key."""
    raw = copy.deepcopy(whole())
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from([path for path in places(raw) if path]))
        parent = raw
        for key in path[:-1]:
            parent = parent[key]
        key, how = path[-1], draw(st.sampled_from(["replaced", "left out", "added", "renamed"]))
        value = draw(ODD) if how in ("replaced", "added") else parent[key]
        if how in ("left out", "renamed"):
            del parent[key]
        if how != "left out":
            other = draw(st.text(max_size=5)) if how in ("added", "renamed") else key
            parent.insert(key, value) if isinstance(parent, list) and how != "replaced" else None
            if isinstance(parent, dict) or how == "replaced":
                parent[other] = value
    return raw


PIECES = st.sampled_from(
    [*"stages name stage train : - { } [ ] , *a ' \" # ? 1 0x 1:1 ~ \\ @ `".split(), *"2020-99-99 defaults".split()]
    + [": ", "- ", "\n", "\n  ", "&a ", "<<: *a", "!x ", "!!python/name:os.system ", "|\n", ">\n", "%YAML 9.9\n"]
    + ["---\n", "...\n", "? ", "!!int ", "!!set ", "!!binary ", "\t", "\x07", "\ufeff", "output_dir: out\n"]
)


def fuzz(number):
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=number, derandomize=True, database=None, deadline=None, suppress_health_check=checks)


def is_read_or_refused(path, overrides=None):
    try:
        loaded = load_recipe(path, overrides)
    except (ValueError, OSError) as error:
        assert str(error).strip()
    else:
        assert isinstance(loaded, Recipe)


@fuzz(RECIPES)
@given(raw=damaged())
def test_damaged_recipes_are_read_or_refused(tmp_path, raw):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(yaml.safe_dump(raw, allow_unicode=False).encode("utf-8", "surrogatepass"))
    is_read_or_refused(path)


@fuzz(TEXTS)
@given(pieces=st.lists(PIECES, max_size=30), place=st.integers(0, 2000))
def test_damaged_texts_are_read_or_refused(tmp_path, pieces, place):
    """Alone, and within a whole recipe."""
    path, text = tmp_path / "recipe.yaml", yaml.safe_dump(whole())
    for damaged_text in ("".join(pieces), text[:place] + "".join(pieces) + text[place:]):
        path.write_text(damaged_text, encoding="utf-8")
        is_read_or_refused(path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The file of a recipe of one stage that is done."""
    folder = tmp_path_factory.mktemp("fuzz")
    raw = recipe()
    raw |= {"output_dir": str(folder / "out"), "stages": raw["stages"][:1]}
    del raw["defaults"]
    (folder / "recipe.yaml").write_text(yaml.safe_dump(raw))
    run_recipe(load_recipe(folder / "recipe.yaml"))
    return folder / "recipe.yaml"


KEYS = st.sampled_from(
    "seed output_dirs stages.x defaults defaults.train defaults.initialize defaults.initialize.processor dense"
    " dense.stage dense.projection_dim dense.text_config dense.text_config.hidden_size dense..x . dense.processor"
    " mixed_precision trackers.x push_to_hub push_to_hub.x push_to_hub.dense.x - a=b".split()
    + [""]
)
WORDS = st.one_of(ODD.map(str), ODD.map(repr), st.lists(PIECES, max_size=4).map("".join))


@st.composite
def arguments(draw):
    match draw(st.sampled_from(["key", "key=", "option", "words"])):
        case "key":
            return [f"--{draw(KEYS)}", draw(WORDS)]
        case "key=":
            return [f"--{draw(KEYS)}={draw(WORDS)}"]
        case "option":
            return [draw(st.sampled_from(["--stages", "--experts"])), draw(WORDS)]
        case "words":
            return draw(st.lists(WORDS, min_size=1, max_size=3))


@fuzz(COMMANDS)
@given(damage=arguments())
def test_damaged_arguments_end_in_lines_or_in_the_same_run(finished, damage):
    """The only stage is done, so that what is no damage is a run that does nothing."""
    before = (finished.parent / "out" / "dense" / "manifest.json").read_bytes()
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        try:
            train.main(["--config", str(finished), *damage])
        except SystemExit as exit:
            usage = exit.code == 2 and "error: " in errors.getvalue().splitlines()[-1]  # of argparse
            first, *faults = ["error: "] if usage else str(exit.code).splitlines()  # each fault of a recipe has a line
            in_lines = all(line.startswith("  ") for line in faults)
            assert exit.code == 0 or (first.startswith("error: ") and in_lines)
    assert (finished.parent / "out" / "dense" / "manifest.json").read_bytes() == before
