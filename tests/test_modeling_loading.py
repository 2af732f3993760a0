"""Saving and loading against their traps."""

import accelerate
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_clip import assert_same_weights, change_json
from tiny_clip_moe import SWIGLU, dense_clip, inputs, tiny_config, tiny_model
from transformers import CLIPModel

import modeling_clip_moe
from modeling_clip_moe import CLIPMoEForImageClassification, CLIPMoEModel, CLIPMoEVisionModel


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("saved")
    model = tiny_model(fusion_gate=True)
    model.save_pretrained(folder)
    return model, folder


def test_towers_with_projection_of_a_config_that_contradicts_itself(tmp_path):
    """CLIP's own files may say 512 in the towers and something else above them, which is what counts."""
    model = tiny_model(text={"projection_dim": 512})
    model.save_pretrained(tmp_path)
    text = modeling_clip_moe.CLIPMoETextModelWithProjection.from_pretrained(tmp_path)
    vision = modeling_clip_moe.CLIPMoEVisionModelWithProjection.from_pretrained(tmp_path)
    assert torch.equal(text.text_projection.weight, model.text_projection.weight)
    assert torch.equal(vision.visual_projection.weight, model.visual_projection.weight)


def test_the_classifier_may_be_new_but_nothing_else(saved, tmp_path):
    model, folder = saved
    auto_class = transformers.AutoModelForImageClassification
    classifier, info = auto_class.from_pretrained(folder, num_labels=7, output_loading_info=True)
    assert type(classifier) is CLIPMoEForImageClassification
    assert set(info["missing_keys"]) == {"classifier.weight", "classifier.bias"}
    assert_same_weights(classifier.vision_model, model.vision_model)
    classifier.save_pretrained(tmp_path)
    assert_same_weights(CLIPMoEForImageClassification.from_pretrained(tmp_path), classifier)
    with pytest.raises(ValueError, match=r"Missing: .*text_model\."):
        CLIPMoEModel.from_pretrained(tmp_path)


def test_incomplete_and_foreign_checkpoints_are_refused(saved, tmp_path):
    model, folder = saved
    model.config.save_pretrained(tmp_path)
    weights = load_file(folder / "model.safetensors")

    def write(without=(), **more):
        kept = {name: tensor for name, tensor in weights.items() if name not in without}
        save_file(kept | more, tmp_path / "model.safetensors", metadata={"format": "pt"})

    expert_names = "vision_model.encoder.layers.1.mlp.experts.up_proj", "text_model.encoder.layers.2.mlp.router.weight"
    for name in (*expert_names, "logit_scale"):
        write([name])
        with pytest.raises(ValueError, match=rf"CLIPMoEModel. Missing: {name}. Left over: none."):
            CLIPMoEModel.from_pretrained(tmp_path)
    write(**{"blocks.0.gate": torch.ones(2)})
    for model_class in (CLIPMoEModel, CLIPMoEVisionModel):
        with pytest.raises(ValueError, match=rf"{model_class.__name__}. Missing: none. Left over: blocks.0.gate."):
            model_class.from_pretrained(tmp_path)
    # A dense FFN beside the experts
    write(**{f"vision_model.encoder.layers.1.mlp.fc1.{kind}": torch.ones(3) for kind in ("weight", "bias")})
    with pytest.raises(ValueError, match="Left over: vision_model.encoder.layers.1.mlp.fc1.bias"):
        CLIPMoEModel.from_pretrained(tmp_path)
    # Without the empty marks for which CLIP's own classes refuse a file, nothing is missing
    write([name for name, tensor in weights.items() if tensor.numel() == 0])
    assert_same_weights(CLIPMoEModel.from_pretrained(tmp_path), model)


class MyVisionModel(CLIPMoEVisionModel):
    """A user's subclass."""


class MyModel(CLIPMoEModel):
    """A user's subclass."""


@pytest.mark.parametrize(
    ("model_class", "clips"),
    [
        (CLIPMoEModel, CLIPModel),
        (MyModel, CLIPModel),
        (CLIPMoEForImageClassification, transformers.CLIPForImageClassification),
        (modeling_clip_moe.CLIPMoETextModel, transformers.CLIPTextModel),
        (modeling_clip_moe.CLIPMoETextModelWithProjection, transformers.CLIPTextModelWithProjection),
        (CLIPMoEVisionModel, transformers.CLIPVisionModel),
        (MyVisionModel, transformers.CLIPVisionModel),
        (modeling_clip_moe.CLIPMoEVisionModelWithProjection, transformers.CLIPVisionModelWithProjection),
    ],
)
def test_names_in_files_stay_and_are_clips_own(tmp_path, model_class, clips):
    """Made here, loaded, or loaded out of a whole model: one class has one set of names. Sparse or gated: no CLIP."""

    def names(model):
        model.save_pretrained(tmp_path / "again")
        return set(load_file(tmp_path / "again" / "model.safetensors"))

    for moe_layers, gated in (([1, 2], {}), ([1, 2], SWIGLU), ([], SWIGLU), ([], {})):
        tiny_model(moe_layers, **gated).save_pretrained(tmp_path / "whole")
        whole_outputs = model_class.from_pretrained(tmp_path / "whole")
        expected = names(whole_outputs)
        new = model_class(whole_outputs.config)
        assert names(new) == expected
        weights = {name: tensor.clone() for name, tensor in new.state_dict().items()}
        loaded = model_class.from_pretrained(tmp_path / "again")
        assert names(loaded) == expected
        # As transformers' Trainer goes on
        whole_outputs.load_state_dict(load_file(tmp_path / "again" / "model.safetensors"))
        for model in (loaded, whole_outputs):
            assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
        for folder in ("whole", "again") if moe_layers or gated else ():
            with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
                clips.from_pretrained(tmp_path / folder)
    change_json(tmp_path / "whole" / "config.json", model_type="clip")
    # Its scale alone has another shape there
    assert names(clips.from_pretrained(tmp_path / "whole", ignore_mismatched_sizes=True)) == expected


def test_names_of_weights_are_a_file_format(saved):
    """Those of CLIP itself, with these in place of the FFN of a sparse layer."""
    _, folder = saved
    stacks = ("up_proj", "up_proj_bias", "down_proj", "down_proj_bias")
    parts = ["router.weight", "fusion_gate.proj.weight", *(f"experts.{name}" for name in stacks)]
    parts += [f"base.fc{number}.{kind}" for number in (1, 2) for kind in ("weight", "bias")]
    parts.append("fc1.weight")  # which is empty: CLIP's own classes refuse it
    dense = {name for name, _ in dense_clip(tiny_config()).named_parameters()}
    layers = [f"{tower}_model.encoder.layers.{layer}.mlp." for tower in ("text", "vision") for layer in (1, 2)]
    expected = {name for name in dense if not name.startswith(tuple(layers))} | {a + b for a in layers for b in parts}
    weights = load_file(folder / "model.safetensors")
    assert weights.keys() == expected
    shapes = {"router.weight": (4, 16), "experts.up_proj": (4, 24, 16), "experts.up_proj_bias": (4, 24)}
    shapes |= {"experts.down_proj": (4, 16, 24), "experts.down_proj_bias": (4, 16)}
    assert shapes == {key: tuple(weights[f"text_model.encoder.layers.1.mlp.{key}"].shape) for key in shapes}


def test_accelerate_fills_an_empty_model(saved):
    model, folder = saved
    with accelerate.init_empty_weights():
        empty = transformers.AutoModel.from_config(model.config).eval()
    filled = accelerate.load_checkpoint_and_dispatch(empty, folder, device_map={"": "cpu"})
    assert_same_weights(filled, model)
    batch = inputs()
    torch.testing.assert_close(filled(**batch).logits_per_text, model(**batch).logits_per_text, rtol=0, atol=0)


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_a_scalar_scale_as_in_a_dense_clip_loads(saved, tmp_path, shard):
    """Of one file and of several; what is saved again has one axis."""
    model, _ = saved
    model.save_pretrained(tmp_path, max_shard_size=shard)
    for file in tmp_path.glob("*.safetensors"):
        tensors = load_file(file)
        if "logit_scale" in tensors:
            save_file(tensors | {"logit_scale": tensors["logit_scale"][0].clone()}, file, metadata={"format": "pt"})
    loaded = CLIPMoEModel.from_pretrained(tmp_path)
    assert_same_weights(loaded, model)
    loaded.save_pretrained(tmp_path / "again")
    assert load_file(tmp_path / "again" / "model.safetensors")["logit_scale"].shape == (1,)
    state_dict = model.state_dict()
    loaded.load_state_dict(state_dict | {"logit_scale": state_dict["logit_scale"][0]})
    assert_same_weights(loaded, model)


def test_a_dense_folder_loads_under_a_configuration_that_is_passed(tmp_path):
    dense = dense_clip(tiny_config([]))
    dense.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is dense"):
        CLIPMoEModel.from_pretrained(tmp_path)
    loaded = CLIPMoEModel.from_pretrained(tmp_path, config=modeling_clip_moe.CLIPMoEConfig.from_pretrained(tmp_path))
    assert torch.equal(loaded.text_projection.weight, dense.text_projection.weight)


@pytest.mark.parametrize("use_expert_bias", [False, True])
def test_only_a_bias_that_is_there_stays_in_float32(use_expert_bias, monkeypatch):
    model = tiny_model(use_expert_bias=use_expert_bias, scoring_func="sigmoid")
    expected = {"expert_bias"} if use_expert_bias else set()
    assert model._keep_in_fp32_modules_strict == model.vision_model._keep_in_fp32_modules_strict == expected
    monkeypatch.setattr(CLIPMoEModel, "_keep_in_fp32_modules_strict", ["logit_scale"])  # as a subclass may
    assert CLIPMoEModel(model.config)._keep_in_fp32_modules_strict == {"logit_scale", *expected}
