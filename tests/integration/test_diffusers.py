"""Diffusers: our text towers in Stable Diffusion and SDXL, with the usual 77 tokens and with 248."""

import sys

import pytest
import torch
from diffusers import DiffusionPipeline
from programs import WITHOUT_PACKAGE, run_program
from safetensors.torch import load_file
from stand_ins import SHORT, with_77_positions
from tiny_models import sdxl, stable_diffusion, tokenizer
from transformers import CLIPModel, CLIPTextModel, CLIPTextModelWithProjection

from clip_moe.conversion.long_context import lengthen
from modeling_clip_moe import CLIPMoEModel, CLIPMoETextModel, CLIPMoETextModelWithProjection

BASE = "training/symbol_clip"
LONG = 248
PROMPT = "a large red star in the top left corner on a plain blue background"
ENCODERS = {
    1: {"dense": CLIPTextModel, "sparse": CLIPMoETextModel},
    2: {"dense": CLIPTextModelWithProjection, "sparse": CLIPMoETextModelWithProjection},
}
PROGRAM = """
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import save_file

pipeline = DiffusionPipeline.from_pretrained("pipeline", **arguments)
pipeline.set_progress_bar_config(disable=True)
options = {"num_inference_steps": 2, "height": 32, "width": 32, "output_type": "pt"}
images = pipeline(prompt, generator=torch.Generator().manual_seed(0), **options).images
save_file({"images": images}, "images.safetensors")
print(type(pipeline.text_encoder).__module__)
"""


@pytest.fixture(scope="module")
def towers(repository, tmp_path_factory):
    """Folders of text encoders: dense and sparse, with and without a projection, of 77 positions and of 248."""
    place = tmp_path_factory.mktemp("towers")
    models = {"dense": CLIPModel.from_pretrained(BASE), "sparse": CLIPMoEModel.from_pretrained(repository)}
    for kind, model in models.items():
        with_77_positions(model).save_pretrained(place / kind)
        for number, classes in ENCODERS.items():
            folder = place / f"{kind}_{number}_{SHORT}"
            tower = classes[kind].from_pretrained(place / kind)
            tower.save_pretrained(folder)
            lengthen(tower, LONG).save_pretrained(place / f"{kind}_{number}_{LONG}")
    return place


def encoder(towers, number, kind, length=SHORT):
    return ENCODERS[number][kind].from_pretrained(towers / f"{kind}_{number}_{length}")


def sdxl_of(towers, first="sparse", second="sparse", length=SHORT):
    return sdxl(encoder(towers, 1, first, length), encoder(towers, 2, second, length), length)


def draw(pipeline, prompt=PROMPT, **options):
    pipeline.set_progress_bar_config(disable=True)
    options = {"num_inference_steps": 2, "height": 32, "width": 32, "output_type": "pt"} | options
    images = pipeline(prompt, generator=torch.Generator().manual_seed(0), **options).images
    assert images.shape == (1, 3, 32, 32)
    return images


def assert_same_images(actual, expected):
    # Weights that lie elsewhere in memory may round otherwise
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


def tokens(prompt, length=SHORT):
    return tokenizer(length)(prompt, padding="max_length", truncation=True, return_tensors="pt").input_ids


def test_stable_diffusion_draws_what_our_tower_says(towers):
    tower = encoder(towers, 1, "sparse")
    with torch.no_grad():
        prompt, nothing = (tower(tokens(text)).last_hidden_state for text in (PROMPT, ""))
    pipeline = stable_diffusion(tower)
    expected = draw(pipeline, None, prompt_embeds=prompt, negative_prompt_embeds=nothing)
    assert_same_images(draw(pipeline), expected)


@pytest.mark.parametrize(
    ("places", "length"), [(("sparse", "dense"), SHORT), (("dense", "sparse"), LONG), (("sparse", "sparse"), LONG)]
)
def test_sdxl_draws_what_our_towers_say_in_either_place(places, length, towers):
    pipeline = sdxl_of(towers, *places, length)
    encoders = pipeline.text_encoder, pipeline.text_encoder_2

    def embed(text):
        with torch.no_grad():
            outputs = [encoder(tokens(text, length), output_hidden_states=True) for encoder in encoders]
        return torch.cat([output.hidden_states[-2] for output in outputs], dim=-1), outputs[1].text_embeds

    (prompt, pooled), (nothing, pooled_nothing) = embed(PROMPT), embed("")
    assert prompt.shape == (1, length, 128)
    expected = draw(
        pipeline,
        None,
        prompt_embeds=prompt,
        pooled_prompt_embeds=pooled,
        negative_prompt_embeds=nothing,
        negative_pooled_prompt_embeds=pooled_nothing,
    )
    assert_same_images(draw(pipeline, negative_prompt=""), expected)
    assert (draw(pipeline, "a small green circle", negative_prompt="") - expected).abs().max() > 1e-2


def test_a_saved_pipeline_loads_with_the_package_and_without_it(towers, tmp_path, monkeypatch):
    """Diffusers looks for the code beside the weights by the name that the index has for the package."""
    pipeline = sdxl_of(towers)
    pipeline.save_pretrained(tmp_path / "pipeline")

    def drawn(start, **arguments):
        """In another process; also where the text encoder's code lies."""
        printed = run_program(tmp_path, "-c", f"{start}\nprompt, arguments = {PROMPT!r}, {arguments!r}\n{PROGRAM}")
        assert_same_images(load_file(tmp_path / "images.safetensors")["images"], draw(pipeline))
        return printed

    drawn("import modeling_clip_moe")
    index = tmp_path / "pipeline" / "model_index.json"
    before = index.read_text()
    index.write_text(before.replace("modeling_clip_moe.modeling_clip_moe", "modeling_clip_moe"))
    assert drawn(WITHOUT_PACKAGE, trust_remote_code=True).startswith("diffusers_modules.")
    index.write_text(before)
    monkeypatch.delitem(sys.modules, "modeling_clip_moe.modeling_clip_moe")
    with pytest.raises(ValueError, match="import modeling_clip_moe.modeling_clip_moe before calling"):
        DiffusionPipeline.from_pretrained(tmp_path / "pipeline")
