"""One encoder for images and texts: it is one in memory, in gradients and in counts, and each tower's in files."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_clip import moved
from tiny_clip_moe import inputs, tiny_config, tiny_model
from transformers import AutoModel, CLIPConfig, CLIPModel

from clip_moe.conversion.presets import changed_preset
from clip_moe.conversion.upcycle import shared_config, sparse_config
from clip_moe.evaluation.costs import count_multiply_adds, count_parameters, meta_model
from clip_moe.training.optimizers import set_trainable
from modeling_clip_moe import CLIPMoEConfig, CLIPMoEModel, CLIPMoEVisionModel
from modeling_clip_moe import CLIPMoETextModelWithProjection as TextTower
from modeling_clip_moe import CLIPMoEVisionModelWithProjection as VisionTower


def shared_model(moe_layers=(1, 2), **moe):
    """With weights large enough to matter."""
    config = tiny_config(moe_layers, **moe)
    config.shared_encoder = True
    return moved(CLIPMoEModel(config), "mlp", seed=0, scale=0.3).eval()


def separated(model):
    """The same weights in two encoders."""
    config = copy.deepcopy(model.config)
    config.shared_encoder = False
    twice = CLIPMoEModel(config).eval()
    twice.load_state_dict(model.state_dict())
    return twice


def are_one(model):
    text, vision = (dict(tower.encoder.named_parameters()) for tower in (model.text_model, model.vision_model))
    return text.keys() == vision.keys() and all(vision[name] is parameter for name, parameter in text.items())


@pytest.mark.parametrize(
    ("device_map", "options"),
    [
        ("auto", {"max_memory": {"cpu": "40KB"}}),
        ({"text_model": "cpu", "vision_model": "disk", "": "cpu"}, {}),
        ({"text_model.encoder.layers.0": "disk", "": "cpu"}, {}),
    ],
    ids=str,
)
def test_a_device_map_that_splits_it_is_refused(device_map, options, tmp_path):
    shared_model().save_pretrained(tmp_path)
    options |= {"device_map": device_map, "offload_folder": tmp_path / "offloaded"}
    with pytest.raises(ValueError, match="shared_encoder=True, which has to fit into one device, but .* Raise max_mem"):
        CLIPMoEModel.from_pretrained(tmp_path, **options)


def test_a_device_map_of_one_device_loads_it(tmp_path):
    model = shared_model()
    model.save_pretrained(tmp_path)
    for device_map, options in (({"": "cpu"}, {}), ("cpu", {}), ("auto", {"max_memory": {"cpu": "1GB"}})):
        loaded = CLIPMoEModel.from_pretrained(tmp_path, device_map=device_map, **options)
        assert are_one(loaded) and torch.equal(loaded.logit_scale, model.logit_scale)


@pytest.mark.parametrize("moe", [{}, {"fusion_gate": True}, {"moe_layers": ()}])
def test_it_computes_and_learns_as_two_encoders_of_the_same_weights(moe):
    model = shared_model(**moe).train()
    twice, batch = separated(model).train(), inputs()
    for one in (model, twice):
        one(**batch, return_loss=True, output_router_logits=bool(moe.get("moe_layers", True))).loss.backward()
    assert are_one(model) and not are_one(twice)
    for name, parameter in model.named_parameters():
        expected = twice.get_parameter(name).grad
        if name.startswith("text_model.encoder."):
            expected = expected + twice.get_parameter(name.replace("text_model", "vision_model")).grad
        torch.testing.assert_close(parameter.grad, expected)


@pytest.mark.parametrize("kept", [(), (1, 2)])
def test_saved_and_loaded_it_is_one_and_each_tower_is_whole(tmp_path, kept):
    model, batch = shared_model(kept), inputs()
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert are_one(loaded) and are_one(copy.deepcopy(loaded)) and are_one(loaded.to(torch.float64))
    expected = model(**batch)
    if not kept:
        dense = CLIPModel.from_pretrained(tmp_path, ignore_mismatched_sizes=True).eval()  # its scale has no axis
        torch.testing.assert_close(dense(**batch).image_embeds, expected.image_embeds)
        torch.testing.assert_close(dense(**batch).text_embeds, expected.text_embeds)
    again = AutoModel.from_pretrained(tmp_path)(**batch)
    torch.testing.assert_close(again.logits_per_image, expected.logits_per_image)
    vision, text = (tower.from_pretrained(tmp_path) for tower in (VisionTower, TextTower))
    image, text = vision(batch["pixel_values"]), text(batch["input_ids"], batch["attention_mask"])
    cosine = torch.nn.functional.cosine_similarity
    torch.testing.assert_close(cosine(image.image_embeds, expected.image_embeds), torch.ones(4))
    torch.testing.assert_close(cosine(text.text_embeds, expected.text_embeds), torch.ones(4))


def test_an_encoder_that_fell_apart_is_neither_saved_nor_loaded(tmp_path):
    model = shared_model()
    with pytest.raises(ValueError, match="the towers differ in vision_model.encoder"):
        model.load_state_dict(tiny_model().state_dict())
    # Which gives each tower its own
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)
    assert not are_one(model)
    model.save_pretrained(tmp_path)  # they are still equal
    with torch.no_grad():
        model.vision_model.encoder.layers[0].mlp.fc1.weight.add_(1)
    with pytest.raises(ValueError, match=r"differ in vision_model.encoder.layers.0.mlp.fc1.weight.*tie_weights"):
        model.save_pretrained(tmp_path)
    model.tie_weights()
    model.save_pretrained(tmp_path)
    assert are_one(CLIPMoEModel.from_pretrained(tmp_path))
    weights = load_file(tmp_path / "model.safetensors")
    weights["vision_model.encoder.layers.1.mlp.router.weight"] += 1
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"shared_encoder=True .* differ in vision_model.*router.weight"):
        CLIPMoEModel.from_pretrained(tmp_path)
    CLIPMoEVisionModel.from_pretrained(tmp_path)


def test_towers_that_cannot_share_are_refused():
    for field, value in {"hidden_size": 32, "num_experts": 8, "moe_layers": [0], "hidden_act": "gelu"}.items():
        settings = tiny_config().to_dict()
        settings["vision_config"][field] = value
        with pytest.raises(ValueError, match=f"shared_encoder=True needs towers of one {field}"):
            CLIPMoEConfig(**settings | {"shared_encoder": True})
        CLIPMoEConfig(**settings | {"shared_encoder": False})


def test_it_is_counted_once():
    """A small ViT whose towers have the same layers, with 16 experts, beside two encoders with 8 each."""
    tower = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2}
    dense = CLIPConfig(text_config=tower, vision_config=tower | {"image_size": 32, "patch_size": 8})
    counts, products = {}, {}
    for name, config, experts in (("shared", shared_config(dense), 16), ("separated", dense, 8)):
        model = meta_model(sparse_config(config, changed_preset("clip_up", {"num_experts": experts})))
        counts[name], products[name] = count_parameters(model), count_multiply_adds(model)
    expert = 2 * (2 * 32 * 128 + 32 + 128)  # of two layers
    layer = 4 * (32 * 32 + 32) + 4 * 32  # attention and norms
    ffn = expert // 2
    shared, encoder = counts["shared"], 16 * expert + 4 * layer + 2 * ffn + 2 * 16 * 32
    assert shared["expert"] == expert and shared["routers"] == 2 * 16 * 32
    assert shared["total"] - shared["activated"] == 14 * expert
    assert shared["text"] + shared["vision"] - shared["total"] == encoder - 1
    # As many experts as both towers have otherwise; attention, norms and dense FFNs are there once
    assert counts["separated"]["total"] - shared["total"] == 4 * layer + 2 * ffn
    routers = {"image": 17, "text": 77}  # tokens, each with 8 more products of 32 numbers in two layers
    more = {name: 2 * 8 * 32 * routers.get(name, 0) for name in products["shared"]}
    assert products["shared"] == {name: value + more[name] for name, value in products["separated"].items()}


def test_either_name_makes_it_train():
    model = shared_model()
    trainable = set_trainable(model, r"vision_model\..*router")
    assert trainable == [f"text_model.encoder.layers.{layer}.mlp.router.weight" for layer in (1, 2)]
    assert not model.text_model.encoder.layers[0].mlp.fc1.weight.requires_grad
