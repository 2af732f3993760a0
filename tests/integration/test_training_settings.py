"""Adapters, which need peft."""

import pytest
import test_methods
import torch
from tiny_clip_moe import inputs, tiny_model
from tiny_families import tiny_dense
from tiny_runs import train, weights
from transformers import AutoModel

from clip_moe.conversion.verification import sample_inputs
from clip_moe.engine.messages import warn_once
from clip_moe.training.optimizers import add_adapters, merge_adapters
from clip_moe.training.train_settings import LoraSettings
from modeling_clip_moe import CLIPMoEModel
from modeling_clip_moe.families import FAMILIES

LORA = {"r": 2, "target_modules": ["q_proj", "fc1"], "target_parameters": ["experts.up_proj"], "trainable": "router"}


def test_lora_changes_its_targets_alone(tmp_path):
    tuned = train(tmp_path, lora=LORA)
    before, after = weights(tuned.with_name("sparse")), weights(tuned)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    targets = ("q_proj.weight", "fc1.weight", "experts.up_proj", "router.weight")
    assert changed == {name for name in before if name.endswith(targets) and before[name].numel() > 0}
    for name in changed:
        if "router" not in name:
            ranks = torch.linalg.matrix_rank(after[name] - before[name], atol=1e-6)  # of each expert
            assert 0 < ranks.max() <= LORA["r"], name
    AutoModel.from_pretrained(tuned)


def test_merging_leaves_the_model_that_trains_as_it_is():
    """Scores while it trains are those of a merged model."""
    model, batch = tiny_model(norm_topk_prob=True), inputs()
    settings = LoraSettings(r=2, target_modules=["q_proj"], target_parameters=["experts.up_proj", "router.weight"])
    add_adapters(model, settings, 0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    before, config = model.eval()(**batch).image_embeds, model.config.to_dict()
    merged = CLIPMoEModel(model.config)
    merged.load_state_dict(merge_adapters(model, settings, model.state_dict()))
    torch.testing.assert_close(merged.eval()(**batch).image_embeds, before)
    torch.testing.assert_close(model(**batch).image_embeds, before, rtol=0, atol=0)
    assert model.config.to_dict() == config


def test_adapters_of_experts_go_the_whole_way(tmp_path, monkeypatch, capsys):
    test_methods.test_the_whole_way(tmp_path, "adapters", monkeypatch, capsys)


@pytest.mark.parametrize("suffix", ["", ".weight"], ids=["target_modules", "target_parameters"])
@pytest.mark.parametrize("family", [one for one in FAMILIES if one.sigmoid], ids=lambda family: family.name)
def test_lora_leaves_out_what_would_get_no_gradient(family, suffix, caplog):
    """The output of the pooling head's attention and NaFlex's positions, whose weights others take."""
    warn_once.cache_clear()
    model, targets = tiny_dense(family), [f"out_proj{suffix}", f"position_embedding{suffix}"]
    chosen = {"target_modules": [], "target_parameters": targets} if suffix else {"target_modules": targets}
    add_adapters(model, LoraSettings(r=2, **chosen), seed=0)
    model.train()(**sample_inputs(model.config), return_loss=True).loss.backward()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert any("self_attn.out_proj" in name for name in trained) and not any(".head." in name for name in trained)
    assert all(parameter.grad is not None for parameter in trained.values())
    assert "no adapter for " in caplog.text and "vision_model.head.attention.out_proj" in caplog.text
    assert ("vision_model.embeddings.position_embedding" in caplog.text) == family.naflex
