"""The systems' recipes on other families: a SigLIP, an AltCLIP and a NaFlex."""

from pathlib import Path

import pytest
import yaml
from tiny_clip import change_json
from tiny_families import saved, tiny_dense
from tiny_runs import weights

from clip_moe.conversion.checkpoints import load_sparse
from clip_moe.engine.recipe import load_recipe
from clip_moe.engine.runner import run_recipe
from modeling_clip_moe.families import FAMILY_OF_TYPE


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["siglip", "altclip", "siglip2"])
def test_a_clip_moe_of_a_folder_has_experts_in_its_sparse_towers(model_type, tmp_path):
    """CLIP-MoE's recipe, in parts of batches, with the dropout of AltCLIP's released text towers."""
    family = FAMILY_OF_TYPE[model_type]
    dense, stages = saved(family, tiny_dense(family, 20), tmp_path / "dense", 20), "tests/recipes/clip_moe.yaml"
    recipe = yaml.safe_load(Path(stages).read_text().replace("model: dense", f"model: {dense}"))
    recipe |= {"stages": recipe["stages"][1:], "output_dir": str(tmp_path / "out")}
    recipe["defaults"]["train"]["mini_batch_size"] = 4
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    if model_type == "altclip":
        change_json(dense / "config.json", text_config={"hidden_dropout_prob": 0.1})
    output = run_recipe(load_recipe(str(tmp_path / "recipe.yaml")))
    before, expert = weights(dense), weights(output / "expert_1")
    moved = [name for name, tensor in before.items() if not tensor.equal(expert[name])]
    assert moved and all(".encoder.layer" in name and ".mlp." in name for name in moved)
    assert {name.split("_")[0] for name in moved} == set(family.towers)
    model = load_sparse(output / "clip_moe")
    assert type(model) is family.sparse
    assert bool(getattr(model.config.text_config, "moe_layers", None)) == ("text" in family.towers)
