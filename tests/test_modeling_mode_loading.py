"""CLIPMoDEModel: its folder, which experts are added to and loaded from."""

import pytest
import torch
from local_hub import contents
from safetensors.torch import load_file, save_file
from tiny_clip_mode import dense, mixture, sparse, texts_and_images, unit
from transformers import AutoConfig, AutoModel, AutoModelForZeroShotImageClassification

from modeling_clip_moe import CLIPMoDEConfig, CLIPMoDEModel

INPUTS = texts_and_images()


@pytest.mark.parametrize("make", [dense, sparse])
def test_saved_and_loaded(make, tmp_path):
    """Experts that are CLIPMoEModels make a mixture of two levels."""
    model = mixture(3, make)
    weights = model.set_task(unit(40, 6, seed=3))
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, CLIPMoDEConfig) and config.experts == ["expert_0", "expert_1", "expert_2"]
    assert (config.metadata_encoder, config.metadata_dim, config.num_centers) == ("tfidf", 6, 12)
    expected = model(**INPUTS).logits_per_image
    for auto_class in (AutoModel, AutoModelForZeroShotImageClassification):
        loaded = auto_class.from_pretrained(tmp_path)
        assert isinstance(loaded, CLIPMoDEModel) and isinstance(loaded.expert(0), type(model.expert(0)))
        assert torch.equal(loaded.set_task(unit(40, 6, seed=3)), weights)
        assert torch.equal(loaded(**INPUTS).logits_per_image, expected)
        assert loaded.num_parameters() == model.num_parameters()
    half = AutoModel.from_pretrained(tmp_path, dtype=torch.bfloat16, routing_temperature=0.1)
    assert half.dtype == torch.bfloat16 and half.config.routing_temperature == 0.1
    assert half.centers.dtype == torch.float32
    loaded.save_pretrained(tmp_path / "again")
    again = {path.relative_to(tmp_path / "again") for path in (tmp_path / "again").rglob("*.safetensors")}
    assert len(again) == 4
    assert all(load_file(tmp_path / name).keys() == load_file(tmp_path / "again" / name).keys() for name in again)
    verbose = AutoModel.from_pretrained(tmp_path, output_hidden_states=True)
    outputs = verbose(**INPUTS, routing_weights=weights).expert_outputs
    assert all(len(output.vision_model_output.hidden_states) == 3 for output in outputs)
    alone = AutoModel.from_pretrained(tmp_path, subfolder="expert_1")
    assert torch.equal(alone(**INPUTS).logits_per_image, model.expert(1)(**INPUTS).logits_per_image)


def test_a_fifth_expert_changes_no_byte_of_the_others(tmp_path):
    mixture(4).save_pretrained(tmp_path)
    CLIPMoDEModel.from_pretrained(tmp_path).save_pretrained(tmp_path)  # transformers adds a dtype to fresh CLIPConfigs
    before = contents(tmp_path)
    loaded = CLIPMoDEModel.from_pretrained(tmp_path)
    loaded.set_task(unit(3, 6))
    loaded.set_centers(loaded.centers, loaded.expert_of_center, "tfidf")
    assert loaded.task_weights is None
    loaded.set_task(unit(3, 6))
    assert loaded.add_expert(dense(4), unit(3, 6, seed=9)) == 4 and loaded.task_weights is None
    loaded.save_pretrained(tmp_path)
    changed = {path for path, content in contents(tmp_path).items() if before.get(path) != content}
    assert changed == {"config.json", "routing.safetensors", "expert_4/config.json", "expert_4/model.safetensors"}
    again = AutoModel.from_pretrained(tmp_path)
    weights = again.set_task(unit(30, 6, seed=3))
    assert weights.shape == (5,) and again.config.num_centers == 15
    expected = sum(w * m(**INPUTS).logits_per_image for w, m in zip(weights, [*map(dense, range(5))], strict=True))
    torch.testing.assert_close(again(**INPUTS).logits_per_image, expected)


def test_a_state_dict_is_shared_out(tmp_path):
    model, other = mixture(2), CLIPMoDEModel.from_experts([dense(8), dense(9)])
    model.save_pretrained(tmp_path, state_dict=other.state_dict())
    loaded, equal = AutoModel.from_pretrained(tmp_path), torch.tensor([0.5, 0.5])
    found = loaded(**INPUTS, routing_weights=equal).logits_per_image
    assert torch.equal(found, other(**INPUTS).logits_per_image)


def test_loaded_from_a_folder_of_a_repository_and_saved_elsewhere(tmp_path):
    model = mixture(2)
    model.save_pretrained(tmp_path / "models" / "mode")
    weights = model.set_equal_weights()
    in_folder = AutoModel.from_pretrained(tmp_path / "models", subfolder="mode")
    in_folder.save_pretrained(tmp_path / "elsewhere")
    for loaded in (in_folder, AutoModel.from_pretrained(tmp_path / "elsewhere")):
        found = loaded(**INPUTS, routing_weights=weights).logits_per_image
        assert torch.equal(found, model(**INPUTS).logits_per_image) and torch.equal(loaded.centers, model.centers)


def test_it_is_pushed_where_that_is_asked_for(tmp_path, monkeypatch):
    called = []
    monkeypatch.setattr(CLIPMoDEModel, "push_to_hub", lambda self, name, **options: called.append((name, options)))
    mixture(2).save_pretrained(tmp_path / "mode")
    assert called == []
    mixture(2).save_pretrained(tmp_path / "mode", push_to_hub=True, repo_id="me/x", private=True)
    assert called == [("me/x", {"private": True})]


def test_missing_and_damaged_files_are_named(tmp_path):
    mixture(2).save_pretrained(tmp_path)
    weights = tmp_path / "expert_1" / "model.safetensors"
    tensors = load_file(tmp_path / "expert_0" / "model.safetensors")
    save_file({name: t for name, t in tensors.items() if "post_layernorm" not in name}, weights, {"format": "pt"})
    with pytest.raises(ValueError, match="expert_1: missing weights .*post_layernorm"):
        AutoModel.from_pretrained(tmp_path)
    routing = tmp_path / "routing.safetensors"
    for file in (weights, tmp_path / "expert_1" / "config.json"):
        file.unlink()
        with pytest.raises(OSError, match=file.name):
            AutoModel.from_pretrained(tmp_path)
    routing.unlink()
    with pytest.raises(OSError, match="routing.safetensors"):
        AutoModel.from_pretrained(tmp_path)
