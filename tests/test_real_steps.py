"""That the benchmark of real steps takes those of the recipes."""

from pathlib import Path

import pytest

from benchmarks.real_steps import RECIPES
from conversion.presets import PRESETS
from training.recipe import load_recipe

FOLDER = Path(__file__).parents[1] / "training" / "recipes"
FIELDS = ("trainable", "balance_top_k", "balance_mean")


@pytest.mark.parametrize("name", RECIPES)
def test_settings_are_those_of_the_stage(name):
    recipe = RECIPES[name]
    file, stage_name = recipe.stage.split(":")
    stages = {stage.name: stage for stage in load_recipe(FOLDER / f"{file}.yaml").stages}
    stage = stages[stage_name]
    assert (stage.max_steps or stage.num_epochs) and stage.gradient_checkpointing
    assert {field: getattr(recipe, field) for field in FIELDS} == {field: getattr(stage, field) for field in FIELDS}
    assert list(recipe.caption_weights or []) == (stage.caption_weights or [])
    lengths = [stage.length for stage in stages.values() if stage.stage == "long_context"]
    assert [recipe.tokens] == (lengths or [77])
    makers = [stage for stage in stages.values() if stage.name == getattr(stages[stage_name], "model", None)]
    presets = [maker.preset for maker in makers if hasattr(maker, "preset")]
    if presets:
        assert presets == [recipe.preset] and recipe.preset in PRESETS
