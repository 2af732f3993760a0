"""conversion/upcycle.py: an upcycled model computes what its dense source does, whatever the preset."""

import dataclasses
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_clip import processor, tiny_clip
from transformers import AutoModel, AutoProcessor, AutoTokenizer, BertConfig, BertModel

from conversion.checkpoints import check_equal, model_outputs, sample_inputs
from conversion.presets import PRESETS
from conversion.upcycle import main, upcycle, verify
from modeling_clip_moe import CLIPMoEModel
from records.files import new_folder


@pytest.fixture(scope="module")
def dense():
    return tiny_clip()


@pytest.fixture
def source(dense, tmp_path):
    folder = tmp_path / "dense"
    dense.save_pretrained(folder)
    processor().save_pretrained(folder)
    return folder


def error_of(capsys, *argv):
    """Runs the command, which must fail with one line; returns that line."""
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in argv])
    message = str(stop.value)
    assert message.startswith("error: ") and "\n" not in message and "Traceback" not in capsys.readouterr().err
    return message


@pytest.mark.parametrize("name", PRESETS)
def test_renormalized_equals_dense(dense, name):
    sparse = upcycle(dense, dataclasses.replace(PRESETS[name], norm_topk_prob=True))
    num_sparse_layers = sum(key.endswith("experts.up_proj") for key in sparse.state_dict())
    assert num_sparse_layers == {"clip_up": 4, "clip_moe": 8, "clip_fmoe": 2}[name]
    inputs = sample_inputs(dense.config)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][1, 7:] = 0
    inputs["input_ids"][1, 6:] = dense.config.text_config.eos_token_id
    expected, found = model_outputs(dense, inputs), model_outputs(sparse, inputs)
    for outputs in (expected, found):  # what becomes of padding is of no interest
        outputs["text hidden states"] = outputs["text hidden states"][:, inputs["attention_mask"].bool()]
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")


def test_equality_depends_on_every_part(dense):
    """The comparison sees a change in any new tensor that matters, and the routing weights' sum."""
    inputs = sample_inputs(dense.config)
    expected = model_outputs(dense, inputs)
    with pytest.raises(ValueError, match="does not compute what the source does"):
        check_equal(expected, model_outputs(upcycle(dense, PRESETS["clip_up"]), inputs))
    for tensor in (
        "experts.up_proj",
        "experts.up_proj_bias",
        "experts.down_proj",
        "experts.down_proj_bias",
        "base.fc1.bias",
    ):
        sparse = upcycle(dense, PRESETS["clip_fmoe"])
        with torch.no_grad():
            sparse.get_parameter(f"vision_model.encoder.layers.3.mlp.{tensor}").mul_(1.01)
        with pytest.raises(ValueError, match="does not compute what the source does"):
            check_equal(expected, model_outputs(sparse, inputs))


@pytest.mark.parametrize("tower", ["text", "vision"])
def test_one_tower_alone(dense, tower):
    sparse = upcycle(dense, PRESETS["clip_moe"], towers=[tower])
    sparse_keys = [key for key in sparse.state_dict() if ".experts." in key]
    assert sparse_keys and all(key.startswith(f"{tower}_model.") for key in sparse_keys)
    inputs = sample_inputs(dense.config)
    check_equal(model_outputs(dense, inputs), model_outputs(sparse, inputs))


def test_seed_repeats_routers_and_leaves_the_global_generator_alone(dense):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, second, other = (upcycle(dense, PRESETS["clip_fmoe"], seed=seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(second[key], tensor) for key, tensor in first.items())
    changed = {key for key, tensor in first.items() if not torch.equal(other[key], tensor)}
    assert changed == {key for key in first if key.endswith(("router.weight", "fusion_gate.proj.weight"))}


def test_routers_have_the_configs_initial_spread():
    sparse = upcycle(tiny_clip(), PRESETS["clip_up"])
    routers = torch.cat([tensor.flatten() for key, tensor in sparse.state_dict().items() if "router" in key])
    assert routers.std().item() == pytest.approx(sparse.config.vision_config.initializer_range, rel=0.1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_keeps_the_sources_dtype(dtype, tmp_path, source, capsys):
    half = tmp_path / "half"
    tiny_clip().to(dtype).save_pretrained(half)
    main([str(half), str(tmp_path / "out"), "--preset", "clip_moe"])
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    differences = re.findall(r"largest difference in .*?: (\S+)", capsys.readouterr().out)
    assert len(differences) == 3 and all(float(difference) < 1e-5 for difference in differences)


def test_command_carries_the_processor_over_and_reports_differences(source, tmp_path, dense, capsys):
    output = tmp_path / "runs" / "out"
    main([str(source), str(output), "--preset", "clip_up"])
    printed = capsys.readouterr()
    assert "warning" not in printed.err
    assert "routing weights do not sum to 1, so the model starts below the dense one" in printed.out
    model = AutoModel.from_pretrained(output)
    assert type(model) is CLIPMoEModel and not model.config.text_config.norm_topk_prob
    texts = ["a red cat", "round"]
    assert AutoProcessor.from_pretrained(output)(text=texts, padding=True) == processor()(text=texts, padding=True)
    assert [path.name for path in output.parent.iterdir()] == ["out"]


def test_flags_reach_the_baseline_of_clip_fmoe(source, tmp_path):
    flags = "--preset clip_fmoe --num-experts 5 --num-experts-per-tok 3 --no-fusion-gate --capacity-factor 4"
    main([str(source), str(tmp_path / "out"), *flags.split(), "--towers", "vision", "--seed", "1"])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    vision = config["vision_config"]
    assert (vision["num_experts"], vision["num_experts_per_tok"], vision["fusion_gate"]) == (5, 3, False)
    assert (
        vision["moe_layers"] == [3] and vision["capacity_factor"] == 4.0 and config["text_config"]["moe_layers"] == []
    )


@pytest.mark.parametrize(
    ("words", "text", "vision"),
    [
        (["all"], [0, 1, 2, 3], [0, 1, 2, 3]),
        (["3,1"], [1, 3], [1, 3]),
        (["text=0", "vision=every_second"], [0], [1, 3]),
        (["vision=2,3", "--towers", "vision"], [], [2, 3]),
    ],
)
def test_sparse_layers_of_the_command(source, tmp_path, words, text, vision):
    main([str(source), str(tmp_path / "out"), "--preset", "clip_fmoe", "--sparse-layers", *words])
    config = CLIPMoEModel.from_pretrained(tmp_path / "out").config
    assert (config.text_config.moe_layers, config.vision_config.moe_layers) == (text, vision)


def test_sparse_layers_that_are_not_there(source, tmp_path, capsys):
    flags = "--preset clip_up --sparse-layers text=1 vision=3,4"
    message = error_of(capsys, source, tmp_path / "out", *flags.split())
    assert "sparse_layers of the vision tower has 4, but that tower has the layers 0 to 3" in message
    message = error_of(capsys, source, tmp_path / "out", "--preset", "clip_up", "--sparse-layers", "al")
    assert "(did you mean 'all'?)" in message and not (tmp_path / "out").exists()


def test_old_config_files_are_read_and_cleaned(source, tmp_path):
    """Files of 2022 carry all generation settings, and the towers twice."""
    path = source / "config.json"
    config = json.loads(path.read_text())
    config["text_config"] |= {"top_k": 50, "num_beams": 1, "torchscript": False, "hidden_act": "gelu"}
    path.write_text(json.dumps(config | {"text_config_dict": dict(config["text_config"]), "vision_config_dict": None}))
    main([str(source), str(tmp_path / "out"), "--preset", "clip_moe"])
    text_config = json.loads((tmp_path / "out" / "config.json").read_text())["text_config"]
    assert text_config["hidden_act"] == "gelu" and text_config["eos_token_id"] == 39 and "top_k" not in text_config


def test_as_a_program(source, tmp_path):
    command = [sys.executable, "-m", "conversion.upcycle", source, tmp_path / "out", "--preset", "clip_moe"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found = CLIPMoEModel.from_pretrained(tmp_path / "out").state_dict()
    expected = upcycle(tiny_clip(), PRESETS["clip_moe"], seed=0).state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    again = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert again.returncode == 1 and "Traceback" not in again.stderr
    assert again.stderr.splitlines()[-1].startswith("error: ") and "already exists" in again.stderr.splitlines()[-1]


def test_source_without_processor_converts_with_a_warning(dense, tmp_path, capsys):
    dense.save_pretrained(tmp_path / "bare")
    main([str(tmp_path / "bare"), str(tmp_path / "out"), "--preset", "clip_moe"])
    assert "warning" in capsys.readouterr().err
    assert sorted(path.suffix for path in (tmp_path / "out").iterdir()) == [".json", ".py", ".py", ".safetensors"]


def test_source_with_a_tokenizer_alone_keeps_it(dense, tmp_path, capsys):
    dense.save_pretrained(tmp_path / "half")
    processor().tokenizer.save_pretrained(tmp_path / "half")
    main([str(tmp_path / "half"), str(tmp_path / "out"), "--preset", "clip_moe"])
    assert "no image processor" in capsys.readouterr().err
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("a cat") == processor().tokenizer("a cat")


def test_sparse_source_is_refused(source, tmp_path, capsys):
    main([str(source), str(tmp_path / "sparse"), "--preset", "clip_moe"])
    message = error_of(capsys, tmp_path / "sparse", tmp_path / "out", "--preset", "clip_moe")
    assert "already sparse" in message and not (tmp_path / "out").exists()


def test_foreign_source_is_refused(tmp_path, capsys):
    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 8,
        "vocab_size": 9,
    }
    BertModel(BertConfig(**sizes)).save_pretrained(tmp_path / "bert")
    message = error_of(capsys, tmp_path / "bert", tmp_path / "out", "--preset", "clip_moe")
    assert "'bert'" in message and "'clip'" in message


def test_missing_left_over_and_misshapen_tensors_are_named(source, tmp_path, capsys):
    weights = load_file(source / "model.safetensors")
    del weights["vision_model.encoder.layers.2.mlp.fc1.weight"]
    weights["vision_model.encoder.layers.9.mlp.fc1.weight"] = torch.zeros(2)
    weights["visual_projection.weight"] = torch.zeros(3, 3)
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    message = error_of(capsys, source, tmp_path / "out", "--preset", "clip_moe")
    assert "missing: vision_model.encoder.layers.2.mlp.fc1.weight" in message
    assert "left over: vision_model.encoder.layers.9.mlp.fc1.weight" in message
    assert "of the wrong shape: visual_projection.weight (3, 3), not (16, 32)" in message


def test_truncated_file_is_an_error(source, tmp_path, capsys):
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:20_000])
    assert f"cannot load {source}" in error_of(capsys, source, tmp_path / "out", "--preset", "clip_moe")
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_wrong_paths_and_numbers(source, tmp_path, capsys):
    nowhere = tmp_path / "nowhere"
    assert f"{nowhere} is neither a folder nor a hub name" in error_of(
        capsys, nowhere, tmp_path / "out", "--preset", "clip_up"
    )
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert "already exists" in error_of(capsys, source, tmp_path / "full", "--preset", "clip_up")
    assert "got 9" in error_of(capsys, source, tmp_path / "out", "--preset", "clip_up", "--num-experts-per-tok", "9")
    assert "got -1.0" in error_of(capsys, source, tmp_path / "out", "--preset", "clip_up", "--capacity-factor", "-1")
    shallow = tiny_clip(text_layers=1)
    with pytest.raises(ValueError, match="the text tower has 1 layers"):
        upcycle(shallow, PRESETS["clip_up"])
    with pytest.raises(ValueError, match="towers must be some of text, vision, not audio"):
        upcycle(shallow, PRESETS["clip_up"], towers=["audio"])


def test_a_failed_check_leaves_nothing(dense, tmp_path):
    """A result that is not equal never gets the output's name."""
    dense.save_pretrained(tmp_path / "dense")
    sparse = upcycle(dense, PRESETS["clip_moe"])
    with torch.no_grad():
        sparse.vision_model.encoder.layers[0].mlp.experts.up_proj.mul_(2)
    with pytest.raises(ValueError, match="does not compute"), new_folder(tmp_path / "out") as folder:
        sparse.save_pretrained(folder)
        verify(tmp_path / "dense", folder)
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_an_empty_output_folder_may_be_used(tmp_path):
    (tmp_path / "out").mkdir()
    with new_folder(tmp_path / "out") as folder:
        (folder / "file").write_text("whole")
    assert (tmp_path / "out" / "file").read_text() == "whole"
