"""The laboratory's recipes load, and its README lists them all."""

import re

import pytest

from clip_moe.engine.recipe import load_recipe
from lab import ROOT

RECIPES = sorted((ROOT / "lab" / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_load(path):
    if "icons" in path.name:
        pytest.importorskip("resvg_py", reason="the icons extra is not installed")
    if "clip_up_worlds" in path.name:
        pytest.importorskip("rdkit", reason="rdkit is not installed")
    stages = load_recipe(path).stages
    assert len({stage.name for stage in stages}) == len(stages)


def test_every_recipe_is_listed():
    readme = (ROOT / "lab" / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| \[(\w+\.yaml)\]", readme, re.MULTILINE)) == [path.name for path in RECIPES]


def test_a_recipe_that_moved_here_is_named(monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(FileNotFoundError, match="see lab/recipes/names_kept.yaml"):
        load_recipe("training/recipes/names_kept.yaml")
