"""Damaged recipes and arguments, by hypothesis: each is read as a recipe or ends in a line, or one for each of its
faults, never in a traceback.

The cases are the same in every run: RECIPES damaged recipes, TEXTS of pieces of YAML, COMMANDS of damaged arguments.
"""

import contextlib
import copy
import io
import json
import shutil

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from test_fuzz import ODD, ended, fuzz, places, rows, with_value, written
from tiny_runs import recipe, same_weights
from tiny_runs import train as run_recipe_until

from conversion.commands import publish
from conversion.publishing import bundle
from training.commands import train
from training.recipe import Recipe, load_recipe
from training.runner import run_recipe

RECIPES, TEXTS, COMMANDS = 1200, 500, 200

ANY = st.one_of(ODD, st.text(max_size=8), st.integers(), st.floats())


def whole():
    settings = recipe()
    data = {"source": "symbols", "num_samples": 8}
    settings["stages"] += [
        {"name": "features", "stage": "embed", "model": "tuned", "data": data},
        {"name": "clusters", "stage": "cluster", "features": "features", "num_image_clusters": 2},
        {"name": "scores", "stage": "evaluate", "models": {"a": "tuned"}, "tasks": ["symbols"], "baseline": "a"},
    ]
    return settings | {"seed": 0, "mixed_precision": "no", "trackers": [], "push_to_hub": {}}


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
        value = draw(ANY) if how in ("replaced", "added") else parent[key]
        if how in ("left out", "renamed"):
            del parent[key]
        if how != "left out":
            other = draw(st.text(max_size=5)) if how in ("added", "renamed") else key
            parent.insert(key, value) if isinstance(parent, list) and how != "replaced" else None
            if isinstance(parent, dict) or how == "replaced":
                parent[other] = value
    return raw


# Between spaces; ends of lines stand as ¶, spaces within as ·
PIECES = """
stages name stage train :· : -· ¶ ¶·· { } [ ] , &a· *a <<:·*a !x· !!python/name:os.system· ' " |¶ >¶ # %YAML·9.9¶ ---¶
...¶ ?· 1 0x 1:1 ~ 2020-99-99 !!int· !!set· !!binary· defaults output_dir:·out¶ \\ @ `
""".split()
PIECES = st.sampled_from([*(piece.replace("·", " ").replace("¶", "\n") for piece in PIECES), "\t", "\x07", "\ufeff"])


def is_read_or_refused(path, overrides=None):
    try:
        loaded = load_recipe(path, overrides)
    except (ValueError, OSError) as error:
        assert str(error).strip()
    else:
        assert isinstance(loaded, Recipe)


@pytest.mark.slow
@fuzz(RECIPES)
@given(raw=damaged())
def test_damaged_recipes_are_read_or_refused(tmp_path, raw):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(yaml.safe_dump(raw, allow_unicode=False).encode("utf-8", "surrogatepass"))
    is_read_or_refused(path)


@pytest.mark.slow
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


KEYS = """
seed output_dirs stages.x defaults defaults.train defaults.initialize defaults.initialize.processor dense dense.stage
dense.projection_dim dense.text_config dense.text_config.hidden_size dense..x . dense.processor mixed_precision
trackers.x push_to_hub push_to_hub.x push_to_hub.dense.x - a=b
"""
KEYS = st.sampled_from([*KEYS.split(), ""])
WORDS = st.one_of(ANY.map(str), ANY.map(repr), st.lists(PIECES, max_size=4).map("".join))


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


@pytest.mark.slow
@fuzz(COMMANDS)
@given(damage=arguments())
def test_damaged_arguments_end_in_lines_or_in_the_same_run(finished, damage):
    """The only stage is done, so that what is no damage is a run that does nothing."""
    before = (finished.parent / "out" / "dense" / "manifest.json").read_bytes()
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            train.main(["--config", str(finished), *damage])
        except SystemExit as exit:
            first, *faults = str(exit.code).splitlines()  # each fault of a recipe has a line
            in_lines = all(line.startswith("  ") for line in faults)
            assert exit.code == 0 or (first.startswith("error: ") and in_lines)
    assert (finished.parent / "out" / "dense" / "manifest.json").read_bytes() == before


# --- Records: every JSON file of a run with a random value at a random place

FEW, MANY = 5, 60
PAIRS = {"data": {"source": "symbols", "num_samples": 16}}
# Of a model: what they say may be changed to something else that is as good
SETTINGS = ("config.json", "processor_config.json", "tokenizer.json", "tokenizer_config.json")


def run_until(folder, stop=None):
    """A recipe with all kinds of records: of stages, parts, checkpoints, the best model, results."""
    tasks = [{"task": "retrieval", "dataset": str(folder / "data"), "split": "train"}]
    best = {"tasks": tasks, "every_steps": 2, "keep_best": "retrieval-data/image_to_text_recall@1"}
    settings = {
        "max_steps": 5,
        "hidden_states": "states",
        "trainable": r"\.mlp\.experts\.",
        "evaluation": best,
        **PAIRS,
    }

    def add_stages(recipe):
        recipe["stages"][2:2] = [
            {"name": "features", "stage": "embed", "model": "dense", **PAIRS},
            {"name": "clusters", "stage": "cluster", "features": "features", "num_image_clusters": 2},
            {"name": "states", "stage": "hidden_states", "model": "sparse", **PAIRS},
            {"name": "scores", "stage": "evaluate", "models": {"a": "dense"}, "tasks": tasks},
        ]

    run_recipe_until(folder, stop, add_stages, **settings)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that was killed after its checkpoint of step 4, and the same run that went on."""
    folder = tmp_path_factory.mktemp("records")
    (folder / "data").mkdir()
    rows().to_parquet(folder / "data" / "train.parquet")
    run_until(folder, stop=4)
    shutil.copytree(folder / "out", folder / "stopped")
    run_until(folder)
    (folder / "out").rename(folder / "whole")
    return folder


def check_records(folder, number, damage, is_published):
    """Plans, goes on, and publishes."""
    shutil.rmtree(folder / "out", ignore_errors=True)
    shutil.copytree(folder / "stopped", folder / "out")
    files = sorted((folder / "out").rglob("*.json"))
    path = files[number % len(files)]
    text = written(lambda content: json.dumps(with_value(json.loads(content), *damage)), path.read_text())
    path.write_text(path.read_text() if text is None else text)
    command = ["--config", folder / "recipe.yaml"]
    ends = [ended(train.main, [*command, "--plan"]), ended(train.main, command)]
    if ends[-1] is None and path.name not in SETTINGS:
        assert same_weights(folder / "out" / "tuned", folder / "whole" / "tuned"), path.name
    if is_published:
        shutil.rmtree(folder / "published", ignore_errors=True)
        ends.append(ended(publish.main, [folder / "out" / "sparse", "user/x", "--dry-run", folder / "published"]))
    for end in ends:
        assert end is None or end.startswith("error: "), (path.name, damage, end)


DAMAGE = {
    "number": st.integers(0, 10**6),
    "damage": st.tuples(st.integers(0, 9), st.integers(0, 10**6), ODD | st.just(...)),
}


@fuzz(FEW)
@given(**DAMAGE)
def test_damaged_records_end_in_one_line(stopped, number, damage):
    check_records(stopped, number, damage, is_published=False)


@pytest.mark.slow
@fuzz(MANY)
@given(**DAMAGE)
def test_many_damaged_records_end_in_one_line(stopped, monkeypatch, number, damage):
    monkeypatch.setattr(bundle, "verify", lambda model, folder: None)  # which starts a process
    check_records(stopped, number, damage, is_published=True)
