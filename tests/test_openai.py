"""conversion/openai.py: converted weights compute what the published architecture does.

The reference below is written from the published architecture alone (https://github.com/openai/CLIP, clip/model.py)
and shares nothing with the converter.
"""

import hashlib
import math
import os
import pickle
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from test_upcycle import processor
from torch import nn
from transformers import AutoModel, AutoProcessor, CLIPModel

from conversion import openai

# Heads are width / 64; grid and depth ratios as in the models, all else small
SIZES = {
    "ViT-B/32": {"widths": (128, 64), "depths": (2, 2), "patch": 16, "image": 48, "embedding": 32},
    "ViT-L/14": {"widths": (192, 128), "depths": (4, 2), "patch": 4, "image": 32, "embedding": 48},
}
VOCABULARY, LENGTH = 60, 10


def openai_state_dict(widths, depths, patch, image, embedding, settings=True):
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
    state["positional_embedding"] = random(LENGTH, text)
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
        state["context_length"] = torch.tensor(LENGTH)
        state["vocab_size"] = torch.tensor(VOCABULARY)
    return state


def reference(state, images, tokens, activation):
    """(logits per image, image embeddings, text embeddings), one image, one text, one head at a time."""

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

    def transformer(x, prefix, causal):
        depth = len(
            {key.split("resblocks.")[1].split(".")[0] for key in state if key.startswith(f"{prefix}transformer")}
        )
        for index in range(depth):
            block = f"{prefix}transformer.resblocks.{index}"
            x = x + attention(norm(x, f"{block}.ln_1"), f"{block}.attn", causal)
            hidden = norm(x, f"{block}.ln_2") @ state[f"{block}.mlp.c_fc.weight"].T + state[f"{block}.mlp.c_fc.bias"]
            x = x + activation(hidden) @ state[f"{block}.mlp.c_proj.weight"].T + state[f"{block}.mlp.c_proj.bias"]
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
        x = state["token_embedding.weight"][ids] + state["positional_embedding"]
        x = norm(transformer(x, "", causal=True), "ln_final")
        return x[ids.argmax()] @ state["text_projection"]

    image_embeds = torch.stack([encode_image(image) for image in images])
    text_embeds = torch.stack([encode_text(ids) for ids in tokens])
    image_embeds = image_embeds / image_embeds.norm(dim=-1, keepdim=True)
    text_embeds = text_embeds / text_embeds.norm(dim=-1, keepdim=True)
    return state["logit_scale"].exp() * image_embeds @ text_embeds.T, image_embeds, text_embeds


def quick_gelu(x):
    return x / (1 + torch.exp(-1.702 * x))


def gelu(x):
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def assert_matches_reference(model, state, activation=quick_gelu):
    """On random images and texts, with and without an end-of-text token, before or at the end."""
    generator = torch.Generator().manual_seed(1)
    size = model.config.vision_config.image_size
    images = torch.randn(2, 3, size, size, generator=generator)
    tokens = torch.randint(VOCABULARY - 1, (3, LENGTH), generator=generator)
    tokens[0, -1] = VOCABULARY - 1
    tokens[1, 4], tokens[1, 5:] = VOCABULARY - 1, 0
    with torch.no_grad():
        outputs = model(input_ids=tokens, pixel_values=images)
    found = (outputs.logits_per_image, outputs.image_embeds, outputs.text_embeds)
    expected = reference(state, images, tokens, activation)
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


def error_of(*argv):
    with pytest.raises(SystemExit) as stop:
        openai.main([str(argument) for argument in argv])
    message = str(stop.value)
    assert message.startswith("error: ") and "\n" not in message
    return message


@pytest.fixture
def state():
    return openai_state_dict(**SIZES["ViT-B/32"])


@pytest.mark.parametrize("name", SIZES)
def test_matches_the_published_architecture(name):
    state = openai_state_dict(**SIZES[name])
    model = openai.convert(state)
    assert type(model) is CLIPModel
    vision, text = model.config.vision_config, model.config.text_config
    sizes = SIZES[name]
    assert (vision.num_attention_heads, text.num_attention_heads) == tuple(width // 64 for width in sizes["widths"])
    assert (vision.image_size, vision.patch_size) == (sizes["image"], sizes["patch"])
    assert (text.vocab_size, text.max_position_embeddings) == (VOCABULARY, LENGTH)
    assert_matches_reference(model, state)


@pytest.mark.parametrize("kind", ["torch", "legacy", "safetensors", "checkpoint"])
def test_state_dict_files(kind, state, tmp_path, capsys):
    path = tmp_path / ("archive.safetensors" if kind == "safetensors" else "archive.pt")
    if kind == "safetensors":
        save_file(state, path)
    elif kind == "checkpoint":
        wrapped = {f"module.{key}": tensor for key, tensor in state.items()}
        torch.save({"epoch": 3, "name": "run", "state_dict": wrapped, "optimizer": {"lr": 0.1}}, path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=kind == "torch")
    openai.main([str(path), str(tmp_path / "out")])
    printed = capsys.readouterr()
    assert printed.out.count("largest difference") == 3
    assert "warning: the result has no processor" in printed.err and "activation" not in printed.err
    assert_matches_reference(AutoModel.from_pretrained(tmp_path / "out"), state)


def test_half_precision_archive_becomes_float32(state, tmp_path):
    half = {key: tensor.half() if tensor.is_floating_point() else tensor for key, tensor in state.items()}
    torch.save(half, tmp_path / "archive.pt")
    openai.main([str(tmp_path / "archive.pt"), str(tmp_path / "out")])
    model = AutoModel.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == torch.float32
    assert_matches_reference(model, {key: tensor.float() for key, tensor in half.items()})


def test_torchscript_archive_needs_trust_or_a_published_hash(state, tmp_path, monkeypatch):
    archive = tmp_path / "ViT-B-32.pt"
    torchscript(state, archive)
    message = error_of(archive, tmp_path / "out")
    assert "--trust-archive" in message and not (tmp_path / "out").exists()
    openai.main([str(archive), str(tmp_path / "trusted"), "--trust-archive"])
    assert_matches_reference(AutoModel.from_pretrained(tmp_path / "trusted"), state)
    monkeypatch.setitem(openai.SHA256, "this one", hashlib.sha256(archive.read_bytes()).hexdigest())
    openai.main([str(archive), str(tmp_path / "published")])
    assert_matches_reference(AutoModel.from_pretrained(tmp_path / "published"), state)


def test_open_clip_state_dict_with_gelu(tmp_path, capsys):
    state = openai_state_dict(**SIZES["ViT-L/14"], settings=False)
    extras = {"attn_mask": torch.full((LENGTH, LENGTH), -math.inf).triu(1), "logit_scale": torch.tensor([2.0])}
    torch.save(state | extras, tmp_path / "open_clip.pt")
    openai.main([str(tmp_path / "open_clip.pt"), str(tmp_path / "out"), "--activation", "gelu"])
    assert "activation" not in capsys.readouterr().err
    model = AutoModel.from_pretrained(tmp_path / "out")
    assert_matches_reference(model, state, gelu)
    with pytest.raises(AssertionError):
        assert_matches_reference(model, state, quick_gelu)
    openai.main([str(tmp_path / "open_clip.pt"), str(tmp_path / "unsaid")])
    assert "took OpenAI's quick_gelu" in capsys.readouterr().err
    assert_matches_reference(AutoModel.from_pretrained(tmp_path / "unsaid"), state)


def test_other_numbers_of_heads_must_be_given(tmp_path):
    state = openai_state_dict((96, 64), (1, 1), patch=8, image=16, embedding=8)
    with pytest.raises(ValueError, match="a width of 96 is no multiple of 64: give --vision-heads and --text-heads"):
        openai.convert(state)
    with pytest.raises(ValueError, match="5 heads do not divide a width of 96"):
        openai.convert(state, vision_heads=5)
    torch.save(state, tmp_path / "archive.pt")
    openai.main([str(tmp_path / "archive.pt"), str(tmp_path / "out"), "--vision-heads", "3", "--text-heads", "2"])
    config = AutoModel.from_pretrained(tmp_path / "out").config
    assert (config.vision_config.num_attention_heads, config.text_config.num_attention_heads) == (3, 2)


def test_verification_notices_a_wrong_model(state, tmp_path, monkeypatch):
    """The command's own comparison is not with the converted weights: a wrong rule does not get through."""
    swapped = [openai.Rule(r"visual\.ln_pre\.weight", "vision_model.post_layernorm.weight")]
    swapped += [openai.Rule(r"visual\.ln_post\.weight", "vision_model.pre_layrnorm.weight")]
    norms = (r"visual\.ln_pre\.(weight|bias)", r"visual\.ln_post\.(weight|bias)")
    swapped += [
        openai.Rule(rule.source.replace("weight|", ""), rule.target) for rule in openai.RULES if rule.source in norms
    ]
    monkeypatch.setattr(openai, "RULES", [rule for rule in openai.RULES if rule.source not in norms] + swapped)
    torch.save(state, tmp_path / "archive.pt")
    assert "does not compute what the source does" in error_of(tmp_path / "archive.pt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_processor_is_copied_on_request(state, tmp_path):
    processor(image_size=48).save_pretrained(tmp_path / "processor")
    torch.save(state, tmp_path / "archive.pt")
    archive = str(tmp_path / "archive.pt")
    openai.main([archive, str(tmp_path / "out"), "--processor", str(tmp_path / "processor")])
    assert AutoProcessor.from_pretrained(tmp_path / "out")(text="a cat") == processor()(text="a cat")
    (tmp_path / "empty").mkdir()
    assert "neither a tokenizer nor" in error_of(archive, tmp_path / "new", "--processor", tmp_path / "empty")


def test_as_a_program(state, tmp_path):
    torch.save(state, tmp_path / "archive.pt")
    command = [sys.executable, "-m", "conversion.openai", tmp_path / "archive.pt", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr
    assert_matches_reference(CLIPModel.from_pretrained(tmp_path / "out"), state)


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", ["zip", "legacy", "plain pickle", "beside tensors"])
def test_no_pickle_is_executed(kind, state, tmp_path):
    archive, trace = tmp_path / "archive.pt", tmp_path / "executed"
    if kind == "plain pickle":
        archive.write_bytes(pickle.dumps(Malicious(trace)))
    else:
        content = state | {"extra": Malicious(trace)} if kind == "beside tensors" else Malicious(trace)
        torch.save(content, archive, _use_new_zipfile_serialization=kind != "legacy")
    assert "holds more than tensors, and was not loaded" in error_of(archive, tmp_path / "out")
    assert not trace.exists() and not (tmp_path / "out").exists()


def test_files_that_cannot_be_read(state, tmp_path):
    archive = tmp_path / "archive.pt"
    assert f"there is no file {archive}" in error_of(archive, tmp_path / "out")
    torch.save(state, archive)
    archive.write_bytes(archive.read_bytes()[:30_000])
    assert str(archive) in error_of(archive, tmp_path / "out")
    archive.write_bytes(b"")
    assert str(archive) in error_of(archive, tmp_path / "out")
    archive.write_text("<html>not found</html>")
    assert str(archive) in error_of(archive, tmp_path / "out")
    (tmp_path / "archive.safetensors").write_bytes(b"12345678{}")
    assert "cannot load" in error_of(tmp_path / "archive.safetensors", tmp_path / "out")
    torch.save({"lr": 0.1, "weights": torch.ones(1)}, archive)
    assert "is not a state dict" in error_of(archive, tmp_path / "out")


def test_weights_that_do_not_fit_are_named(state):
    def fails(message, **changes):
        changed = {key: tensor for key, tensor in (state | changes).items() if tensor is not None}
        with pytest.raises(ValueError, match=message):
            openai.convert(changed)

    fails("ResNet", **{"visual.layer1.0.conv1.weight": torch.ones(1)})
    fails("logit_bias", logit_bias=torch.ones(1))
    fails("missing visual.proj; it starts with positional_embedding", **{"visual.proj": None})
    layer = "visual.transformer.resblocks.1.attn.in_proj_bias"
    targets = ", ".join(f"vision_model.encoder.layers.1.self_attn.{name}_proj.bias" for name in "kvq")
    fails(f"missing from the source: {targets}", **{layer: None})
    fails("left over in the source: visual.ls_1.gamma", **{"visual.ls_1.gamma": torch.ones(1)})
    fails(r"text_model.final_layer_norm.weight is \(3,\) and must be \(64,\)", **{"ln_final.weight": torch.ones(3)})
    fails(r"of the wrong shape: text_projection \(3,\)", text_projection=torch.ones(3))
