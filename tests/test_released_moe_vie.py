"""The layout of the released MoE-ViE checkpoints, there and back."""

from dataclasses import replace

import pytest
import torch
from plain_moe_vie import RELEASED, TINY, encode_image, encode_text, random_weights, shapes
from tiny_clip import command, error_of, processor
from transformers import AutoModel, AutoProcessor

import clip_moe
from clip_moe.conversion import released_moe_vie
from clip_moe.conversion.released_moe_vie import Released, build, export, infer_config
from clip_moe.engine.provenance import Record
from modeling_clip_moe.modeling_moe_vie import MoEViEModel

SETTINGS = Released(TINY.text_heads, TINY.pooling_heads, TINY.top_k, TINY.image)


@pytest.fixture
def tiny_released(monkeypatch):
    """The command knows the sizes of tiny checkpoints, too."""
    monkeypatch.setitem(released_moe_vie.RELEASED, TINY.width, SETTINGS)


@pytest.mark.parametrize("size", RELEASED)
def test_the_released_sizes_come_out_of_their_tensors(size):
    """Names and shapes alone, on meta."""
    sizes = RELEASED[size]
    state = {name: torch.empty(shape, device="meta") for name, shape in shapes(sizes).items()}
    state |= {name: released_moe_vie.frequencies(sizes.width // sizes.heads) for name in state if "freqs" in name}
    config = infer_config(state)
    text, vision = config.text_config, config.vision_config
    assert (vision.hidden_size, vision.num_hidden_layers, vision.patch_size) == (sizes.width, sizes.layers, sizes.patch)
    assert (vision.num_attention_heads, vision.num_pooling_heads) == (sizes.heads, sizes.pooling_heads)
    assert (vision.num_experts, vision.num_experts_per_tok, vision.num_shared_experts) == (31, sizes.top_k, 1)
    assert (vision.moe_intermediate_size, vision.intermediate_size) == (sizes.expert, sizes.ffn)
    assert (vision.moe_layers, vision.image_size) == (list(range(1, sizes.layers)), sizes.image)
    assert (text.num_hidden_layers, text.num_attention_heads) == (sizes.text_layers, sizes.text_heads)
    with torch.device("meta"):
        expected = MoEViEModel(config).state_dict()
    found = released_moe_vie.apply_rules(state, expected, released_moe_vie.loading_rules(config))
    assert found.keys() == expected.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_computes_what_the_layout_says_and_goes_back_bit_for_bit(dtype):
    state = random_weights(TINY, dtype=dtype)
    model, exact = build(state, SETTINGS), {name: tensor.double() for name, tensor in state.items()}
    assert model.dtype == dtype and model.vision_model.encoder.layers[1].mlp.router.expert_bias.dtype == torch.float32
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(3, 8, 12, generator=generator, dtype=torch.float64)
    text = torch.tensor([3, 5, 39, 0, 0, 0])
    expected = encode_image(exact, image, TINY)[0], encode_text(exact, text, TINY)[0]
    found = model.encode_image(image[None].to(dtype))[0], model.encode_text(text[None])[0]
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    for embedding, plain in zip(found, expected, strict=True):
        assert (embedding - plain).norm() < tolerance * plain.norm()
    back = export(model)
    assert back.keys() == state.keys()
    for name, tensor in state.items():
        expected = tensor.float() if "expert_bias" in name else tensor  # which moves by steps that bfloat16 would lose
        assert back[name].dtype == expected.dtype and torch.equal(back[name], expected), name


FAULTS = {
    "w2": ("the checkpoint has no experts", None),
    "visual.conv1": ("not a MoE-ViE in its authors' naming: missing visual.conv1.weight", None),
    "1.mlp.moe.w1": ("missing from the source: vision_model.*1.mlp.experts.gate_up_proj", None),
    "visual.proj": (r"visual_projection.weight is \(4, 32\) and must be \(16, 32\)", torch.zeros(32, 4)),
    "freqs": ("rope.freqs are not the powers of 10000", torch.ones(4)),
    "surplus": ("left over in the source: surplus", torch.ones(4)),
    "text_projection": (r"text_projection is \(4,\): it must have 2 axes", torch.ones(4)),
    "1.mlp.moe.w2": (
        "w2 holds int8: use a whole checkpoint that is not quantized",
        torch.ones(7, 32, 11).to(torch.int8),
    ),
    "visual.transformer.resblocks.0.attn.attn.out_proj.weight": (
        "out_proj.weight holds no data",
        torch.ones(32, 32, device="meta"),
    ),
}


@pytest.mark.parametrize(("name", "fault"), FAULTS.items(), ids=FAULTS)
def test_what_is_no_checkpoint(name, fault):
    message, other = fault
    state = random_weights(TINY, dtype=torch.float32)
    named = [key for key in state if name in key] or [name]
    state = {key: tensor for key, tensor in state.items() if key not in named}
    state |= {} if other is None else dict.fromkeys(named, other)
    with pytest.raises(ValueError, match=message):
        build(state, SETTINGS)


def test_a_mixed_checkpoint_keeps_its_highest_precision():
    state = random_weights(TINY, dtype=torch.bfloat16)
    state["visual.ln_pre.weight"] = torch.full((TINY.width,), 1 + 2.0**-20)
    model = build(state, SETTINGS)
    assert model.dtype == torch.float32 and (model.vision_model.pre_layrnorm.weight == 1 + 2.0**-20).all()


@pytest.mark.usefixtures("tiny_released")
@pytest.mark.parametrize("setting", ["num_pooling_heads", "num_experts_per_tok"])
def test_what_the_file_does_not_tell_must_be_as_released(setting):
    model = build(random_weights(TINY, dtype=torch.float32), SETTINGS)
    setattr(model.config.vision_config, setting, 2)
    with pytest.raises(
        ValueError, match=f"must be {TINY.text_heads}, {TINY.pooling_heads}, {TINY.top_k}, as released at this width"
    ):
        export(model)


def test_what_the_layout_cannot_express():
    model = build(random_weights(TINY, dtype=torch.float32), SETTINGS)
    model.config.vision_config.scoring_func, model.config.vision_config.rope_theta = "softmax", 100
    model.config.text_config.eos_token_id = 3
    message = "this model: rope_theta must be 10000; scoring_func must be sigmoid; texts must be pooled at the highest"
    with pytest.raises(ValueError, match=message):
        export(model)


@pytest.mark.usefixtures("tiny_released")
@pytest.mark.parametrize("resize_mode", ["shortest", "squash"])
def test_commands_there_and_back(tmp_path, capsys, resize_mode):
    words = processor(image_size=8)
    sizes = replace(TINY, vocabulary=max(words.tokenizer.get_vocab().values()) + 1, length=20)
    state = random_weights(sizes, dtype=torch.float32)
    torch.save(state, tmp_path / "released.pt")
    words.save_pretrained(tmp_path / "processor")
    options = ["--checkpoint", tmp_path / "released.pt", "--processor", tmp_path / "processor"]
    command("released-moe-vie", tmp_path / "model", *options, "--resize_mode", resize_mode)
    assert f"all {len(state)} tensors equal the checkpoint's" in capsys.readouterr().out
    loaded = AutoModel.from_pretrained(tmp_path / "model")
    own = AutoProcessor.from_pretrained(tmp_path / "model")
    assert isinstance(loaded, MoEViEModel) and own.tokenizer.model_max_length == 20
    images = own.image_processor
    assert list(images.image_mean) == list(images.image_std) == [0.5, 0.5, 0.5]
    assert images.do_center_crop == (resize_mode == "shortest")
    command("export-released", tmp_path / "back", "--model", tmp_path / "model")
    back = torch.load(tmp_path / "back" / "checkpoint.pt", weights_only=True)
    assert back.keys() == state.keys() and all(torch.equal(back[name], state[name]) for name in state)


def test_a_repository_on_the_hub_is_read_at_its_commit(hub, tmp_path, monkeypatch):
    monkeypatch.setitem(released_moe_vie.RELEASED, TINY.width, SETTINGS)
    torch.save(random_weights(TINY, dtype=torch.float32), tmp_path / "weights.pt")
    commit = hub.put("facebook/tiny", {"tiny.pt": (tmp_path / "weights.pt").read_bytes()})
    for online in (True, False):
        hub.online(online)
        command("released-moe-vie", tmp_path / str(online), "--checkpoint", "facebook/tiny")
        assert Record.read(tmp_path / str(online)).inputs["facebook/tiny"] == f"facebook/tiny@{commit}"
    error = error_of(clip_moe.main, "released-moe-vie", tmp_path / "no", "--checkpoint", "facebook/nothing")
    assert "facebook/nothing" in error


def test_what_is_no_file_of_weights_is_named_with_its_setting(tmp_path):
    (tmp_path / "empty.pt").touch()
    kinds = ("openai", "archive"), ("released-clip-moe", "checkpoint"), ("released-moe-vie", "checkpoint")
    for kind, setting in kinds:
        for name, fault in (("none.pt", "does not exist"), ("empty.pt", "is an empty file"), ("", "is a folder")):
            error = error_of(clip_moe.main, kind, tmp_path / "out", f"--{setting}", tmp_path / name)
            assert f"out.{setting}: {tmp_path / name} {fault}: name a file of weights" in error


def test_other_widths_and_pickles_of_code_are_refused(tmp_path):
    torch.save(random_weights(TINY, dtype=torch.float32), tmp_path / "tiny.pt")
    error = error_of(clip_moe.main, "released-moe-vie", tmp_path / "model", "--checkpoint", tmp_path / "tiny.pt")
    assert "an image tower 32 wide is none of MoE-ViE's released ones, which are 768, 1024, 1280 wide" in error
    torch.save({"model": SETTINGS}, tmp_path / "code.pt")
    error = error_of(clip_moe.main, "released-moe-vie", tmp_path / "model", "--checkpoint", tmp_path / "code.pt")
    assert "holds more than tensors" in error
