"""conversion/openai.py: converted weights compute what the published architecture does."""

import hashlib
import json
import math
import re

import numpy as np
import pytest
import torch
from openai_weights import LENGTH, SIZES, VOCABULARY, openai_state_dict, torchscript
from PIL import Image
from safetensors.torch import save_file
from tiny_clip import error_of, processor
from transformers import AutoModel, AutoProcessor, CLIPModel

import clip_moe
from clip_moe.conversion import openai
from clip_moe.conversion.rules import Rule

STATE = openai_state_dict(**SIZES["ViT-B/32"])


def refusal_of(archive, output):
    assert not output.exists()
    error = error_of(clip_moe.main, "openai", output, "--archive", archive)
    assert not output.exists()
    return error


def convert(archive, output, *options):
    clip_moe.main(["openai", str(output), "--archive", str(archive), *map(str, options)])
    return AutoModel.from_pretrained(output, dtype="auto")


@pytest.mark.parametrize("name", SIZES)
def test_matches_the_published_architecture(name):
    sizes, state = SIZES[name], openai_state_dict(**SIZES[name])
    model = openai.build(state)
    openai.verify(state, model)
    assert type(model) is CLIPModel
    vision, text = model.config.vision_config, model.config.text_config
    assert (vision.num_attention_heads, text.num_attention_heads) == tuple(width // 64 for width in sizes["widths"])
    assert (vision.image_size, vision.patch_size) == (sizes["image"], sizes["patch"])
    assert (text.vocab_size, text.max_position_embeddings) == (VOCABULARY, LENGTH)


@pytest.mark.parametrize(("save", "dtype"), [(torch.save, torch.float16), (save_file, torch.float32)])
def test_state_dict_files(save, dtype, tmp_path, capsys):
    path = tmp_path / ("archive.safetensors" if save is save_file else "archive.pt")
    state = {key: tensor.to(dtype) if tensor.is_floating_point() else tensor for key, tensor in STATE.items()}
    save(state, path)
    model = convert(path, tmp_path / "out")
    printed = capsys.readouterr()
    assert printed.out.count("largest difference") == 3
    assert "warning: the result has no processor" in printed.err and "activation" not in printed.err
    assert model.dtype == torch.float32
    openai.verify(state, model)


def prefixed(prefix, state=STATE):
    return {f"{prefix}{key}": tensor for key, tensor in state.items()}


TEXT = ("transformer.", "token_embedding.", "positional_embedding", "ln_final.", "text_projection")
OTHER = {key: tensor + 1 for key, tensor in STATE.items()}
OPTIMIZER = {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]}
# Checkpoints, and what is skipped in them
WRAPPED = {
    "compiled and split": (prefixed("module._orig_mod."), None),
    "fsdp": ({key.replace("resblocks.", "resblocks._fsdp_wrapped_module."): STATE[key] for key in STATE}, None),
    "fsdp, checkpointed": (prefixed("_fsdp_wrapped_module._checkpoint_wrapped_module."), None),
    "within two modules": (prefixed("base_model.student."), None),
    "nested dictionaries": ({"state": {"model": STATE, "best": torch.tensor(0.5)}, "optimizer": OPTIMIZER}, None),
    "with an epoch": (STATE | {"epoch": 3, "_extra_state": None}, None),
    "a separate text tower": ({f"text.{key}" if key.startswith(TEXT) else key: STATE[key] for key in STATE}, None),
    "an average alone": ({"state_dict_ema": STATE, "n_averaged": torch.tensor(3)}, None),
    "an average's state": ({"model": STATE, "ema_state": {"shadow": prefixed("model.", OTHER)}}, "ema_state"),
    "an average by numbers": ({"state_dict": STATE, "ema": {"shadow_params": [*STATE.values()]}}, "ema"),
    "an average at the top": (STATE | {"swa_model": prefixed("module.", OTHER)}, "swa_model"),
    "lightning": ({"state_dict": prefixed("net.") | prefixed("net_ema.", OTHER)}, "state_dict.net_ema"),
    "a head beside it": (prefixed("clip.") | {"head.weight": torch.ones(2, 2)}, "head"),
}


@pytest.mark.parametrize("wrapping", WRAPPED)
def test_checkpoints_in_wrappers(wrapping, tmp_path, capsys):
    content, skipped = WRAPPED[wrapping]
    torch.save(content, tmp_path / "saved.pt")
    state = openai.read_state_dict(tmp_path / "saved.pt")
    assert state.keys() == STATE.keys() and all(torch.equal(state[key], STATE[key]) for key in STATE)
    warning = f"warning: {tmp_path / 'saved.pt'}: weights of {skipped} are skipped\n"
    assert capsys.readouterr().err == (warning if skipped else "")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"student": STATE, "teacher": OTHER}, "holds several models, student, teacher: save only the one to convert"),
        ({"model": prefixed("model.") | prefixed("net.")}, "holds several models, model.model, model.net"),
        (STATE | prefixed("teacher."), "holds several models, one at the top, teacher"),
        (STATE | prefixed("_orig_mod."), "holds several models, one at the top, _orig_mod"),
        ({"ema": STATE, "swa": OTHER}, "holds several models, ema, swa"),
        ({"epoch": 3}, r"not a CLIP in OpenAI's naming: missing .*; it starts with \[\]"),
        ([3], r"not a CLIP in OpenAI's naming: missing .*; it starts with \[\]"),
    ],
)
def test_checkpoints_of_several_models_are_refused(content, message, tmp_path):
    torch.save(content, tmp_path / "saved.pt")
    error = refusal_of(tmp_path / "saved.pt", tmp_path / "out")
    assert re.search(message, error)


def test_quantized_weights_are_refused():
    with pytest.raises(ValueError, match=r"ln_final.weight holds torch.int8: use a checkpoint"):
        openai.build(STATE | {"ln_final.weight": STATE["ln_final.weight"].to(torch.int8)})


def test_torchscript_archive_needs_trust_or_a_published_hash(tmp_path, monkeypatch):
    archive = tmp_path / "ViT-B-32.pt"
    torchscript(STATE, archive)
    assert "--trust_archive" in refusal_of(archive, tmp_path / "out")
    openai.verify(STATE, convert(archive, tmp_path / "trusted", "--trust_archive"))
    monkeypatch.setitem(openai.SHA256, "this one", hashlib.sha256(archive.read_bytes()).hexdigest())
    openai.verify(STATE, convert(archive, tmp_path / "published"))


def test_open_clip_state_dict_with_gelu(tmp_path, capsys):
    state = openai_state_dict(**SIZES["ViT-L/14"], settings=False)
    extras = {"attn_mask": torch.full((LENGTH, LENGTH), -math.inf).triu(1), "logit_scale": torch.tensor([2.0])}
    torch.save(state | extras, tmp_path / "open_clip.pt")
    model = convert(tmp_path / "open_clip.pt", tmp_path / "out", "--activation", "gelu")
    assert "activation" not in capsys.readouterr().err
    openai.verify(state, model)
    model.config.text_config.hidden_act = model.config.vision_config.hidden_act = "quick_gelu"
    with pytest.raises(ValueError, match="differ from the source's"):
        openai.verify(state, model)
    model = convert(tmp_path / "open_clip.pt", tmp_path / "unsaid")
    assert "took OpenAI's quick_gelu" in capsys.readouterr().err
    assert model.config.text_config.hidden_act == model.config.vision_config.hidden_act == "quick_gelu"


def test_other_numbers_of_heads_must_be_given():
    state = openai_state_dict((96, 64), (1, 1), patch=8, image=16, embedding=8)
    with pytest.raises(ValueError, match="a width of 96 is not a multiple of 64: put the open_clip_config.json"):
        openai.build(state)


def test_long_clips_two_tables_become_one(tmp_path, capsys):
    """The first 20 rows of one and the others of the second, up to the end of a text of 248 tokens."""
    state = openai_state_dict(**SIZES["ViT-B/32"], settings=False, length=248)
    first, later = state["positional_embedding"], torch.randn(248, 64, generator=torch.Generator().manual_seed(1))
    torch.save(state | {"positional_embedding_res": later}, tmp_path / "longclip-B.pt")
    model = convert(tmp_path / "longclip-B.pt", tmp_path / "out")
    assert "activation" not in capsys.readouterr().err
    assert model.config.text_config.max_position_embeddings == 248
    openai.verify(state | {"positional_embedding": torch.cat([first[:20], later[20:]])}, model)


def open_clip(folder, width=64, **changes):
    """A model of one layer and open_clip's configuration beside it, with changes in it."""
    archive = folder / "open_clip.safetensors"
    state = openai_state_dict((width, 64), (1, 1), patch=8, image=32, embedding=8, settings=False)
    save_file(state, archive)
    towers = {
        "vision_cfg": {"width": width, "layers": 1, "image_size": 32, "patch_size": 8},
        "text_cfg": {"width": 64, "layers": 1, "heads": 1, "vocab_size": VOCABULARY, "context_length": LENGTH},
    }
    preprocessing = {name: changes.pop(name) for name in ("preprocess_cfg",) if name in changes}
    model = {name: towers[name] | changes.pop(name, {}) for name in towers} | changes
    archive.with_name("open_clip_config.json").write_text(json.dumps({"model_cfg": model, **preprocessing}))
    return archive


@pytest.mark.parametrize(
    ("changes", "options", "expected"),
    [
        ({"vision_cfg": {"head_width": 16}, "text_cfg": {"heads": 4}}, [], ("gelu", 4, 4)),
        ({"vision_cfg": {"head_width": 16}, "quick_gelu": True}, ["--activation", "gelu"], ("gelu", 4, 1)),
        (None, [], ("quick_gelu", 16, 1)),  # heads of 80, as of ViT-H
    ],
    ids=["read", "overridden", "absent"],
)
def test_open_clips_configuration_tells_the_activation_and_the_heads(changes, options, expected, tmp_path, capsys):
    archive = open_clip(tmp_path, 1280 if changes is None else 64, **(changes or {}))
    if changes is None:
        (tmp_path / "open_clip_config.json").unlink()
    config = convert(archive, tmp_path / "out", *options).config
    vision, text = config.vision_config, config.text_config
    assert (vision.hidden_act, vision.num_attention_heads, text.num_attention_heads) == expected
    assert ("activation" in capsys.readouterr().err) == (changes is None)


def test_openais_own_file_does_not_believe_a_configuration_beside_it(tmp_path):
    torch.save(STATE, tmp_path / "ViT.pt")
    open_clip(tmp_path)
    assert convert(tmp_path / "ViT.pt", tmp_path / "out").config.text_config.hidden_act == "quick_gelu"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision_cfg": {"pool_type": "avg"}}, "vision_cfg has pool_type 'avg', which CLIPModel cannot express"),
        ({"vision_cfg": {"layers": [3, 4, 6, 3]}}, "its vision_cfg has layers [3, 4, 6, 3]"),
        ({"text_cfg": {"context_length": 77}}, "its text_cfg has context_length 77"),
        ({"preprocess_cfg": {"resize_mode": "longest"}}, "impossible values (KeyError: 'longest')"),
    ],
)
def test_an_open_clip_configuration_that_is_damaged_or_of_another_model_is_refused(changes, message, tmp_path):
    error = refusal_of(open_clip(tmp_path, **changes), tmp_path / "out")
    assert "open_clip_config.json" in error and message in error


def test_images_are_prepared_as_open_clips_configuration_says(tmp_path):
    given = processor(image_size=32)
    given.save_pretrained(tmp_path / "given")
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 64, 3), dtype=np.uint8))
    squash = {"std": [0.9, 0.8, 0.7], "interpolation": "bilinear", "resize_mode": "squash"}
    default = {"std": None, "interpolation": None}  # as a null in open_clip
    openais_std = [0.26862954, 0.26130258, 0.27577711]
    for changes, width, how in ((squash, 32, Image.Resampling.BILINEAR), (default, 51, Image.Resampling.BICUBIC)):
        preprocessing = {"mean": [0.1, 0.2, 0.3]} | changes
        folder, archive = tmp_path / str(width), open_clip(tmp_path, preprocess_cfg=preprocessing)
        convert(archive, folder, "--processor", tmp_path / "given")
        left = (width - 32) // 2
        squared = np.asarray(image.resize((width, 32), how))[:, left : left + 32]
        expected = (squared / 255 - preprocessing["mean"]) / (preprocessing["std"] or openais_std)
        made = AutoProcessor.from_pretrained(folder)(text="a cat", images=image)
        np.testing.assert_allclose(made["pixel_values"][0], expected.transpose(2, 0, 1), atol=1e-5)
        assert made["input_ids"] == given(text="a cat")["input_ids"]


def test_verification_notices_a_wrong_model(tmp_path, monkeypatch):
    """The command's own comparison is not with the converted weights: a wrong rule does not get through."""
    first, second = (rule.target for rule in openai.RULES if "ln_p" in rule.source)
    swapped = {first: second, second: first}
    rules = [Rule(rule.source, swapped.get(rule.target, rule.target), rule.transform) for rule in openai.RULES]
    monkeypatch.setattr(openai, "RULES", rules)
    torch.save(STATE, tmp_path / "archive.pt")
    error = refusal_of(tmp_path / "archive.pt", tmp_path / "out")
    assert "differ from the source's" in error


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"visual.proj": None, "text_projection": None},
            "missing text_projection; it starts with .*: supported are clip",
        ),
        ({"visual.trunk.cls_token": torch.ones(1)}, "left over in the source: visual.trunk.cls_token"),
        ({"visual.transformer.resblocks.1.attn.in_proj_bias": None}, "missing .*k_proj.bias, .*v_proj.bias, .*q_proj"),
    ],
)
def test_weights_that_do_not_fit_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        openai.build({key: tensor for key, tensor in (STATE | changes).items() if tensor is not None})
