"""Whole models: CLIP where they are dense, and what they return."""

import pytest
import torch
import torch.nn.functional as F
from tiny_clip_moe import EOS, PAD, dense_clip, inputs, tiny_config, tiny_model
from transformers import CLIPConfig, CLIPModel

from modeling_clip_moe import (
    CLIPMoEConfig,
    CLIPMoEForImageClassification,
    CLIPMoEModel,
    load_balancing_loss,
    router_z_loss,
)


def test_dense_model_is_clip():
    config = tiny_config(moe_layers=())
    stock, model = dense_clip(config), CLIPMoEModel(config).eval()
    model.load_state_dict(stock.state_dict() | {"logit_scale": stock.logit_scale[None]})
    batch = {**inputs(), "return_loss": True, "output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        expected, actual = stock(**batch), model(**batch)
    for name in ("loss", "logits_per_image", "logits_per_text", "text_embeds", "image_embeds"):
        torch.testing.assert_close(actual[name], expected[name], rtol=0, atol=0)
    for tower in ("text_model_output", "vision_model_output"):
        for name in ("last_hidden_state", "pooler_output", "hidden_states", "attentions"):
            torch.testing.assert_close(actual[tower][name], expected[tower][name], rtol=0, atol=0)


def test_initialization_is_that_of_clip():
    fields = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = CLIPMoEModel(CLIPMoEConfig(text_config={**fields, "moe_layers": [1]}, vision_config=fields))
    stock = CLIPModel(CLIPConfig(text_config=fields, vision_config=fields))
    for name, expected in stock.named_parameters():
        if not name.startswith("text_model.encoder.layers.1.mlp") and name != "logit_scale":
            actual = model.get_parameter(name)
            if name.endswith("bias") or "norm" in name:
                torch.testing.assert_close(actual, expected, rtol=0, atol=0)
            else:
                assert actual.std().item() == pytest.approx(expected.std().item(), rel=0.4)
    layers = model.text_model.encoder.layers
    dense, experts = layers[0].mlp, layers[1].mlp.experts
    assert experts.up_proj.std().item() == pytest.approx(dense.fc1.weight.std().item(), rel=0.05)
    assert experts.down_proj.std().item() == pytest.approx(dense.fc2.weight.std().item(), rel=0.05)
    assert (experts.up_proj_bias == 0).all() and (experts.down_proj_bias == 0).all()
    assert layers[1].mlp.router.weight.std().item() == pytest.approx(64**-0.5, rel=0.2)
    assert model.logit_scale.shape == (1,) and model.logit_scale.item() == pytest.approx(2.6592)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_outputs():
    model, batch = tiny_model(), inputs()
    output = model(**batch, return_loss=True, output_router_logits=True, output_expert_ids=True)
    names = "loss logits_per_image logits_per_text text_embeds image_embeds text_model_output vision_model_output"
    assert list(output.keys()) == [*names.split(), "aux_loss", "text_router_logits", "vision_router_logits"]
    assert [logits.shape for logits in output.text_router_logits] == [(4, 10, 4)] * 2
    assert [logits.shape for logits in output.vision_router_logits] == [(4, 5, 4)] * 2
    assert [ids.shape for ids in output.text_model_output.expert_ids] == [(4, 10, 2)] * 2
    padding = batch["attention_mask"] == 0
    assert padding.any()
    for ids in output.text_model_output.expert_ids:
        assert torch.equal((ids == 4).all(dim=-1), padding) and torch.equal((ids == 4).any(dim=-1), padding)

    quiet = model(**batch, return_loss=True)
    assert list(quiet.keys()) == list(output.keys())[:7]
    assert quiet.vision_model_output.router_logits is None


def test_aux_loss_is_the_weighted_sum_over_towers():
    model, batch = tiny_model(), inputs()
    model.config.router_aux_loss_coef, model.config.router_z_loss_coef = 0.3, 0.02
    output = model(**batch, return_loss=True, output_router_logits=True)
    mask = batch["attention_mask"]
    expected = 0.3 * (
        load_balancing_loss(output.text_router_logits, 2, mask) + load_balancing_loss(output.vision_router_logits, 2)
    ) + 0.02 * (router_z_loss(output.text_router_logits, mask) + router_z_loss(output.vision_router_logits))
    torch.testing.assert_close(output.aux_loss, expected)
    torch.testing.assert_close(output.loss, model(**batch, return_loss=True).loss + expected)

    model.config.output_router_logits = True
    torch.testing.assert_close(model(**batch, return_loss=True).loss, output.loss)


def test_router_outputs_of_dense_towers_are_none():
    model = tiny_model(text={"moe_layers": []})
    output = model(**inputs(), return_loss=True, output_router_logits=True)
    assert output.text_router_logits is None
    torch.testing.assert_close(output.aux_loss, 0.01 * load_balancing_loss(output.vision_router_logits, 2))
    output = tiny_model(moe_layers=())(**inputs(), return_loss=True, output_router_logits=True)
    assert output.aux_loss is None and output.vision_router_logits is None and output.loss.isfinite()


def test_padding_does_not_change_an_embedding():
    model = tiny_model()
    short = {"input_ids": torch.tensor([[48, 5, 7, EOS]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    expected = model.encode_text(**short)
    for padding in (PAD, 17):
        input_ids = F.pad(short["input_ids"], (0, 6), value=padding).repeat(3, 1)
        input_ids[1:, 1] = torch.tensor([9, 11])
        attention_mask = F.pad(short["attention_mask"], (0, 6)).repeat(3, 1)
        torch.testing.assert_close(model.encode_text(input_ids, attention_mask)[:1], expected)
    left = [F.pad(tokens, (6, 0), value=value) for tokens, value in zip(short.values(), (17, 0), strict=True)]
    moved = model.get_text_features(*left, position_ids=F.pad(torch.arange(4), (6, 0))[None])
    torch.testing.assert_close(moved.pooler_output, expected)


def test_attention_mask_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"attention_mask must have the shape of input_ids, \(4, 10\), got \(4, 9\)"):
        batch = inputs()
        tiny_model().encode_text(batch["input_ids"], batch["attention_mask"][:, 1:])


def test_image_classification():
    config = tiny_config()
    config.num_labels = 5
    model = CLIPMoEForImageClassification(config)
    pixel_values, labels = torch.randn(4, 3, 16, 16), torch.tensor([0, 1, 2, 4])
    output = model(pixel_values, labels)
    pooled = model.vision_model(pixel_values).last_hidden_state[:, 1:].mean(dim=1)
    torch.testing.assert_close(output.logits, model.classifier(pooled))
    torch.testing.assert_close(output.loss, F.cross_entropy(output.logits, labels))
    with_router = model(pixel_values, labels, output_router_logits=True)
    torch.testing.assert_close(with_router.aux_loss, 0.01 * load_balancing_loss(with_router.router_logits, 2))
    torch.testing.assert_close(with_router.loss, output.loss + with_router.aux_loss)
    config.num_labels = 0
    assert CLIPMoEForImageClassification(config)(pixel_values).logits.shape == (4, 16)
