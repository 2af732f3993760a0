import pytest
from tiny_clip import tiny_clip

from lab.speed import runs, steps

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(steps, "paper_config", lambda size: tiny_clip().config)
    monkeypatch.setattr("clip_moe.training.loop.compile_layers", lambda tower: None)  # which takes a minute


@pytest.mark.parametrize("name", steps.RECIPES)
def test_a_step_of_each_row(name):
    found = steps.recipe_step(name, "tiny", 4, mini_batch_size=2 if "texts" in name else None)()
    assert 0 < found["trainable"] <= found["parameters"]


def test_towers_over_the_dense_one():
    printed = steps.towers(images=2, rounds=1, device="cpu")
    assert [line.split()[1] for line in printed.splitlines()[-3:]] == ["clip_up", "clip_moe", "clip_fmoe"]


def test_images_per_second():
    printed = steps.inference(images=[1, 3], presets=["clip_up"], dtype="float32", rounds=1, device="cpu")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if line.startswith("| ")]
    assert [row[:2] for row in rows[1:]] == [["1", "dense"], ["1", "clip_up"], ["3", "dense"], ["3", "clip_up"]]


@pytest.mark.parametrize("system", runs.SYSTEMS)
def test_shortened_recipes_load(system, tmp_path):
    assert len(runs.short_recipe(system, tmp_path / "run")[2].stages) == len(runs.SYSTEMS[system][1].split())
