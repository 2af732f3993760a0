"""The examples of a published card, run as they stand but for names."""

import re

import pytest
import torch
from huggingface_hub import ModelCard
from programs import run_program
from tiny_models import save_dense_llava, stable_diffusion
from transformers import AutoProcessor, CLIPModel, CLIPTextModel, LlavaForConditionalGeneration

from conversion.commands import publish
from conversion.publishing import card as card_module
from modeling_clip_moe import CLIPMoDEModel, CLIPMoEVisionModel

BASE = "training/symbol_clip"
NAME = "user/clip-moe-symbols"


def examples(folder, language):
    text = ModelCard.load(folder / "README.md").text
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


@pytest.fixture(scope="module")
def card(source, tmp_path_factory):
    """What is published of a model, as if LLaVA and Stable Diffusion had towers as small as the symbol CLIP's."""
    config, folder = CLIPModel.from_pretrained(BASE).config, tmp_path_factory.mktemp("published") / "model"
    vision, text = config.vision_config, config.text_config
    encoder = ("Stable Diffusion 1", "text_encoder", "CLIPMoETextModel")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(card_module, "LLAVA_TOWER", (vision.hidden_size, vision.image_size, vision.patch_size))
        patch.setattr(card_module, "VOCABULARY", text.vocab_size)
        patch.setattr(card_module, "TEXT_ENCODERS", {text.hidden_size: encoder})
        publish.main([str(source), NAME, "--dry-run", str(folder)])
    return folder


@pytest.fixture(scope="module")
def place(card, image, tmp_path_factory):
    """Where the examples run: what they name is there."""
    place = tmp_path_factory.mktemp("card")
    (place / "image.png").symlink_to(image)
    stable_diffusion(CLIPTextModel.from_pretrained(BASE), 64).save_pretrained(place / "STABLE-DIFFUSION")
    save_dense_llava(place / "LLAVA")
    (place / "user").mkdir()
    (place / NAME).symlink_to(card)
    return place


@pytest.mark.parametrize("number", range(5))
def test_examples_run(card, place, number):
    found = examples(card, "python")
    assert len(found) == 5
    # Where a card does not ask for the package, it is not needed
    without = 'import sys; sys.modules["modeling_clip_moe"] = None\n' if "trust_remote_code" in found[number] else ""
    shows = "\nfrom PIL import Image; Image.open('drawn.png')" if "drawn.png" in found[number] else ""
    run_program(place, "-c", without + found[number] + shows)


def test_the_command_runs(card, place):
    (command,) = examples(card, "bash")
    run_program(place, "-m", *command.replace("clip-moe", "clip_moe", 1).split())
    found = LlavaForConditionalGeneration.from_pretrained(place / "OUTPUT").model.vision_tower.state_dict()
    expected = CLIPMoEVisionModel.from_pretrained(card).state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_examples_of_other_models_run(image, tmp_path):
    dense = CLIPModel.from_pretrained(BASE)
    sources = {"dense": BASE, "mode": tmp_path / "mode"}
    CLIPMoDEModel.from_experts([dense, dense]).save_pretrained(sources["mode"])
    AutoProcessor.from_pretrained(BASE).save_pretrained(sources["mode"])
    (tmp_path / "image.png").symlink_to(image)
    for name, number in (("dense", 3), ("mode", 1)):
        publish.main([str(sources[name]), f"user/{name}", "--dry-run", str(tmp_path / "user" / name)])
        found = examples(tmp_path / "user" / name, "python")
        assert len(found) == number and not examples(tmp_path / "user" / name, "bash")
        run_program(tmp_path, "-c", "\n".join(found))
