"""conversion/upcycle.py: an upcycled model computes what its dense source does, whatever the preset."""

import json
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_clip import EXACT_PRESETS, command, error_of, moved, processor, saved, tiny_clip
from transformers import AutoModel, AutoProcessor, BertConfig, BertModel, CLIPModel

import clip_moe
from clip_moe.conversion.dense import extract
from clip_moe.conversion.presets import PRESETS
from clip_moe.conversion.upcycle import experts_of_ffn, inexact_starts, sparse_blocks, upcycle
from clip_moe.conversion.verification import compare, sample_inputs
from clip_moe.evaluation.costs import count_multiply_adds, count_parameters, meta_model
from modeling_clip_moe import CLIPMoEModel

UNEQUAL = "differ from the source's"


@pytest.fixture(scope="module")
def dense():
    return tiny_clip()


@pytest.fixture(scope="module")
def whole(dense, tmp_path_factory):
    return saved(tmp_path_factory.mktemp("upcycle") / "dense", dense)


@pytest.fixture
def source(dense, tmp_path):
    """One that may be damaged."""
    return saved(tmp_path / "dense", dense)


def upcycled(source, output, preset, *settings):
    """The configuration of the model that the command makes."""
    command("upcycle", output, "--model", source, "--preset", preset, *settings)
    return CLIPMoEModel.from_pretrained(output).config


@pytest.mark.parametrize("name", EXACT_PRESETS)
@pytest.mark.parametrize("towers", [["text"], ["vision"], ["text", "vision"]], ids="+".join)
def test_equals_the_dense_model(dense, name, towers):
    sparse = upcycle(dense, EXACT_PRESETS[name], towers)
    for tower in ("text", "vision"):
        config = getattr(sparse.config, f"{tower}_config")
        assert bool(config.moe_layers) == (tower in towers)
        config.norm_topk_prob = True
    compare(dense, sparse, tolerance=1e-5)


NARROW = {
    "cut in 2": {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 4},
    "shared": {
        "moe_intermediate_size": 12,
        "num_shared_experts": 1,
        "num_experts": 12,
        "num_experts_per_tok": 6,
    },
    "half shared": {"moe_intermediate_size": 24, "num_shared_experts": 1},
    "each tower's own": {
        "moe_intermediate_size": {"text": 24, "vision": 12},
        "num_experts": 8,
        "num_experts_per_tok": 4,
    },
}


@pytest.mark.parametrize("changes", NARROW.values(), ids=NARROW)
def test_narrow_and_shared_experts_equal_the_dense_model_and_give_it_back(dense, changes, tmp_path):
    preset = replace(PRESETS["clip_moe"], **changes)
    sparse = upcycle(dense, preset)
    compare(dense, sparse, tolerance=1e-5)
    width = changes["moe_intermediate_size"]
    for tower in ("text", "vision"):
        experts = getattr(sparse, f"{tower}_model").encoder.layers[0].mlp.experts
        assert experts.up_proj.shape[1] == (width[tower] if isinstance(width, dict) else width)
    unnormalized = upcycle(dense, replace(preset, norm_topk_prob=False))
    for back in (extract(unnormalized, 0, scale=1), extract(sparse, 1)):
        torch.testing.assert_close(back.state_dict(), dense.state_dict(), rtol=0, atol=1e-6)
    moved(sparse, (".experts.", ".shared_experts.", ".router."), 1, 1.0)
    folder = saved(tmp_path / "sparse", sparse)
    command("dense", tmp_path / "expert", "--model", folder, "--take", 1)  # compares with forced experts


@pytest.mark.parametrize("scoring_func", ["softmax", "sigmoid"])
def test_narrow_experts_of_any_scores_compute_what_whole_ones_do(dense, scoring_func):
    routing = {"vision_config": {"scoring_func": scoring_func}}
    blocks = []
    for changes in ({"num_experts": 2}, {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 24}):
        preset = replace(PRESETS["clip_moe"], norm_topk_prob=False, **changes)
        blocks.append(upcycle(dense, preset, ["vision"], routing=routing).vision_model.encoder.layers[1].mlp)
    with torch.no_grad():
        blocks[1].router.weight.copy_(blocks[0].router.weight.repeat_interleave(2, dim=0))
    hidden_states = torch.randn(2, 5, 32)
    whole, narrow = (block(hidden_states) for block in blocks)
    torch.testing.assert_close(narrow, whole)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_intermediate_size": 49}, "48 hidden units, less 0 shared experts, cannot be split into experts of 49"),
        ({"moe_intermediate_size": 24, "num_shared_experts": 2}, "less 2 shared experts, cannot be split"),
        ({"moe_intermediate_size": 5}, "num_experts is 4, but 10 experts make an FFN: choose at least 10"),
    ],
)
def test_experts_that_do_not_make_an_ffn(dense, changes, message):
    with pytest.raises(ValueError, match=message):
        upcycle(dense, replace(PRESETS["clip_moe"], **changes))


def b32_of_two_layers(is_gated=False):
    """ViT-B/32's tokens and its FFN of four times the width, in towers 48 wide; or a SwiGLU instead."""
    tower = {"hidden_size": 48, "intermediate_size": 192, "num_attention_heads": 2, "num_hidden_layers": 2}
    vision = tower | {"image_size": 224, "patch_size": 32}
    vision |= {"use_gated_mlp": True, "hidden_act": "silu"} if is_gated else {}
    torch.manual_seed(0)
    model_class = CLIPMoEModel if is_gated else CLIPModel
    towers = {"text_config": tower | {"vocab_size": 50}, "vision_config": vision}
    model = model_class(model_class.config_class(**towers, projection_dim=32))
    return moved(model.eval(), "", seed=0).double()


# Routed experts, active ones, shared ones and their width -> the shares of the embeddings' length by which the start
# is off, at least and at most. Weights are made in float32
GRANULARITIES = {
    (31, 3, 1, "1/4"): (1e-3, 1),
    (30, 3, 1, "1/4"): (0, 1e-7),
    (24, 3, 1, "1/4"): (0, 1e-7),
    (32, 4, 0, "1/4"): (0, 1e-7),
    (64, 4, 0, "1/4"): (0, 1e-7),
    (32, 3, 0, "1/4"): (1e-3, 1),  # a part of each token is missing
    (12, 3, 0, 70): (0, 1e-7),  # the last part has 18 zero units
    (8, 2, 1, 80): (0, 1e-7),  # 48
}


@pytest.mark.parametrize("is_gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("numbers", GRANULARITIES, ids=str)
def test_any_number_of_experts_of_any_width(numbers, is_gated):
    number, chosen, shared, width = numbers
    changes = {"num_experts": number, "num_experts_per_tok": chosen, "num_shared_experts": shared}
    dense, maps = b32_of_two_layers(is_gated), 3 if is_gated else 2
    preset = replace(PRESETS["moe_vie"], moe_intermediate_size=width, **changes)
    sparse = upcycle(dense, preset, seed=5 if is_gated else 0)  # with which tokens meet the last of 31
    inputs = sample_inputs(dense.config, batch_size=8)
    expected, found = dense(**inputs).image_embeds, sparse(**inputs).image_embeds
    off = ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max().item()
    least, most = GRANULARITIES[numbers]
    assert least <= off < most
    assert bool(inexact_starts(sparse.config.vision_config)) == (least > 0)

    found.sum().backward()
    ((layer, block),) = sparse_blocks(sparse.vision_model).items()
    assert layer == "encoder.layers.1.mlp" and block.router.weight.grad.abs().max() > 1e-4
    units = sparse.config.vision_config.expert_size
    counts, costs = (count(meta_model(sparse.config)) for count in (count_parameters, count_multiply_adds))
    assert counts["expert"] == maps * 48 * units + (maps - 1) * units + 48 and counts["routers"] == 48 * number
    ffn_and_router = maps * 48 * (chosen + shared) * units + 48 * number
    added = 50 * (ffn_and_router - maps * 48 * 192)
    assert costs["image"] - count_multiply_adds(meta_model(dense.config))["image"] == added

    back = extract(sparse, number // experts_of_ffn(sparse.config.vision_config) - 1)
    torch.testing.assert_close(back.state_dict(), dense.state_dict(), rtol=0, atol=1e-7)


def test_gated_experts_have_the_rows_of_the_gate_first_and_may_do_without_biases():
    dense = b32_of_two_layers(is_gated=True)
    preset = replace(PRESETS["moe_vie"], moe_mlp_bias=False, fusion_gate=True)
    with pytest.raises(ValueError, match=r"moe_mlp_bias is False, but vision_model.*\.mlp\..*bias is not zero"):
        upcycle(dense, preset)
    ffn = dense.vision_model.encoder.layers[1].mlp
    for part in (ffn.gate_proj, ffn.up_proj, ffn.down_proj):
        part.bias.data.zero_()
    sparse = upcycle(dense, replace(preset, num_experts=30))
    compare(dense, sparse, tolerance=1e-6)
    first = sparse.vision_model.encoder.layers[1].mlp.experts.gate_up_proj[0]
    assert torch.equal(first, torch.cat([ffn.gate_proj.weight[48:96], ffn.up_proj.weight[48:96]]))
    for taken in (9, "base"):
        torch.testing.assert_close(extract(sparse, taken).state_dict(), dense.state_dict(), rtol=0, atol=0)


def test_the_command_says_how_far_an_inexact_start_is_and_which_are_exact(whole, tmp_path, capsys):
    upcycled(whole, tmp_path / "31", "moe_vie")
    assert re.search(
        r"embeddings differ from the dense model's by [\d.]+ % of their length \(at most [\d.]+ %\) for images and "
        r"by 0 % .* for texts, since vision_config.num_experts 31 leaves the last copy of the FFN without 2 of its 3 "
        r"parts \(30 \+ 1 or 33 \+ 1 would be exact\)\n",
        capsys.readouterr().out,
    )
    command("dense", tmp_path / "copy", "--model", tmp_path / "31", "--take", 9)
    assert "Load the model with\n\n    from transformers import AutoModel\n" in capsys.readouterr().out
    arguments = "dense", tmp_path / "rest", "--model", tmp_path / "31", "--take"
    assert "there is no expert 10, only 0, 1, " in error_of(clip_moe.main, *arguments, 10)
    upcycled(whole, tmp_path / "4", "moe_vie", "--changes.num_experts", 30, "--changes.num_experts_per_tok", 4)
    lacks = (
        "num_experts_per_tok 4 leaves a token's last copy of the FFN without 2 of its 3 parts (3 or 6 would be exact)"
    )
    assert lacks in capsys.readouterr().out
    sparse = CLIPMoEModel.from_pretrained(tmp_path / "31")
    sparse.config.vision_config.routed_scaling_factor = 1
    with pytest.raises(ValueError, match="tokens have 3 of 31, whose weights sum to 1, not 3 as after upcycling"):
        extract(sparse, 0)


def test_zero_units_that_were_trained_are_not_left_out(dense):
    preset = replace(PRESETS["clip_moe"], moe_intermediate_size=20, num_experts=6, num_experts_per_tok=3)
    sparse = moved(upcycle(dense, preset), ".experts.up_proj", seed=1)
    with pytest.raises(ValueError, match="12 hidden units that filled up the last expert are no longer zero"):
        extract(sparse, 0)


@pytest.mark.parametrize("part", ["up_proj", "up_proj_bias", "down_proj", "down_proj_bias", "base.fc1.bias", None])
def test_equality_depends_on_every_part(dense, part):
    """The comparison sees a change in any new tensor that matters, and the routing weights' sum."""
    sparse = upcycle(dense, PRESETS["clip_fmoe" if part else "clip_up"])
    if part:
        name = f"vision_model.encoder.layers.3.mlp.{part if 'base' in part else f'experts.{part}'}"
        with torch.no_grad():
            sparse.get_parameter(name).mul_(1.01)
    with pytest.raises(ValueError, match=UNEQUAL):
        compare(dense, sparse)


def test_seed_repeats_routers_and_leaves_the_global_generator_alone(dense):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, second, other = (upcycle(dense, PRESETS["clip_fmoe"], seed=seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(second[key], tensor) for key, tensor in first.items())
    changed = {key for key, tensor in first.items() if not torch.equal(other[key], tensor)}
    assert changed == {key for key in first if key.endswith(("router.weight", "fusion_gate.proj.weight"))}
    routers = torch.cat([tensor.flatten() for key, tensor in first.items() if "router" in key])
    assert routers.std().item() == pytest.approx(dense.config.vision_config.initializer_range, rel=0.1)


def test_keeps_the_sources_dtype(tmp_path, capsys):
    saved(tmp_path / "half", tiny_clip().bfloat16(), with_processor=False)
    upcycled(tmp_path / "half", tmp_path / "out", "clip_moe")
    printed = capsys.readouterr()
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
    differences = re.findall(r"largest difference in .*?: (\S+)", printed.out)
    assert len(differences) == 3 and all(float(difference) < 1e-5 for difference in differences)
    assert "has no tokenizer and no image processor: the result has none either" in printed.err
    suffixes = [path.suffix for path in (tmp_path / "out").iterdir()]
    assert suffixes.count(".json") == 2 and set(suffixes) == {".json", ".py", ".safetensors"}


def test_command_carries_the_processor_over_and_reports_differences(whole, tmp_path, capsys):
    output = tmp_path / "runs" / "out"
    upcycled(whole, output, "clip_up")
    printed = capsys.readouterr()
    assert "warning" not in printed.err
    assert "routing weights do not sum to 1, so outputs differ from the dense model" in printed.out
    model = AutoModel.from_pretrained(output)
    assert type(model) is CLIPMoEModel and not model.config.text_config.norm_topk_prob
    texts = ["a red cat", "round"]
    assert AutoProcessor.from_pretrained(output)(text=texts, padding=True) == processor()(text=texts, padding=True)
    assert [path.name for path in output.parent.iterdir()] == ["out"]


def test_settings_reach_the_baseline_of_clip_fmoe(whole, tmp_path):
    changes = {"num_experts": 5, "num_experts_per_tok": 3, "fusion_gate": "false", "capacity_factor": 4}
    flags = [word for name, value in changes.items() for word in (f"--changes.{name}", value)]
    layers = "--changes.sparse_layers", "{text: [0], vision: [3, 1]}"
    config = upcycled(whole, tmp_path / "out", "clip_fmoe", *flags, *layers)
    vision = config.vision_config
    assert (vision.num_experts, vision.num_experts_per_tok, vision.fusion_gate) == (5, 3, False)
    assert (vision.moe_layers, vision.capacity_factor, config.text_config.moe_layers) == ([1, 3], 4.0, [0])
    assert upcycled(whole, tmp_path / "vision", "clip_up", "--towers", "vision").text_config.moe_layers == []


def test_old_config_files_are_read_and_cleaned(source, tmp_path):
    """Files of 2022 carry all generation settings, and the towers twice."""
    config = json.loads((source / "config.json").read_text())
    text = config["text_config"] | {"top_k": 50, "num_beams": 1, "torchscript": False, "hidden_act": "gelu"}
    config |= {"text_config": text, "text_config_dict": text, "vision_config_dict": None}
    (source / "config.json").write_text(json.dumps(config))
    upcycled(source, tmp_path / "out", "clip_moe")
    text_config = json.loads((tmp_path / "out" / "config.json").read_text())["text_config"]
    assert text_config["hidden_act"] == "gelu" and text_config["eos_token_id"] == 39 and "top_k" not in text_config


def test_other_sources_and_sizes_are_refused(whole, dense, tmp_path):
    upcycle(dense, PRESETS["clip_moe"]).save_pretrained(tmp_path / "sparse")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    BertModel(BertConfig(vocab_size=9, **sizes)).save_pretrained(tmp_path / "bert")
    many = "1000000000"
    for source, options, message in (
        (tmp_path / "sparse", (), "already sparse"),
        (tmp_path / "bert", (), "type 'bert' is not supported; supported are clip, metaclip_2"),
        (whole, ("--changes.num_experts", many), f"{many} experts a layer need"),
    ):
        arguments = "--model", source, "--preset", "clip_moe", *options
        assert message in error_of(clip_moe.main, "upcycle", tmp_path / "out", *arguments)
    assert not (tmp_path / "out").exists()


def test_missing_left_over_and_misshapen_tensors_are_named(source, tmp_path):
    weights = load_file(source / "model.safetensors")
    del weights["vision_model.encoder.layers.2.mlp.fc1.weight"]
    weights["vision_model.encoder.layers.9.mlp.fc1.weight"] = torch.zeros(2)
    weights["visual_projection.weight"] = torch.zeros(3, 3)
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    message = error_of(clip_moe.main, "upcycle", tmp_path / "out", "--model", source, "--preset", "clip_moe")
    assert "missing: vision_model.encoder.layers.2.mlp.fc1.weight" in message
    assert "left over: vision_model.encoder.layers.9.mlp.fc1.weight" in message
    assert "of the wrong shape: visual_projection.weight (3, 3), not (16, 32)" in message


def test_a_result_that_is_not_equal_never_gets_its_name(whole, tmp_path, monkeypatch):
    def upcycle_otherwise(*arguments):
        return moved(upcycle(*arguments), "vision_model.encoder.layers.0.mlp.experts", seed=1)

    monkeypatch.setattr("clip_moe.conversion.upcycle.upcycle", upcycle_otherwise)
    error = error_of(clip_moe.main, "upcycle", tmp_path / "out", "--model", whole, "--preset", "clip_moe")
    assert UNEQUAL in error and not (tmp_path / "out").exists()
