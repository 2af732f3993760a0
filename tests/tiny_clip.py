"""A tiny dense CLIP, its processor, changes of the files of models, and commands that must fail."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPProcessor, CLIPTokenizer

import clip_moe
from clip_moe.conversion.presets import PRESETS
from clip_moe.data.world import build_image_processor

# Of moe_vie, the experts that make whole copies
EXACT_PRESETS = PRESETS | {"moe_vie": dataclasses.replace(PRESETS["moe_vie"], num_experts=30)}
WORDS = ("a", "red", "round", "cat")


def tiny_clip(text_layers=4, vision_layers=4):
    """A dense CLIP in which every parameter is random, biases and layer norms too."""
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "projection_dim": 16}
    special = {"bos_token_id": 38, "eos_token_id": 39, "pad_token_id": 39}
    text = tower | special | {"vocab_size": 40, "max_position_embeddings": 12, "num_hidden_layers": text_layers}
    vision = tower | {"num_hidden_layers": vision_layers, "image_size": 16, "patch_size": 8}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name != "logit_scale":
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 5 + (".norm" in name))
    return model.eval()


def processor(image_size=16):
    letters = sorted(set("".join(WORDS)))
    tokens = [*letters, *(letter + "</w>" for letter in letters)]
    vocab = {token: index for index, token in enumerate(tokens)} | {"<|startoftext|>": 38, "<|endoftext|>": 39}
    tokenizer = CLIPTokenizer(vocab=vocab, merges=[], model_max_length=12, unk_token="<|startoftext|>")
    return CLIPProcessor(CLIPImageProcessorPil(size={"shortest_edge": image_size}, crop_size=image_size), tokenizer)


def symbol_processor(context_length, image_size):
    """The symbols' image processor, and the tokenizer that `SYMBOLS.build_tokenizer` learns in seconds."""
    file = Path(__file__).parents[1] / "training" / "symbol_clip" / "tokenizer.json"
    learned = json.loads(file.read_text())["model"]
    tokenizer = CLIPTokenizer(
        vocab=learned["vocab"],
        merges=list(map(tuple, learned["merges"])),
        bos_token=AddedToken("<|startoftext|>", normalized=False, special=True),
        model_max_length=context_length,
    )
    return CLIPProcessor(image_processor=build_image_processor(image_size), tokenizer=tokenizer)


def saved(folder, model, with_processor=True):
    """Saves a model, and a processor beside it; returns the folder."""
    model.save_pretrained(folder)
    if with_processor:
        processor().save_pretrained(folder)
    return folder


def moved(model, pattern, seed, scale=0.2):
    """The model with random numbers added where a parameter's name contains one of the patterns."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ([pattern] if isinstance(pattern, str) else pattern)):
                parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    return model


def command(*arguments):
    """Runs `clip-moe` in this process."""
    clip_moe.main([str(argument) for argument in arguments])


def error_of(main, *arguments):
    """Runs a command, which must fail with one line; returns that line."""
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    message = str(stop.value)
    assert message.startswith("error: ") and "\n" not in message
    return message


def change_json(path, **changes):
    """Sets keys of a JSON file, which may be new; of a dictionary in it, those that are given."""

    def changed(old, new):
        both = isinstance(old, dict) and isinstance(new, dict)
        return old | {key: changed(old.get(key), value) for key, value in new.items()} if both else new

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(changed(json.loads(path.read_text()) if path.is_file() else {}, changes)))


def change_weights(file, change):
    weights = load_file(file)
    change(weights)
    save_file(weights, file, {"format": "pt"})


def assert_same_weights(actual, expected):
    torch.testing.assert_close(dict(actual.state_dict()), dict(expected.state_dict()), rtol=0, atol=0)
