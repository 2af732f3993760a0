"""All converters, with tiny sources that each of them takes."""

import pytest
import torch
from openai_weights import as_released, openai_state_dict
from safetensors.torch import save_file
from tiny_clip import processor, saved, tiny_clip
from transformers import LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor

from conversion import released_clip_moe, upcycle
from conversion.commands import assemble, average, dense, llava, long_context, unify
from conversion.commands import openai as openai_command
from conversion.commands import released_clip_moe as released
from conversion.commands import upcycle as upcycle_command
from conversion.presets import PRESETS

# Command: its function, and its arguments for folders of sources and an output
COMMANDS = {
    "upcycle": (upcycle_command.main, lambda s, out: [s / "dense", out, "--preset", "clip_moe"]),
    "dense": (dense.main, lambda s, out: [s / "sparse", out, "--expert", "1"]),
    "average": (average.main, lambda s, out: [out, "--models", s / "dense", s / "dense"]),
    "assemble": (assemble.main, lambda s, out: [out, "--experts", s / "dense", s / "sparse"]),
    "unify": (unify.main, lambda s, out: [s / "dense", out, "--experts", s / "dense"]),
    "long_context": (long_context.main, lambda s, out: [s / "dense", out, "--length", "22", "--keep", "2"]),
    "llava": (llava.main, lambda s, out: [s / "llava", s / "sparse", out]),
    "openai": (openai_command.main, lambda s, out: [s / "openai.safetensors", out, "--processor", s / "dense"]),
    "released_clip_moe": (released.main, lambda s, out: [s / "released.safetensors", out, "--processor", s / "dense"]),
    "released_clip_moe --reverse": (released.main, lambda s, out: [s / "heads_of_64", out, "--reverse"]),
}


def run(command, sources, output, *arguments):
    """Runs a converter in this process. Returns what it ended with: None, or its line of error."""
    main, arguments_of = COMMANDS[command]
    try:
        main([str(argument) for argument in [*arguments_of(sources, output), *arguments]])
    except SystemExit as stop:
        return stop.code
    return None


@pytest.fixture(scope="session")
def sources(tmp_path_factory):
    """What `COMMANDS` convert, and a mixture; who damages it mends it, or takes a copy."""
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
    save_file(as_released(state), folder / "released.safetensors")
    released_clip_moe.convert(as_released(state)).save_pretrained(folder / "heads_of_64")

    vision = model.config.vision_config
    whole = tiny_llava(vision, 40, 37)
    whole.model.vision_tower.load_state_dict(model.vision_model.state_dict())
    whole.save_pretrained(folder / "llava")
    parts, settings = processor(), {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    parts.tokenizer.add_tokens(["<image>"])
    processors = {"image_processor": parts.image_processor, "tokenizer": parts.tokenizer}
    LlavaProcessor(**processors, patch_size=vision.patch_size, **settings).save_pretrained(folder / "llava")


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
