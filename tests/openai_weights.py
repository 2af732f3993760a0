"""Random weights in the layouts of OpenAI and of CLIP-MoE's authors."""

import re

import torch
from torch import nn

# Heads are width / 64; grid and depth ratios as in the models, all else small
SIZES = {
    "ViT-B/32": {"widths": (128, 64), "depths": (2, 2), "patch": 16, "image": 48, "embedding": 32},
    "ViT-L/14": {"widths": (192, 128), "depths": (4, 2), "patch": 4, "image": 32, "embedding": 48},
}
VOCABULARY, LENGTH = 60, 10


def openai_state_dict(widths, depths, patch, image, embedding, settings=True, length=LENGTH):
    """Random weights under OpenAI's names."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape, scale=0.1, offset=0.0):
        return torch.randn(shape, generator=generator) * scale + offset

    state = {}

    def norm(name, width):
        state[f"{name}.weight"], state[f"{name}.bias"] = random(width, offset=1.0), random(width)

    def tower(prefix, width, depth):
        for index in range(depth):
            block = f"{prefix}transformer.resblocks.{index}"
            state[f"{block}.attn.in_proj_weight"] = random(3 * width, width)
            state[f"{block}.attn.in_proj_bias"] = random(3 * width)
            shapes = {"attn.out_proj": (width, width), "mlp.c_fc": (4 * width, width), "mlp.c_proj": (width, 4 * width)}
            for name, shape in shapes.items():
                state[f"{block}.{name}.weight"], state[f"{block}.{name}.bias"] = random(*shape), random(shape[0])
            norm(f"{block}.ln_1", width)
            norm(f"{block}.ln_2", width)

    vision, text = widths
    state["positional_embedding"] = random(length, text)
    state["text_projection"] = random(text, embedding)
    state["logit_scale"] = torch.tensor(2.0)
    state["visual.class_embedding"] = random(vision)
    state["visual.positional_embedding"] = random((image // patch) ** 2 + 1, vision)
    state["visual.proj"] = random(vision, embedding)
    state["visual.conv1.weight"] = random(vision, 3, patch, patch)
    norm("visual.ln_pre", vision)
    tower("visual.", vision, depths[0])
    norm("visual.ln_post", vision)
    tower("", text, depths[1])
    state["token_embedding.weight"] = random(VOCABULARY, text)
    norm("ln_final", text)
    if settings:
        numbers = {"input_resolution": image, "context_length": length, "vocab_size": VOCABULARY}
        state |= {name: torch.tensor(number) for name, number in numbers.items()}
    return state


def released_state_dict(text_sparse=(0, 1), vision_sparse=(1, 2), inside=""):
    """Random weights in the layout of CLIP-MoE's authors, with 3 experts in the sparse ones of 2 and 3 layers."""
    state = openai_state_dict((64, 128), (3, 2), patch=4, image=8, embedding=24, settings=False, length=248)
    generator = torch.Generator().manual_seed(1)
    state["positional_embedding_res"] = torch.randn(248, 128, generator=generator) / 10
    for key in list(state):
        match = re.fullmatch(r"((visual\.)?transformer\.resblocks\.(\d+)\.)mlp\.(.*)", key)
        if match and int(match[3]) in (vision_sparse if match[2] else text_sparse):
            dense, block = state.pop(key), f"{match[1]}{inside}"
            for number in range(3):
                noise = torch.randn(dense.shape, generator=generator) / 10
                state[f"{block}experts.{number}.{match[4]}"] = dense + noise
            if match[4] == "c_fc.weight":
                state[f"{block}gate.weight"] = torch.randn(3, dense.shape[1], generator=generator)
    return state


def torchscript(state, path):
    """Saves a TorchScript archive whose state dict is `state`."""
    root = nn.Module()
    for key, tensor in state.items():
        *parents, leaf = key.split(".")
        module = root
        for name in parents:
            if not hasattr(module, name):
                module.add_module(name, nn.Module())
            module = getattr(module, name)
        module.register_buffer(leaf, tensor)
    torch.jit.save(torch.jit.script(root), path)
