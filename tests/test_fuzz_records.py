"""Every JSON file of a run with a random value at a random place: what reads it ends in one line, or does as before."""

import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_fuzz_evaluation import VALUES, rows
from test_fuzz_recipes import ODD, fuzz, places
from tiny_runs import same_weights, train

from conversion.commands import publish
from conversion.publishing import bundle
from training import commands

FEW, MANY = 5, 300
PAIRS = {"data": {"source": "symbols", "num_samples": 16}}
# Of a model: what they say may be changed to something else that is as good
SETTINGS = ("config.json", "processor_config.json", "tokenizer.json", "tokenizer_config.json")


def run(folder, stop=None):
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

    train(folder, stop, add_stages, **settings)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that was killed after its checkpoint of step 4, and the same run that went on."""
    folder = tmp_path_factory.mktemp("records")
    (folder / "data").mkdir()
    rows().to_parquet(folder / "data" / "train.parquet")
    run(folder, stop=4)
    shutil.copytree(folder / "out", folder / "stopped")
    run(folder)
    (folder / "out").rename(folder / "whole")
    return folder


@st.composite
def damages(draw):
    """Draws a file of a folder, a place in it by how deep that is, and what stands there then."""
    number, depth, place = (draw(st.integers(0, 10**6)) for _ in range(3))
    value = draw(st.one_of(ODD, st.sampled_from(VALUES)))

    def damage(folder):
        files = sorted(folder.rglob("*.json"))
        path = files[number % len(files)]
        content = json.loads(path.read_text())
        depths = sorted({len(keys) for keys in places(content)})
        keys = [keys for keys in places(content) if len(keys) == depths[depth % len(depths)]]
        *parents, last = ("whole", *keys[place % len(keys)])
        changed = inner = {"whole": content}
        for key in parents:
            inner = inner[key]
        inner[last] = {} if value is ... else value
        path.write_text(json.dumps(changed["whole"]))
        return path.name

    return damage


def check(folder, damage, is_published):
    """Plans, goes on, and publishes."""
    shutil.rmtree(folder / "out", ignore_errors=True)
    shutil.copytree(folder / "stopped", folder / "out")
    name = damage(folder / "out")
    command = ["--config", folder / "recipe.yaml"]
    ends = [ended_in(commands.train, [*command, "--plan"]), ended_in(commands.train, command)]
    if ends[-1] is None and name not in SETTINGS:
        assert same_weights(folder / "out" / "tuned", folder / "whole" / "tuned"), name
    if is_published:
        shutil.rmtree(folder / "published", ignore_errors=True)
        ends.append(ended_in(publish, [folder / "out" / "sparse", "user/x", "--dry-run", folder / "published"]))
    for end in ends:
        assert end is None or end.startswith("error: "), (name, end)


def ended_in(command, arguments):
    try:
        command.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        return stop.code
    return None


@fuzz(FEW)
@given(damage=damages())
def test_damaged_records_end_in_one_line(stopped, damage):
    check(stopped, damage, is_published=False)


@pytest.mark.slow
@fuzz(MANY)
@given(damage=damages())
def test_many_damaged_records_end_in_one_line(stopped, monkeypatch, damage):
    monkeypatch.setattr(bundle, "verify", lambda model, folder: None)  # which starts a process
    check(stopped, damage, is_published=True)
