"""The vision tower swapped into an existing LLaVA of transformers."""

import pytest
import torch
from PIL import Image
from stand_ins import IMAGE_TOKEN, save_llava
from transformers import AutoProcessor, CLIPModel, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import clip_moe
from clip_moe.conversion.llava import warn_without_experts
from clip_moe.conversion.presets import PRESETS
from clip_moe.conversion.upcycle import upcycle
from modeling_clip_moe import CLIPMoEVisionConfig, CLIPMoEVisionModel

BASE = "training/symbol_clip"


@pytest.fixture(scope="module")
def dense_llava(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llava") / "dense"
    save_llava(folder)
    return folder


def swap(output, whole, tower):
    """Runs the command that puts a tower into a LLaVA."""
    clip_moe.main(["llava", str(output), "--model", str(whole), "--tower", str(tower)])


def test_an_upcycled_tower_swapped_in_changes_nothing_and_a_trained_one_does(dense_llava, repository, image, tmp_path):
    base = CLIPModel.from_pretrained(BASE)
    upcycle(base, PRESETS["clip_moe"], seed=0).vision_model.save_pretrained(tmp_path / "tower")
    swap(tmp_path / "upcycled", dense_llava, tmp_path / "tower")
    swap(tmp_path / "trained", dense_llava, repository)

    processor = AutoProcessor.from_pretrained(tmp_path / "trained")
    inputs = processor(text=f"{IMAGE_TOKEN} a red star", images=Image.open(image), return_tensors="pt")
    with torch.no_grad():
        dense, upcycled, trained = (
            LlavaForConditionalGeneration.from_pretrained(folder)(**inputs).logits
            for folder in (dense_llava, tmp_path / "upcycled", tmp_path / "trained")
        )
    torch.testing.assert_close(upcycled, dense)
    assert (trained - dense).abs().max() > 100 * (upcycled - dense).abs().max()


def test_a_tower_of_another_width_and_other_models_are_refused(dense_llava, tmp_path):
    large = {"hidden_size": 96, "num_attention_heads": 3, "image_size": 64, "patch_size": 8}
    for name, sizes in (("narrow", {"hidden_size": 48}), ("large", large)):
        config = CLIPMoEVisionConfig(**sizes, num_hidden_layers=2)
        CLIPMoEVisionModel(config).save_pretrained(tmp_path / name)
    for whole, tower, message in (
        (dense_llava, tmp_path / "narrow", "the projector takes hidden states of width 96, the tower's have 48"),
        (dense_llava, tmp_path / "large", "the image processor .* of 3 x 32 x 32, but .* takes 3 x 64 x 64"),
        (dense_llava, BASE, ".*has no sparse vision tower of one image size: it is of type 'clip'"),
        (BASE, tmp_path / "narrow", ".*a model of type 'llava' is needed"),
    ):
        with pytest.raises(SystemExit, match=f"error: out: {message}"):
            swap(tmp_path / "out", whole, tower)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("layers", "warns"), [(-2, True), (-1, False), ([0, -2], True), (2, False)], ids=str)
def test_a_tower_whose_experts_are_cut_off_warns(layers, warns, caplog):
    vision = CLIPMoEVisionConfig(num_hidden_layers=2, moe_layers=[1])
    warn_without_experts(LlavaConfig(vision_config=vision, text_config=LlamaConfig(), vision_feature_layer=layers))
    assert ["the LLaVA uses no experts" in record.message for record in caplog.records] == [True] * warns
