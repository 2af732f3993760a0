"""All converters, with tiny sources that each of them takes."""

import pytest
import torch
from openai_weights import openai_state_dict
from safetensors.torch import save_file
from tiny_clip import processor, saved, tiny_clip
from transformers import LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor

import clip_moe
from clip_moe.conversion import openai, released_clip_moe, upcycle
from clip_moe.conversion.presets import PRESETS

IMAGE_TOKEN = "<image>"
# Converter -> what follows its output on the command line, for a folder of sources
COMMANDS = {
    "upcycle": lambda s: ["--model", s / "dense", "--preset", "clip_moe"],
    "dense": lambda s: ["--model", s / "sparse", "--take", 1],
    "average": lambda s: ["--models", s / "dense", s / "dense"],
    "assemble": lambda s: ["--experts", s / "dense", s / "sparse"],
    "unify": lambda s: ["--model", s / "dense", "--experts", s / "dense"],
    "long-context": lambda s: ["--model", s / "dense", "--length", 22, "--keep", 2],
    "llava": lambda s: ["--model", s / "llava", "--tower", s / "sparse"],
    "openai": lambda s: ["--archive", s / "openai.safetensors", "--processor", s / "dense"],
    "released-clip-moe": lambda s: ["--checkpoint", s / "released.safetensors", "--processor", s / "dense"],
    "export-released": lambda s: ["--model", s / "heads_of_64"],
}


def run(command, sources, output):
    """Runs a converter in this process. Returns what it ended with: None, or its line of error."""
    try:
        clip_moe.main([command, str(output), *map(str, COMMANDS[command](sources))])
    except SystemExit as stop:
        return stop.code
    return None


@pytest.fixture(scope="session")
def sources(tmp_path_factory):
    """Models for `COMMANDS` to convert, and a mixture; a test that damages them repairs them, or takes a copy."""
    folder = tmp_path_factory.mktemp("sources")
    make_sources(folder)
    assert run("assemble", folder, folder / "mixture") is None
    return folder


def make_sources(folder):
    model = tiny_clip(2, 2)
    saved(folder / "dense", model)
    saved(folder / "sparse", upcycle.upcycle(model, PRESETS["clip_moe"]))
    state = openai_state_dict((64, 64), (1, 1), 8, 16, 16)
    state["token_embedding.weight"] = state["token_embedding.weight"][:40].clone()
    state["vocab_size"] = torch.tensor(40)
    save_file(state, folder / "openai.safetensors")
    heads_of_64 = upcycle.upcycle(openai.build(state), PRESETS["clip_moe"])
    save_file(released_clip_moe.export(heads_of_64), folder / "released.safetensors")
    heads_of_64.save_pretrained(folder / "heads_of_64")

    save_llava(folder / "llava", model, processor())


def save_llava(folder, clip, processor):
    """A LLaVA with a dense CLIP's tower, and its processor."""
    vision, tokenizer = clip.config.vision_config, processor.tokenizer
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE_TOKEN]})
    whole = tiny_llava(vision, max(tokenizer.get_vocab().values()) + 1, tokenizer.convert_tokens_to_ids(IMAGE_TOKEN))
    whole.model.vision_tower.load_state_dict(clip.vision_model.state_dict())
    whole.save_pretrained(folder)
    settings = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    LlavaProcessor(processor.image_processor, tokenizer, vision.patch_size, **settings).save_pretrained(folder)


def tiny_llava(vision_config, vocab_size, image_token):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlavaConfig(
        vision_config=vision_config.to_dict(),
        text_config=LlamaConfig(vocab_size=vocab_size, **sizes).to_dict(),
        image_token_index=image_token,
        image_seq_length=(vision_config.image_size // vision_config.patch_size) ** 2,
    )
    torch.manual_seed(0)
    return LlavaForConditionalGeneration(config).eval()
