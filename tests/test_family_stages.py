"""The systems' recipes on a SigLIP."""

import pytest
from tiny_runs import weights

from conversion.checkpoints import load_sparse
from modeling_clip_moe import SiglipMoEModel
from training.recipe import load_recipe
from training.runner import run_recipe


def run(name, folder, **overrides):
    overrides |= {"dense.family": "siglip", "output_dir": str(folder)}
    return run_recipe(load_recipe(f"tests/recipes/{name}.yaml", overrides))


def test_experts_of_a_siglip_are_its_layers_ffns(tmp_path):
    """CLIP-MoE's recipe: features, clusters, experts that differ in layers alone, routers."""
    output = run("clip_moe", tmp_path)
    dense, expert = weights(output / "dense"), weights(output / "expert_1")
    moved = [name for name, tensor in dense.items() if not tensor.equal(expert[name])]
    assert moved and all(".layers." in name and ".mlp." in name for name in moved)
    assert type(load_sparse(output / "clip_moe")) is SiglipMoEModel


def test_hidden_states_of_a_siglip_are_refused_before_anything_runs(tmp_path):
    with pytest.raises(ValueError, match="states.model: a SigLIP cannot begin at its sparse layers; leave hidden_stat"):
        run("clip_fmoe", tmp_path)
