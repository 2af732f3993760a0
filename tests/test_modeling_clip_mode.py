"""CLIPMoDEModel: routing weights, ensembles, loading and saving."""

import hashlib
import math
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForZeroShotImageClassification,
    CLIPConfig,
    CLIPModel,
    pipeline,
)

from data import glyphs
from modeling_clip_moe import CLIPMoDEConfig, CLIPMoDEModel, CLIPMoEConfig, CLIPMoEModel, routing_weights

TOWER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "projection_dim": 8,
}
TEXT = {**TOWER, "vocab_size": 50, "max_position_embeddings": 8, "bos_token_id": 48, "eos_token_id": 49}
VISION = {**TOWER, "image_size": 16, "patch_size": 8}
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_layers": [1]}


def dense(seed, projection_dim=8):
    torch.manual_seed(seed)
    return CLIPModel(CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=projection_dim)).eval()


def sparse(seed):
    torch.manual_seed(seed)
    config = CLIPMoEConfig(text_config=TEXT | SPARSE, vision_config=VISION | SPARSE, projection_dim=8)
    return CLIPMoEModel(config).eval()


def unit(*shape, seed=0):
    embeds = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(embeds, dim=-1)


def mixture(number=4, make=dense):
    return CLIPMoDEModel.from_experts(
        [make(seed) for seed in range(number)], unit(12, 6), torch.arange(12) % number, "tfidf"
    ).eval()


@pytest.fixture
def inputs():
    torch.manual_seed(1)
    return {
        "input_ids": torch.tensor([[48, 3, 4, 49, 1], [48, 7, 49, 1, 1], [48, 9, 5, 3, 49]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]),
        "pixel_values": torch.randn(2, 3, 16, 16),
    }


def hashes(folder):
    return {p.relative_to(folder): hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*.*")}


def weights_in_a_loop(metadata, centers, expert_of_center, num_experts, temperature, nearest_only):
    """The logarithms of the weights of MoDE eq. 5 to 7 and appendix E, one number at a time."""
    if len(metadata) > 200:
        temperature = temperature / math.log(len(metadata))
    totals = [0.0] * num_experts
    for embed in metadata.tolist():
        similarities = []
        for center in centers.tolist():
            distance = sum((a - b) ** 2 for a, b in zip(embed, center, strict=True))
            similarity = math.exp(-distance / temperature)
            if len(metadata) < 10:
                similarity *= math.exp(0.5 - math.sqrt(len(metadata)))
            similarities.append(similarity)
        for number, similarity in enumerate(similarities):
            if not nearest_only or similarity == max(similarities):
                totals[expert_of_center[number]] += similarity
    normalizer = max(totals) + math.log(sum(math.exp(total - max(totals)) for total in totals))
    return [total - normalizer for total in totals]


@pytest.mark.parametrize("nearest_only", [True, False])
@pytest.mark.parametrize("length", [1, 3, 9, 10, 57, 200, 201, 400])
def test_routing_weights_are_those_of_the_equations(length, nearest_only):
    centers, metadata = unit(20, 6), unit(length, 6, seed=length)
    expert_of_center = torch.randint(3, (20,), generator=torch.Generator().manual_seed(2))
    expected = weights_in_a_loop(metadata, centers, expert_of_center.tolist(), 3, 0.2, nearest_only)
    found = routing_weights(metadata, centers, expert_of_center, 3, 0.2, nearest_only)
    torch.testing.assert_close(found.log(), torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_several_tasks_are_routed_one_by_one():
    centers, expert_of_center = unit(20, 6), torch.arange(20) % 3
    tasks = unit(3000, 3, 6, seed=5)  # more than are computed at a time, and a task on the border
    together = routing_weights(tasks, centers, expert_of_center, 3)
    assert together.shape == (3000, 3)
    for number in (0, 2729, 2730, 2731, 2999):
        alone = routing_weights(tasks[number], centers, expert_of_center, 3)
        torch.testing.assert_close(together[number], alone)


def test_texts_that_the_encoder_does_not_know_route_nothing():
    centers, expert_of_center, metadata = unit(20, 6), torch.arange(20) % 3, unit(12, 6, seed=5)
    known = torch.cat([metadata, metadata.new_zeros(3, 6)])  # 12 and 15 are of one rule of appendix E
    expected = routing_weights(metadata, centers, expert_of_center, 3)
    torch.testing.assert_close(routing_weights(known, centers, expert_of_center, 3), expected)
    equal = routing_weights(metadata.new_zeros(1, 6), centers, expert_of_center, 3)
    torch.testing.assert_close(equal, torch.full((3,), 1 / 3))


def test_logits_are_the_weighted_sum(inputs):
    model = mixture()
    weights = model.set_task(unit(5, 6, seed=3))
    assert weights.shape == (4,) and weights.min() > 0
    outputs = model(**inputs)
    expected = sum(weights[i] * model.expert(i)(**inputs).logits_per_image for i in range(4))
    torch.testing.assert_close(outputs.logits_per_image, expected)
    torch.testing.assert_close(outputs.logits_per_text, expected.t())
    assert torch.equal(outputs.routing_weights, weights)


def test_each_text_can_be_a_task_of_its_own(inputs):
    model = mixture()
    queries = unit(3, 1, 6, seed=3)
    weights = model.route(queries)
    found = model(**inputs, routing_weights=weights).logits_per_text
    for text in range(3):
        weight = model.route(queries[text])
        expected = sum(weight[i] * model.expert(i)(**inputs).logits_per_text[text] for i in range(4))
        torch.testing.assert_close(found[text], expected)


def test_features_stand_side_by_side_and_give_the_logits(inputs):
    model = mixture(2)
    weights = model.set_equal_weights()
    images = model.get_image_features(inputs["pixel_values"]).pooler_output
    texts = model.get_text_features(inputs["input_ids"], inputs["attention_mask"]).pooler_output
    assert images.shape == (2, 16) and texts.shape == (3, 16)
    torch.testing.assert_close(images.view(2, 2, 8).norm(dim=-1), torch.ones(2, 2))
    scales = torch.stack([model.expert(i).logit_scale.exp() for i in range(2)])
    expected = torch.einsum("ind,tnd,n->it", images.view(2, 2, 8), texts.view(3, 2, 8), weights * scales)
    torch.testing.assert_close(model(**inputs).logits_per_image, expected)


def test_an_expert_without_weight_is_not_computed(inputs):
    model = mixture(3)
    outputs = model(**inputs, routing_weights=torch.tensor([0.0, 1.0, 0.0]))
    assert [output is None for output in outputs.expert_outputs] == [True, False, True]
    torch.testing.assert_close(outputs.logits_per_image, model.expert(1)(**inputs).logits_per_image)


def test_training_arguments_reach_the_experts(inputs):
    model = mixture(2, sparse)
    model.set_equal_weights()
    model.train()
    inputs["pixel_values"] = inputs["pixel_values"][[0, 1, 1]]
    gradients = []
    for _ in range(2):
        model.zero_grad()
        outputs = model(**inputs, return_loss=True, output_hidden_states=True, output_router_logits=True)
        for output in outputs.expert_outputs:
            assert len(output.text_model_output.hidden_states) == 3 and output.aux_loss > 0
        outputs.loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        model.gradient_checkpointing_enable()
    assert all(model.expert(i).is_gradient_checkpointing for i in range(2))
    assert len(gradients[0]) == len(gradients[1]) > 100
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(checkpointed, plain)


@pytest.mark.parametrize("make", [dense, sparse])
def test_saved_and_loaded(make, inputs, tmp_path):
    """Experts that are CLIPMoEModels make a mixture of two levels."""
    model = mixture(3, make)
    weights = model.set_task(unit(40, 6, seed=3))
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, CLIPMoDEConfig) and config.experts == ["expert_0", "expert_1", "expert_2"]
    assert (config.metadata_encoder, config.metadata_dim, config.num_centers) == ("tfidf", 6, 12)
    expected = model(**inputs).logits_per_image
    for auto_class in (AutoModel, AutoModelForZeroShotImageClassification):
        loaded = auto_class.from_pretrained(tmp_path)
        assert isinstance(loaded, CLIPMoDEModel) and isinstance(loaded.expert(0), type(model.expert(0)))
        assert torch.equal(loaded.set_task(unit(40, 6, seed=3)), weights)
        assert torch.equal(loaded(**inputs).logits_per_image, expected)
        assert loaded.num_parameters() == model.num_parameters()
    half = AutoModel.from_pretrained(tmp_path, dtype=torch.bfloat16, routing_temperature=0.1)
    assert half.dtype == torch.bfloat16 and half.config.routing_temperature == 0.1
    assert half.centers.dtype == torch.float32
    verbose = AutoModel.from_pretrained(tmp_path, output_hidden_states=True)
    outputs = verbose(**inputs, routing_weights=weights).expert_outputs
    assert all(len(output.vision_model_output.hidden_states) == 3 for output in outputs)
    alone = AutoModel.from_pretrained(tmp_path, subfolder="expert_1")
    torch.testing.assert_close(
        alone(**inputs).logits_per_image, model.expert(1)(**inputs).logits_per_image, atol=0, rtol=0
    )


def test_loaded_one_at_a_time(inputs, tmp_path):
    model = mixture(3)
    model.save_pretrained(tmp_path)
    weights = model.set_task(unit(5, 6, seed=3))
    lazy = CLIPMoDEModel.from_pretrained(tmp_path, max_loaded_experts=1)
    assert len(lazy.experts) == 0 and lazy.device == torch.device("cpu")
    found = lazy(**inputs, routing_weights=weights).logits_per_image
    assert torch.equal(found, model(**inputs).logits_per_image)
    assert list(lazy.experts) == ["expert_2"]
    half = CLIPMoDEModel.from_pretrained(tmp_path, max_loaded_experts=1).to(torch.bfloat16)
    assert half.dtype == half.expert(0).dtype == torch.bfloat16
    assert CLIPMoDEModel.from_pretrained(tmp_path, max_loaded_experts=1, dtype="bfloat16").expert(0).dtype == half.dtype
    two = CLIPMoDEModel.from_pretrained(tmp_path, max_loaded_experts=2)
    for number in (0, 1, 0, 2):
        two.expert(number)
    assert list(two.experts) == ["expert_0", "expert_2"]  # 1 was not used for longest
    assert not two.training and not two.expert(1).training
    assert two.train().expert(0).training  # loaded now
    with pytest.raises(ValueError, match="load without max_loaded_experts"):
        two.gradient_checkpointing_enable()


@pytest.mark.parametrize("max_loaded_experts", [None, 1])
def test_a_fifth_expert_changes_no_byte_of_the_others(max_loaded_experts, inputs, tmp_path):
    mixture(4).save_pretrained(tmp_path)
    CLIPMoDEModel.from_pretrained(tmp_path).save_pretrained(tmp_path)  # transformers adds a dtype to fresh CLIPConfigs
    before = hashes(tmp_path)
    loaded = CLIPMoDEModel.from_pretrained(tmp_path, max_loaded_experts=max_loaded_experts)
    fifth = dense(4)
    loaded.set_task(unit(3, 6))
    assert loaded.add_expert(fifth, unit(3, 6, seed=9)) == 4 and loaded.task_weights is None
    loaded.save_pretrained(tmp_path)
    after = hashes(tmp_path)
    changed = {str(path) for path, digest in after.items() if before.get(path) != digest}
    assert changed == {
        "config.json",
        "routing.safetensors",
        "expert_4/config.json",
        "expert_4/model.safetensors",
    }
    again = AutoModel.from_pretrained(tmp_path)
    weights = again.set_task(unit(30, 6, seed=3))
    assert weights.shape == (5,) and again.config.num_centers == 15
    expected = sum(w * m(**inputs).logits_per_image for w, m in zip(weights, [*map(dense, range(5))], strict=True))
    torch.testing.assert_close(again(**inputs).logits_per_image, expected)


def test_an_expert_is_replaced(inputs, tmp_path):
    model = mixture(3)
    model.save_pretrained(tmp_path)
    before = hashes(tmp_path)
    loaded = CLIPMoDEModel.from_pretrained(tmp_path, max_loaded_experts=1)
    loaded.replace_expert(1, dense(7))
    loaded.save_pretrained(tmp_path)
    changed = {str(path) for path, digest in hashes(tmp_path).items() if before[path] != digest}
    assert changed == {"expert_1/model.safetensors"}
    found = AutoModel.from_pretrained(tmp_path).expert(1)(**inputs).logits_per_image
    assert torch.equal(found, dense(7)(**inputs).logits_per_image)


def test_an_expert_that_was_half_added_is_none(tmp_path):
    """The process is killed when the expert and the centers are there, and the configuration is not."""
    mixture(2).save_pretrained(tmp_path)
    config = (tmp_path / "config.json").read_text()
    model = CLIPMoDEModel.from_pretrained(tmp_path)
    model.add_expert(dense(5), unit(2, 6, seed=9))
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(config)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert loaded.num_experts == 2 and torch.equal(loaded.centers, mixture(2).centers)


def test_what_is_saved_can_be_given_up_and_loaded_again(inputs, tmp_path):
    model = mixture(3)
    model.max_loaded_experts = 1
    model.save_pretrained(tmp_path)
    model.replace_expert(1, dense(7))
    model.save_pretrained(tmp_path)
    for number in (0, 1, 2):
        expected = dense(7 if number == 1 else number)(**inputs).logits_per_image
        assert torch.equal(model.expert(number)(**inputs).logits_per_image, expected)
    assert len(model.experts) == 1


def test_a_state_dict_is_shared_out(inputs, tmp_path):
    model, other = mixture(2), CLIPMoDEModel.from_experts([dense(8), dense(9)])
    model.save_pretrained(tmp_path, state_dict=other.state_dict())
    loaded, equal = AutoModel.from_pretrained(tmp_path), torch.tensor([0.5, 0.5])
    found = loaded(**inputs, routing_weights=equal).logits_per_image
    assert torch.equal(found, other(**inputs).logits_per_image)


def test_hub_arguments_reach_the_hub(tmp_path, monkeypatch):
    called = []
    monkeypatch.setattr(CLIPMoDEModel, "push_to_hub", lambda self, name, **kwargs: called.append((name, kwargs)))
    mixture(2).save_pretrained(tmp_path / "m", push_to_hub=True, repo_id="me/x", private=True, commit_message="first")
    assert called == [("me/x", {"private": True, "commit_message": "first"})]


def test_a_model_named_as_a_repository_is_saved_whole(inputs, tmp_path, monkeypatch):
    """An expert of the repository me/mode is not the one in a folder me/mode."""
    monkeypatch.chdir(tmp_path)
    mixture(2).save_pretrained("there")
    model = CLIPMoDEModel.from_pretrained("there", max_loaded_experts=1)
    model._sources = {name: ("me/mode", name, {}) for name in model.config.experts}
    model._load = lambda name: dense(int(name[-1]))
    model.save_pretrained("me/mode")
    assert AutoModel.from_pretrained("me/mode").num_parameters() == mixture(2).num_parameters()


def test_an_unloaded_model_is_saved_elsewhere(inputs, tmp_path):
    model = mixture(2)
    model.save_pretrained(tmp_path / "a")
    CLIPMoDEModel.from_pretrained(tmp_path / "a", max_loaded_experts=1).save_pretrained(tmp_path / "b")
    model.set_equal_weights()
    copy = AutoModel.from_pretrained(tmp_path / "b")
    copy.set_equal_weights()
    assert torch.equal(copy(**inputs).logits_per_image, model(**inputs).logits_per_image)


def test_loaded_from_a_folder_of_a_repository(inputs, tmp_path):
    model = mixture(2)
    model.save_pretrained(tmp_path / "models" / "mode")
    weights = model.set_equal_weights()
    for options in ({}, {"max_loaded_experts": 1}):
        loaded = AutoModel.from_pretrained(tmp_path / "models", subfolder="mode", **options)
        found = loaded(**inputs, routing_weights=weights).logits_per_image
        assert torch.equal(found, model(**inputs).logits_per_image) and torch.equal(loaded.centers, model.centers)


def test_folder_loads_without_the_package(inputs, tmp_path):
    model = mixture(2, sparse)
    model.save_pretrained(tmp_path / "model")
    model.set_task(unit(20, 6, seed=3))
    save_file({**inputs, "metadata": unit(20, 6, seed=3)}, tmp_path / "inputs.safetensors")
    code = """
import sys
sys.modules["modeling_clip_moe"] = None
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForZeroShotImageClassification
torch.set_num_threads(1)
inputs = load_file("inputs.safetensors")
metadata = inputs.pop("metadata")
logits = {}
for auto_class in (AutoModel, AutoModelForZeroShotImageClassification):
    model = auto_class.from_pretrained("model", trust_remote_code=True)
    model.set_task(metadata)
    logits[auto_class.__name__] = model(**inputs).logits_per_image.detach().contiguous()
model.save_pretrained("again")
again = AutoModel.from_pretrained("again", trust_remote_code=True, max_loaded_experts=1)
again.set_task(metadata)
expert = AutoModel.from_pretrained("model/expert_1", trust_remote_code=True)  # a class from another file
again.replace_expert(1, expert)
logits["again"] = again(**inputs).logits_per_image.detach().contiguous()
save_file(logits, "logits.safetensors")
"""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "home"),
        "HF_MODULES_CACHE": str(tmp_path / "modules"),
    }
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    expected = model(**inputs).logits_per_image
    for name, logits in load_file(tmp_path / "logits.safetensors").items():
        assert torch.equal(logits, expected), name


def test_zero_shot_pipeline(tmp_path):
    base = CLIPModel.from_pretrained("training/glyph_clip")
    model = CLIPMoDEModel.from_experts([base, base])
    model.save_pretrained(tmp_path)
    glyphs.build_processor(64, 32).save_pretrained(tmp_path)
    image = glyphs.load("test", "detailed", 1)[0]["image"]
    names = ["a zero", "a star", "a heart"]
    expected = pipeline("zero-shot-image-classification", "training/glyph_clip")(image, candidate_labels=names)
    found = pipeline("zero-shot-image-classification", str(tmp_path))(image, candidate_labels=names)
    assert [entry["label"] for entry in found] == [entry["label"] for entry in expected]
    assert found[0]["score"] == pytest.approx(expected[0]["score"], abs=1e-5)


def test_compiles_without_graph_breaks(inputs):
    model = mixture(2)
    model.set_equal_weights()
    expected = model(**inputs).logits_per_image
    found = torch.compile(model, fullgraph=True, backend="eager")(**inputs).logits_per_image
    torch.testing.assert_close(found, expected)


def test_what_does_not_fit_is_refused(inputs, tmp_path):
    model = mixture(2)
    with pytest.raises(ValueError, match="no task to route"):
        model(**inputs)
    with pytest.raises(ValueError, match="at least one piece of metadata"):
        model.set_task(torch.zeros(0, 6))
    with pytest.raises(ValueError, match="have size 5, the centers 6"):
        model.set_task(unit(3, 5))
    with pytest.raises(ValueError, match="made with the encoder 'tfidf', the metadata's embeddings with 'other'"):
        model.set_task(unit(3, 6), "other")
    with pytest.raises(ValueError, match="not finite"):
        model.set_task(torch.full((3, 6), torch.nan))
    with pytest.raises(ValueError, match=r"here \(2,\) or \(3, 2\), got \(5,\)"):
        model(**inputs, routing_weights=torch.ones(5))
    with pytest.raises(ValueError, match="expert_2 has embeddings of size 4, the other experts of 8"):
        model.add_expert(dense(3, projection_dim=4), unit(1, 6))
    with pytest.raises(ValueError, match="must have some, too"):
        model.add_expert(dense(3))
    with pytest.raises(ValueError, match="an expert expert_0 already"):
        model.add_expert(dense(3), unit(1, 6), name="expert_0")
    with pytest.raises(ValueError, match="expert=2, but the model has 2 experts"):
        model.expert(2)
    with pytest.raises(ValueError, match=r"see \[1\]"):
        model.set_centers(unit(3, 6), torch.zeros(3, dtype=torch.long), "tfidf")
    with pytest.raises(ValueError, match="no centers to compare"):
        CLIPMoDEModel.from_experts([dense(0)]).route(unit(3, 6))
    with pytest.raises(ValueError, match="at least one expert"):
        CLIPMoDEModel.from_experts([])
    with pytest.raises(ValueError, match="specify input_ids and pixel_values"):
        model(pixel_values=inputs["pixel_values"])
    with pytest.raises(ValueError, match="without dots"):
        model.add_expert(dense(3), unit(1, 6), name="a.b")
    model.set_task(unit(3, 6))
    model.set_centers(unit(4, 6), torch.arange(4) % 2, "tfidf")
    assert model.task_weights is None
    with pytest.raises(ValueError, match="not clip_mode"):
        CLIPMoDEModel.from_experts([model])
    with pytest.raises(ValueError, match="routing_temperature must be greater than 0"):
        CLIPMoDEConfig(routing_temperature=0)
    with pytest.raises(ValueError, match="names of folders"):
        CLIPMoDEConfig(experts=["../other"])
    with pytest.raises(ValueError, match="12 centers need the metadata_encoder"):
        CLIPMoDEConfig(num_centers=12)
    with pytest.raises(ValueError, match="max_loaded_experts must be at least 1"):
        CLIPMoDEModel.from_pretrained("training/glyph_clip", config=CLIPMoDEConfig(), max_loaded_experts=0)
    with pytest.raises(ValueError, match="expert_0 has no weights"):
        CLIPMoDEModel(CLIPMoDEConfig(experts=["expert_0"])).expert(0)


def test_missing_and_damaged_files_are_named(tmp_path):
    mixture(2).save_pretrained(tmp_path)
    weights = tmp_path / "expert_1" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="expert_1.*truncated"):
        AutoModel.from_pretrained(tmp_path)
    tensors = load_file(tmp_path / "expert_0" / "model.safetensors")
    save_file({name: t for name, t in tensors.items() if "post_layernorm" not in name}, weights, {"format": "pt"})
    with pytest.raises(ValueError, match="expert_1: missing weights .*post_layernorm"):
        AutoModel.from_pretrained(tmp_path)
    weights.unlink()
    with pytest.raises(OSError, match="model.safetensors"):
        AutoModel.from_pretrained(tmp_path)
    (tmp_path / "expert_1" / "config.json").unlink()
    with pytest.raises(OSError, match="expert_1/config.json"):
        AutoModel.from_pretrained(tmp_path)
    routing = tmp_path / "routing.safetensors"
    routing.write_bytes(routing.read_bytes()[:50])
    with pytest.raises(ValueError, match="routing.safetensors is truncated"):
        AutoModel.from_pretrained(tmp_path)
    routing.unlink()
    with pytest.raises(OSError, match="routing.safetensors"):
        AutoModel.from_pretrained(tmp_path)
