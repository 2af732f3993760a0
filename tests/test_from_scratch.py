"""Sparse models and shared encoders from scratch, and what is done with a dense shared one, through recipes."""

import pytest
import torch
from tiny_runs import DENSE, losses, same_weights, weights
from transformers import AutoModel, CLIPModel

from modeling_clip_moe import CLIPMoEModel

FOUR = {"preset": "clip_up", "changes": {"num_experts": 4}}
GROUPS = {"capacity_group_size": 4, "eval_capacity_factor": 2.0}
SCRATCH = {
    **{**DENSE, "name": "scratch", "openai_weights": True, **FOUR},
    **{tower: DENSE[tower] | GROUPS for tower in ("text_config", "vision_config")},
}
TRAIN = {
    "stage": "train",
    "data": {"source": "symbols", "num_samples": 40, "in_memory": True},
    "global_batch_size": 8,
    "max_steps": 4,
    "learning_rate": 1e-2,
    "logging_steps": 1,
}
ENTROPY = {
    "local_entropy_coef": {"text": 0.1},
    "global_entropy_coef": {"text": 0.1, "vision": 0.1},
    "global_entropy_min_experts": {"text": 2, "vision": 4},
}


def test_experts_from_scratch_differ_and_have_the_size_of_an_ffn(run):
    output = run([SCRATCH, {**SCRATCH, "name": "plain", "openai_weights": False}, {**DENSE, "openai_weights": True}])
    dense = CLIPModel.from_pretrained(output / "dense")
    for name in ("scratch", "plain"):
        model = AutoModel.from_pretrained(output / name)
        assert type(model) is CLIPMoEModel and model.config.vision_config.moe_layers == [1]
        for tower in (model.text_model, model.vision_model):
            experts = tower.encoder.layers[1].mlp.experts
            for stacked in (experts.up_proj, experts.down_proj):
                distances = torch.cdist(stacked.flatten(1), stacked.flatten(1))
                assert (distances[~torch.eye(4, dtype=torch.bool)] > 0.5 * stacked[0].norm()).all()
    scratch = AutoModel.from_pretrained(output / "scratch")
    for tower in ("text_model", "vision_model"):
        experts, ffn = (getattr(model, tower).encoder.layers[1].mlp for model in (scratch, dense))
        experts = experts.experts
        for of_experts, of_ffn in (
            (experts.up_proj, ffn.fc1.weight),
            (experts.down_proj, ffn.fc2.weight),
            (experts.up_proj_bias, ffn.fc1.bias),
        ):
            assert of_experts.std().item() == pytest.approx(of_ffn.std().item(), rel=0.25)
    assert scratch.config.router_z_loss_coef == 0.001  # of the preset
    assert scratch.config.text_config.eval_capacity_factor == 2.0


def test_a_shared_encoder_is_trained_upcycled_and_trained_on(run):
    """Dense from scratch, then sparse."""
    stages = [
        {**DENSE, "shared_encoder": True, "openai_weights": True},
        {**TRAIN, "name": "grown", "model": "dense"},
        {"name": "sparse", "stage": "upcycle", "model": "grown", **FOUR},
        {**TRAIN, "name": "tuned", "model": "sparse", "balance_mean": "shared", **ENTROPY},
    ]
    output = run(stages)
    for name in ("dense", "grown", "sparse", "tuned"):
        model = AutoModel.from_pretrained(output / name)
        text, vision = (getattr(model, tower).encoder for tower in ("text_model", "vision_model"))
        assert all(a is b for a, b in zip(text.parameters(), vision.parameters(), strict=True)), name
    assert not same_weights(output / "sparse", output / "tuned")
    assert len(losses(output / "tuned")) == 4


SIGLIP = DENSE | {"name": "siglip", "family": "siglip", "openai_weights": True, "preset": "clip_up"}
SIGLIP["changes"] = {"num_experts": 4, "capacity_factor": None}


def test_a_siglip_from_scratch_trains_by_its_sigmoid_loss_or_by_softmax(run):
    """Whole batches, and parts of them (gradient caching), make the same of it."""
    tuned = {**TRAIN, "model": "siglip"}
    output = run(
        [
            SIGLIP,
            {**tuned, "name": "whole"},
            {**tuned, "name": "parts", "mini_batch_size": 4, "loss_chunk_size": 3},
            {**tuned, "name": "softmax", "loss": "softmax"},
        ]
    )
    assert losses(output / "parts") == pytest.approx(losses(output / "whole"), rel=1e-4)
    weights_of = {name: weights(output / name) for name in ("siglip", "whole", "parts", "softmax")}
    start = weights_of["siglip"]
    assert (start["logit_scale"].exp().item(), start["logit_bias"].item()) == pytest.approx((10, -10))
    for name, tensor in weights_of["whole"].items():
        torch.testing.assert_close(weights_of["parts"][name], tensor, atol=1e-4, rtol=1e-3, msg=name)
    assert weights_of["whole"]["logit_bias"] != -10 and weights_of["softmax"]["logit_bias"] == -10
    assert losses(output / "softmax")[0] != losses(output / "whole")[0]
