"""Sparse models and shared encoders from scratch, and what is done with a dense shared one, through recipes."""

import functools

import pytest
import torch
from tiny_runs import DENSE, losses, run_stages, same_weights, weights
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


@pytest.fixture
def run(tmp_path):
    return functools.partial(run_stages, tmp_path)


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


@pytest.mark.parametrize(
    "stage, settings, message",
    [
        (DENSE, {"loss": "sigmoid"}, "tuned.loss: sigmoid needs a model with a logit_bias, as SigLIP; 'clip' has none"),
        (SIGLIP, {"label_smoothing": 0.1}, "tuned.label_smoothing: it goes with the softmax loss"),
        (SIGLIP | {"projection_dim": 8}, {}, "projection_dim is 8, but the images of a SigLIP have no projection"),
    ],
)
def test_losses_and_sizes_that_a_family_cannot_have_are_refused(run, stage, settings, message):
    with pytest.raises(ValueError, match=message):
        run([stage, {**TRAIN, "name": "tuned", "model": stage["name"], **settings}])


@pytest.mark.parametrize(
    "stage, settings, message",
    [
        (DENSE, {"dense.changes.num_experts": 4}, "num_experts: of sparse models alone; set preset"),
        (DENSE, {"dense.text_config.capacity_factor": 2}, "capacity_factor: of sparse models alone"),
        (SCRATCH, {"scratch.text_config.norm_before_capacity": True}, "=True needs norm_topk_prob=True"),
        (SCRATCH, {"scratch.changes.num_experts_per_tok": 9}, "scratch.changes: .*num_experts_per_tok"),
        (SCRATCH, {"scratch.shared_encoder": True, "scratch.towers": ["text"]}, "scratch.*one moe_layers"),
        (
            DENSE | {"shared_encoder": True},
            {"dense.text_config.hidden_size": 32},
            "dense.shared_encoder: .*hidden_size, but it is 32 in text_config and 16",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(run, stage, settings, message):
    with pytest.raises(ValueError, match=message):
        run([stage], settings)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"global_entropy_coef": {"text": 1}}, "global_entropy_coef is for text, but .*min_experts for no tower"),
        ({"global_entropy_min_experts": {"text": 2}}, "is for no tower, but .*min_experts for text"),
        ({"global_entropy_coef": {"text": 1}, "global_entropy_min_experts": {"text": 1}}, "greater than 1"),
        (
            {"global_entropy_coef": {"text": 1}, "global_entropy_min_experts": {"text": 5}},
            "global_entropy_min_experts.text: 5 of 4 experts",
        ),
        ({"local_entropy_coef": {"vision": 1}}, "local_entropy_coef.vision: that tower has no sparse layers: leave it"),
        ({"balance_mean": "shared"}, "tuned.balance_mean: shared needs a model with shared_encoder: true"),
    ],
)
def test_losses_that_no_router_has_are_refused(run, settings, message):
    with pytest.raises(ValueError, match=message):
        run([{**SCRATCH, "towers": ["text"]}, {**TRAIN, "name": "tuned", "model": "scratch", **settings}])
