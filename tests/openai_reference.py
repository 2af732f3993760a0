"""OpenAI's and CLIP-MoE's released architectures, written from their descriptions alone (https://github.com/openai/CLIP,
clip/model.py; arXiv:2409.19291): one image, one text, one head and one token at a time; and random weights for them."""

import math
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
            for name, shape in (
                ("attn.out_proj", (width, width)),
                ("mlp.c_fc", (4 * width, width)),
                ("mlp.c_proj", (width, 4 * width)),
            ):
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
        state["input_resolution"] = torch.tensor(image)
        state["context_length"] = torch.tensor(length)
        state["vocab_size"] = torch.tensor(VOCABULARY)
    return state


def released_state_dict(text_sparse=(0, 1), vision_sparse=(1, 2), inside=""):
    """Random weights in the layout of CLIP-MoE's authors, with 3 experts in the sparse ones of 2 and 3 layers."""
    state = openai_state_dict((64, 128), (3, 2), patch=4, image=8, embedding=24, settings=False, length=248)
    generator = torch.Generator().manual_seed(1)
    state["positional_embedding_res"] = torch.randn(248, 128, generator=generator) / 10
    for key in list(state):
        match = re.fullmatch(r"((visual\.)?transformer\.resblocks\.(\d+)\.)mlp\.(.*)", key)
        if match and int(match[3]) in (vision_sparse if match[2] else text_sparse):
            dense = state.pop(key)
            for number in range(3):
                state[f"{match[1]}{inside}experts.{number}.{match[4]}"] = (
                    dense + torch.randn(dense.shape, generator=generator) / 10
                )
            if match[4] == "c_fc.weight":
                state[f"{match[1]}{inside}gate.weight"] = torch.randn(3, dense.shape[1], generator=generator)
    return state


def quick_gelu(x):
    return x / (1 + torch.exp(-1.702 * x))


def gelu(x):
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def reference(state, images, tokens, activation=quick_gelu, top_k=2):
    """(logits per image, image embeddings, text embeddings)"""

    def norm(x, name):
        centered = x - x.mean(dim=-1, keepdim=True)
        variance = (centered**2).mean(dim=-1, keepdim=True)
        return centered / torch.sqrt(variance + 1e-5) * state[f"{name}.weight"] + state[f"{name}.bias"]

    def attention(x, name, causal):
        length, width = x.shape
        qkv = x @ state[f"{name}.in_proj_weight"].T + state[f"{name}.in_proj_bias"]
        outputs = []
        for start in range(0, width, 64):
            q, k, v = (qkv[:, part * width + start : part * width + start + 64] for part in range(3))
            scores = q @ k.T / math.sqrt(64)
            if causal:
                scores = scores + torch.full((length, length), -math.inf).triu(1)
            outputs.append(torch.softmax(scores, dim=-1) @ v)
        return torch.cat(outputs, dim=-1) @ state[f"{name}.out_proj.weight"].T + state[f"{name}.out_proj.bias"]

    def ffn(x, name):
        hidden = activation(state[f"{name}.c_fc.weight"] @ x + state[f"{name}.c_fc.bias"])
        return state[f"{name}.c_proj.weight"] @ hidden + state[f"{name}.c_proj.bias"]

    def mixture(x, block):
        """One token: the gate's softmax, the best experts, their probabilities made to sum to 1."""
        if f"{block}.gate.weight" not in state:
            return ffn(x, f"{block}.mlp")
        logits = state[f"{block}.gate.weight"] @ x
        probabilities = torch.exp(logits) / torch.exp(logits).sum()
        best = sorted(range(len(logits)), key=lambda number: -probabilities[number])[:top_k]
        total = sum(probabilities[number] for number in best)
        return sum(probabilities[number] / total * ffn(x, f"{block}.experts.{number}") for number in best)

    def transformer(x, prefix, causal):
        blocks = sorted(
            {key.split(".ln_1")[0] for key in state if key.startswith(f"{prefix}transformer.") and ".ln_1" in key}
        )
        for block in blocks:
            x = x + attention(norm(x, f"{block}.ln_1"), f"{block}.attn", causal)
            x = x + torch.stack([mixture(token, block) for token in norm(x, f"{block}.ln_2")])
        return x

    def encode_image(image):
        kernels = state["visual.conv1.weight"]
        size = kernels.shape[-1]
        patches = [
            (kernels * image[:, top : top + size, left : left + size]).sum(dim=(1, 2, 3))
            for top in range(0, image.shape[1], size)
            for left in range(0, image.shape[2], size)
        ]
        x = torch.stack([state["visual.class_embedding"], *patches]) + state["visual.positional_embedding"]
        x = transformer(norm(x, "visual.ln_pre"), "visual.", causal=False)
        return norm(x[0], "visual.ln_post") @ state["visual.proj"]

    def encode_text(ids):
        positions = state["positional_embedding"]
        if "positional_embedding_res" in state:
            positions = torch.cat([positions[:20], state["positional_embedding_res"][20:]])
        x = state["token_embedding.weight"][ids] + positions[: len(ids)]
        x = norm(transformer(x, "", causal=True), "ln_final")
        return x[ids.argmax()] @ state["text_projection"]

    image_embeds = torch.stack([encode_image(image) for image in images])
    text_embeds = torch.stack([encode_text(ids) for ids in tokens])
    image_embeds = image_embeds / image_embeds.norm(dim=-1, keepdim=True)
    text_embeds = text_embeds / text_embeds.norm(dim=-1, keepdim=True)
    return state["logit_scale"].exp() * image_embeds @ text_embeds.T, image_embeds, text_embeds


def assert_matches_reference(model, state, length=LENGTH, **options):
    """On random images and texts, with and without an end-of-text token, before or at the end."""
    generator = torch.Generator().manual_seed(1)
    size = model.config.vision_config.image_size
    images = torch.randn(2, 3, size, size, generator=generator)
    tokens = torch.randint(VOCABULARY - 1, (3, length), generator=generator)
    tokens[0, -1] = VOCABULARY - 1
    tokens[1, 4], tokens[1, 5:] = VOCABULARY - 1, 0
    with torch.no_grad():
        outputs = model(input_ids=tokens, pixel_values=images)
    found = (outputs.logits_per_image, outputs.image_embeds, outputs.text_embeds)
    expected = reference(state, images, tokens, **options)
    for name, left, right in zip(("logits", "image_embeds", "text_embeds"), found, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def torchscript(state, path):
    """Saves a TorchScript archive whose state dict is `state`."""
    root = nn.Module()
    for key, tensor in state.items():
        *parents, leaf = key.split(".")
        module = root
        for name in parents:
            if name not in module._modules:
                module.add_module(name, nn.Module())
            module = module._modules[name]
        module.register_buffer(leaf, tensor)
    torch.jit.save(torch.jit.script(root), path)
