"""CLIP-MoE's ablations and baselines as recipes: what each trains, and from where."""

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.numpy import load_file as load_arrays
from tiny_runs import weights

from training.recipe import load_recipe
from training.runner import run_recipe

pytestmark = pytest.mark.slow
TINY = Path(__file__).parent / "recipes" / "clip_moe.yaml"
FFN = "vision_model.encoder.layers.1.mlp"
ABLATIONS = """
# Each stage alone: the base and one expert. A train_router stage follows each unify stage, as it follows `unified`
- {name: stage_1, stage: unify, model: dense, experts: [expert_1]}
- {name: stage_2, stage: unify, model: dense, experts: [expert_2]}

# Without MCL: the base and the fine-tuned FFNs (Table 4), or as many experts as CLIP-MoE has, of other orders of pairs
- {name: direct, stage: train, model: dense, trainable: '\\.mlp\\.'}
- {name: without_mcl, stage: unify, model: dense, experts: [direct]}
- {name: direct_2, stage: train, model: dense, trainable: '\\.mlp\\.', seed: 2}
- {name: plain, stage: unify, model: dense, experts: [direct, direct_2]}

# Random clusters in place of those of features
- {name: random_1, stage: random, features: features_0}
- {name: random_expert_1, stage: train_experts, expert: 11, model: dense, clusters: random_1}
- {name: random_2, stage: random, features: features_0, previous: random_1}
- {name: random_expert_2, stage: train_experts, expert: 12, model: random_expert_1, clusters: random_2}
- {name: random, stage: unify, model: dense, experts: [random_expert_1, random_expert_2]}

# The second stage from the base, as the released code does, and from the first stage
- {name: restarted_2, stage: train_experts, expert: 22, model: dense, clusters: clusters_2, learning_rate: 1.0e-7}
- {name: continued_2, stage: train_experts, expert: 32, model: expert_1, clusters: clusters_2, learning_rate: 1.0e-7}
- {name: restarted, stage: unify, model: dense, experts: [expert_1, restarted_2]}

# Clusters of one stage alone in place of accumulated ones
- {name: alone_2, stage: cluster, features: features_1}
"""
RANDOM = {"stage": "cluster", "num_image_clusters": 1, "num_text_clusters": 1, "num_random_clusters": 3}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The finished recipe with all ablations; tests only read it."""
    folder = tmp_path_factory.mktemp("ablations")
    recipe = yaml.safe_load(TINY.read_text())
    recipe["defaults"]["train"] |= {"max_steps": 2, "save_steps": None}
    ablations = [stage | (RANDOM if stage["stage"] == "random" else {}) for stage in yaml.safe_load(ABLATIONS)]
    stages = [stage for stage in recipe["stages"] if stage["name"] != "clip_moe"]
    recipe |= {"output_dir": str(folder / "out"), "stages": stages + ablations}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return run_recipe(load_recipe(folder / "recipe.yaml"))


@pytest.mark.parametrize(
    ("model", "experts"),
    [
        ("stage_1", ["dense", "expert_1"]),
        ("stage_2", ["dense", "expert_2"]),
        ("without_mcl", ["dense", "direct"]),
        ("plain", ["dense", "direct", "direct_2"]),
        ("random", ["dense", "random_expert_1", "random_expert_2"]),
        ("restarted", ["dense", "expert_1", "restarted_2"]),
    ],
)
def test_experts_are_the_ffns_of_what_it_names(whole, model, experts):
    ffns = torch.stack([weights(whole / name)[f"{FFN}.fc1.weight"] for name in experts])
    assert torch.equal(weights(whole / model)[f"{FFN}.experts.up_proj"], ffns)
    assert len({str(ffn.tolist()) for ffn in ffns}) == len(experts)  # no two of them are alike


def test_where_a_stage_starts(whole):
    """At a rate of nearly nothing it stays there."""
    dense, first, restarted, continued = (
        weights(whole / name)[f"{FFN}.fc1.weight"] for name in ("dense", "expert_1", "restarted_2", "continued_2")
    )
    assert 0 < (restarted - dense).abs().max() < 1e-6 and 0 < (continued - first).abs().max() < 1e-6
    assert (first - dense).abs().max() > 1e-3


def test_clusters(whole):
    """Random ones are of equal size and are accumulated as others are; without `previous` a stage's stand alone."""
    files = {name: load_arrays(whole / name / "clusters.safetensors") for name in ("random_1", "random_2", "alone_2")}
    first, second = files["random_1"], files["random_2"]
    assert np.bincount(first["labels"]).tolist() == [30, 30, 30]
    assert len(second["tuples"]) == 9  # each of three by each of three
    assert (second["tuples"][second["labels"]][:, 0] == first["labels"]).all()
    assert files["alone_2"]["tuples"].shape == (4, 1)
    accumulated = load_arrays(whole / "clusters_2" / "clusters.safetensors")
    assert (accumulated["tuples"][accumulated["labels"]][:, 1] == files["alone_2"]["labels"]).all()
