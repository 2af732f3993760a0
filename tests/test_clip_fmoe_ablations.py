"""CLIP-FMoE's ablations on models of a few thousand parameters, and what experts of the real recipes see."""

from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from safetensors.numpy import load_file as load_arrays
from safetensors.torch import load_file
from tiny_recipes import tiny_run
from tiny_runs import stored
from transformers import AutoModel

from conversion.checkpoints import model_outputs, sample_inputs
from training.feature_clusters import FeatureClusters, split
from training.recipe import load_recipe
from training.samplers import ClusterBatchSampler

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return tiny_run("clip_fmoe", tmp_path_factory)


def weights(folder):
    return load_file(folder / "model.safetensors")


def moved(before, after):
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize("recipe", ["recap_cc3m", "sharegpt4v", "8_experts"])
def test_experts_see_together_what_direct_fine_tuning_sees(recipe):
    """One pass of each cluster, in batches of one sub-cluster in turn, without what fills no batch of it."""
    stages = {stage.name: stage for stage in load_recipe(ROOT / f"training/recipes/clip_fmoe_{recipe}.yaml").stages}
    experts = [stage for stage in stages.values() if stage.kind == "train_experts"]
    shape, batch = (len(experts), stages["sub_clusters"].num_image_clusters), 8
    labels = np.random.default_rng(0).integers(np.prod(shape), size=np.prod(shape) * 80)
    clusters = FeatureClusters(labels, np.array(list(np.ndindex(shape))), np.zeros((np.prod(shape), 2)))
    seen = []
    for stage in experts:
        of_expert = stage.labels(clusters, batch, Accelerator(cpu=True))
        batches = list(ClusterBatchSampler(of_expert, batch, order=stage.order))
        turn = [labels[one[0]] for one in batches]
        assert all((labels[one] == label).all() for one, label in zip(batches, turn, strict=True))
        assert turn[: shape[1]] == sorted(set(turn))  # one batch of each before the second of any
        seen += np.concatenate(batches).tolist()
    assert len(seen) == len(set(seen)) == (np.bincount(labels) // batch * batch).sum()
    assert {stage.num_epochs for stage in (*experts, stages["clip_fmoe"])} == {1}
    assert len({stage.global_batch_size for stage in (*experts, stages["clip_fmoe"])}) == 1
    assert stages["features"].caption_weights == stages["clip_fmoe"].caption_weights


@pytest.mark.parametrize(
    ("overrides", "num_experts", "gated"),
    [
        ({"fused.changes.fusion_gate": False}, 2, True),
        (
            {"fused.changes.fusion_gate": False, "unified.changes.fusion_gate": False, "unified.base_expert": False},
            2,
            False,
        ),
    ],
    ids=["gate in stage 2 alone", "no gate"],
)
def test_ablations_of_the_gate(run, tmp_path, overrides, num_experts, gated):
    short = {"defaults.train.num_epochs": None, "defaults.train.max_steps": 2, "output_dir": str(tmp_path)}
    output = run("x", {**overrides, **short})
    model = AutoModel.from_pretrained(output / "clip_fmoe")
    assert model.config.vision_config.num_experts == num_experts
    assert model.config.vision_config.fusion_gate is gated
    assert not AutoModel.from_pretrained(output / "expert_1").config.vision_config.fusion_gate


ONE_LEVEL = {"defaults.train_experts.clusters": "clusters", "defaults.train_experts.order": "shuffled"}
TEXT = {"clusters.num_image_clusters": 1, "sub_clusters.num_image_clusters": 1}
TEXT |= {"clusters.num_text_clusters": 2, "sub_clusters.num_text_clusters": 2}
IMAGE_AND_TEXT = {"clusters.num_text_clusters": 2, "sub_clusters.num_text_clusters": 2}


@pytest.mark.parametrize(
    ("overrides", "columns", "levels"),
    [
        (ONE_LEVEL, {"image": 2}, 1),
        (ONE_LEVEL | {"clusters.num_image_clusters": 1, "clusters.num_random_clusters": 2}, {"random": 2}, 1),
        (TEXT, {"text": 2}, 2),
        (IMAGE_AND_TEXT, {"image": 2, "text": 2}, 2),
    ],
    ids=["no constrained sampling", "random", "text", "image x text"],
)
def test_ablations_of_the_clusters(run, tmp_path, overrides, columns, levels):
    """Appendix D: the clusters are those of the chosen features, and each expert is trained on its own."""
    short = {"defaults.train.num_epochs": None, "defaults.train.max_steps": 1, "defaults.train.global_batch_size": 4}
    output = run("x", {**overrides, **short, "output_dir": str(tmp_path)}, experts=[1, 2])
    features, groups = {name: stored(output / "features", name) for name in ("image", "text")}, None
    for name in ("clusters", "sub_clusters")[:levels]:
        found = load_arrays(output / name / "clusters.safetensors")
        labels = split(features, columns, 0, groups)
        expected = np.ravel_multi_index(tuple(labels.values()), tuple(columns.values()))
        assert np.array_equal(found["tuples"][found["labels"], -1], expected)
        groups = found["labels"]
    numbers = np.prod(list(columns.values()))
    for stage in load_recipe(output / "recipe.yaml").stages:
        if stage.kind == "train_experts":  # its batches are of sub-clusters, or of its whole cluster
            of_expert = stage.labels(FeatureClusters(**found), 1, Accelerator(cpu=True))
            assert len(np.unique(of_expert[of_expert >= 0])) == (numbers if levels == 2 else 1)
            assert ((of_expert >= 0) == (found["tuples"][found["labels"], 0] == stage.cluster)).all()
    fused, *experts = (weights(output / name) for name in ("fused", "expert_1", "expert_2"))
    assert all(moved(fused, expert) for expert in experts) and moved(*experts)
    assert not (output / "unified").exists()


def test_another_number_of_experts_a_token_at_inference(run, tmp_path):
    """Tables 18 and 19: trained with one expert a token, used with two, by the configuration alone."""
    short = {"defaults.train.num_epochs": None, "defaults.train.max_steps": 2, "output_dir": str(tmp_path)}
    output = run("x", {**short, "unified.changes": {"num_experts_per_tok": 1}})
    model = AutoModel.from_pretrained(output / "clip_fmoe")
    inputs = sample_inputs(model.config)
    one = model_outputs(model, inputs)
    for tower in (model.config.text_config, model.config.vision_config):
        assert tower.num_experts_per_tok == 1
        tower.num_experts_per_tok = 2
    two = model_outputs(model, inputs)
    model.save_pretrained(tmp_path / "two")
    again = AutoModel.from_pretrained(tmp_path / "two")
    assert again.config.vision_config.num_experts_per_tok == 2
    for name, found in model_outputs(again, inputs).items():
        assert torch.equal(found, two[name]) and not torch.equal(found, one[name])
