"""The vision tower swapped into an existing LLaVA of transformers."""

from dataclasses import replace

import pytest
import torch
from converters import IMAGE_TOKEN
from PIL import Image
from plain_moe_vie import TINY, random_weights
from stand_ins import save_symbol_llava
from transformers import AutoProcessor, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import clip_moe
from clip_moe.conversion.llava import warn_without_experts
from clip_moe.conversion.released_moe_vie import Released, build
from modeling_clip_moe import CLIPMoEVisionConfig, CLIPMoEVisionModel
from modeling_clip_moe.modeling_moe_vie import MoEViEVisionModel

BASE = "training/symbol_clip"


@pytest.fixture(scope="module")
def dense_llava(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llava") / "dense"
    save_symbol_llava(folder)
    return folder


def swap(output, whole, tower):
    """Runs the command that puts a tower into a LLaVA."""
    clip_moe.main(["llava", str(output), "--model", str(whole), "--tower", str(tower)])


def test_a_tower_of_another_width_and_other_models_are_refused(dense_llava, tmp_path):
    large = {"hidden_size": 96, "num_attention_heads": 3, "image_size": 64, "patch_size": 8}
    for name, sizes in (("narrow", {"hidden_size": 48}), ("large", large)):
        config = CLIPMoEVisionConfig(**sizes, num_hidden_layers=2)
        CLIPMoEVisionModel(config).save_pretrained(tmp_path / name)
    for whole, tower, message in (
        (dense_llava, tmp_path / "narrow", "the projector takes hidden states of width 96, but the tower's have 48"),
        (dense_llava, tmp_path / "large", "the image processor .* of 3 x 32 x 32, but .* takes 3 x 64 x 64"),
        (dense_llava, BASE, ".*has no sparse vision tower of one image size: its type is 'clip'"),
        (BASE, tmp_path / "narrow", ".*expected a model of type 'llava'"),
    ):
        with pytest.raises(SystemExit, match=f"error: out: {message}"):
            swap(tmp_path / "out", whole, tower)
    assert not (tmp_path / "out").exists()


def test_a_tower_without_a_class_token_gives_all_its_patches(dense_llava, tmp_path):
    """MoE-ViE's: as many features as the processor puts image tokens into a text."""
    state = random_weights(replace(TINY, width=96, heads=6, patch=8), dtype=torch.float32)
    build(state, Released(TINY.text_heads, TINY.pooling_heads, TINY.top_k, image_size=32)).save_pretrained(
        tmp_path / "tower"
    )
    swap(tmp_path / "out", dense_llava, tmp_path / "tower")
    llava = LlavaForConditionalGeneration.from_pretrained(tmp_path / "out").eval()
    assert isinstance(llava.model.vision_tower, MoEViEVisionModel)
    image = Image.effect_noise((20, 20), 90).convert("RGB")
    inputs = AutoProcessor.from_pretrained(tmp_path / "out")(text=IMAGE_TOKEN, images=image, return_tensors="pt")
    assert (inputs["input_ids"] == llava.config.image_token_index).sum() == llava.config.image_seq_length == 16
    features = llava.model.get_image_features(inputs["pixel_values"]).pooler_output[0]
    assert features.shape[0] == 16 and llava(**inputs).logits.isfinite().all()


@pytest.mark.parametrize(("layers", "warns"), [(-2, True), (-1, False), ([0, -2], True), (2, False)], ids=str)
def test_a_tower_whose_experts_are_cut_off_warns(layers, warns, caplog):
    vision = CLIPMoEVisionConfig(num_hidden_layers=2, moe_layers=[1])
    warn_without_experts(LlavaConfig(vision_config=vision, text_config=LlamaConfig(), vision_feature_layer=layers))
    assert ["the LLaVA uses no experts" in record.message for record in caplog.records] == [True] * warns
