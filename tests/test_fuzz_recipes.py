"""Damaged recipes and records: each is read, or ends in a line, or one for each of its faults, never in a traceback."""

import copy
import shutil

import pytest
import yaml
from test_fuzz import DAMAGES, ended, rows
from tiny_runs import recipe, same_weights
from tiny_runs import train as run_recipe_until

from training.commands import train
from training.recipe import Recipe, load_recipe

pytestmark = pytest.mark.slow

PAIRS = {"data": {"source": "symbols", "num_samples": 16}}
# In place of a value; GONE: its key is left out
GONE = object()
VALUES = [GONE, None, True, -1, 0.5, "", "a/b", [], [1, "a"], {"x": {}}]


def whole():
    settings = recipe()
    settings["stages"] += [
        {"name": "features", "stage": "embed", "model": "tuned", **PAIRS},
        {"name": "clusters", "stage": "cluster", "features": "features", "num_image_clusters": 2},
        {"name": "scores", "stage": "evaluate", "models": {"a": "tuned"}, "tasks": ["symbols"], "baseline": "a"},
    ]
    return settings | {"seed": 0, "mixed_precision": "no", "trackers": [], "push_to_hub": {}}


def places(value, path=()):
    """The paths of all values in nested dictionaries and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def with_value(content, path, value):
    content = parent = copy.deepcopy(content)
    for key in path[:-1]:
        parent = parent[key]
    if value is GONE:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return content


@pytest.mark.parametrize("place", list(places(whole())), ids=lambda place: ".".join(map(str, place)))
def test_damaged_recipes_are_read_or_refused(tmp_path, place):
    path = tmp_path / "recipe.yaml"
    for value in VALUES:
        path.write_text(yaml.safe_dump(with_value(whole(), place, value)))
        try:
            loaded = load_recipe(path)
        except (ValueError, OSError) as error:
            assert str(error).strip()
        else:
            assert isinstance(loaded, Recipe)


def run_until(folder, stop=None):
    """A recipe with all kinds of records: of stages, parts, checkpoints, the best model, results."""
    tasks = [{"task": "retrieval", "dataset": str(folder / "data"), "split": "train"}]
    best = {"tasks": tasks, "every_steps": 2, "keep_best": "retrieval-data/image_to_text_recall@1"}
    settings = {"max_steps": 5, "hidden_states": "states", "trainable": r"\.mlp\.experts\.", "evaluation": best}

    def add_stages(recipe):
        recipe["stages"][2:2] = [
            {"name": "features", "stage": "embed", "model": "dense", **PAIRS},
            {"name": "clusters", "stage": "cluster", "features": "features", "num_image_clusters": 2},
            {"name": "states", "stage": "hidden_states", "model": "sparse", **PAIRS},
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
            end = ended(train.main, ["--config", tmp_path / "recipe.yaml", *plan])
            assert end is None or end.startswith("error: "), (file, end)
        if end is None:
            assert same_weights(tmp_path / "out" / "tuned", tmp_path / "whole" / "tuned"), file
