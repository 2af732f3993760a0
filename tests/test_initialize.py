"""The stage that makes a new model, dense or sparse: settings, processors and tokenizers that fit, or are refused."""

import json
import shutil

import pytest
import torch
from tiny_clip import symbol_processor
from tiny_runs import DENSE, HARBOR_CAPTIONS, losses, same_weights, weights
from tokenizers import Tokenizer, models
from transformers import AutoModel, AutoProcessor, CLIPModel, PreTrainedTokenizerFast, SiglipModel

from clip_moe.conversion.publishing.lineage import Lineage
from clip_moe.data.tokenizer import learn_tokenizer
from modeling_clip_moe import CLIPMoEModel, MoEViEModel, ViEModel


@pytest.fixture(scope="module")
def processor_folder(tmp_path_factory):
    """The symbol world's processor: images of 32 x 32, texts of 16 tokens."""
    folder = tmp_path_factory.mktemp("processor")
    symbol_processor(16, 32).save_pretrained(folder)
    return folder


def test_weights_are_those_of_the_seed_or_as_large_as_openai_draws_them(run):
    """OpenAI's configuration says eos_token_id 2, by which transformers takes the highest token for the end."""
    openai = DENSE | {"name": "openai", "openai_weights": True}
    output = run([DENSE, openai], {"openai.text_config.eos_token_id": 2})
    before, model = (AutoModel.from_pretrained(output / name) for name in ("dense", "openai"))
    assert model.config.text_config.eos_token_id == 2
    torch.manual_seed(0)  # checks before a model is saved draw no random numbers
    expected = CLIPModel(before.config).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in before.state_dict().items())
    width, layers = model.config.text_config.hidden_size, model.config.text_config.num_hidden_layers
    wide, pixels = model.config.vision_config.hidden_size, 3 * model.config.vision_config.patch_size**2
    deviations = {
        "text_model.embeddings.token_embedding": 0.02,
        "text_model.embeddings.position_embedding": 0.01,
        "text_model.encoder.layers.0.self_attn.q_proj": width**-0.5,
        "text_model.encoder.layers.0.self_attn.out_proj": width**-0.5 * (2 * layers) ** -0.5,
        "text_model.encoder.layers.0.mlp.fc1": (2 * width) ** -0.5,
        "text_model.encoder.layers.0.mlp.fc2": width**-0.5 * (2 * layers) ** -0.5,
        "vision_model.embeddings.patch_embedding": (3 * pixels) ** -0.5,
        "vision_model.embeddings.position_embedding": wide**-0.5,
        "vision_model.encoder.layers.0.self_attn.v_proj": (2 * wide) ** -0.5,
        "vision_model.encoder.layers.0.mlp.fc1": (3 * wide) ** -0.5,
    }
    found = {name: model.get_parameter(f"{name}.weight").std().item() for name in deviations}
    assert found == pytest.approx(deviations, rel=0.2)
    assert before.vision_model.embeddings.position_embedding.weight.std().item() == pytest.approx(0.02, rel=0.2)


def test_a_vie_from_scratch_trains_dense_and_sparse(run):
    vie = DENSE | {"name": "vie", "family": "vie", "openai_weights": True}
    sparse = vie | {"name": "sparse", "preset": "moe_vie"}
    output = run(
        [vie, sparse, TRAIN | {"name": "dense", "model": "vie"}, TRAIN | {"name": "moe_vie", "model": "sparse"}]
    )
    for start, trained, model_class in (("vie", "dense", ViEModel), ("sparse", "moe_vie", MoEViEModel)):
        assert type(AutoModel.from_pretrained(output / trained)) is model_class
        assert not same_weights(output / start, output / trained)
        ffn = [
            weights(output / start)[f"text_model.encoder.layers.0.mlp.{part}_proj.weight"] for part in ("up", "down")
        ]
        assert [weight.std().item() for weight in ffn] == pytest.approx([32**-0.5, 16**-0.5 / 2], rel=0.2)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("no_tokenizer", "no_tokenizer has no tokenizer.*tokenizer.json"),
        ("no_images", "no_images has no image processor.*processor_config.json"),
        ("./none", "dense: no such folder"),
        ("none/", "dense: no such folder"),
        ("", "dense: no such folder"),
        ("nobody/nothing", "there is no folder nobody/nothing, and no such model on the Hub"),
    ],
)
def test_what_has_no_processor_is_refused(run, hub, processor_folder, tmp_path, monkeypatch, source, message):
    for name, missing in (("no_tokenizer", "tokenizer.json"), ("no_images", "processor_config.json")):
        shutil.copytree(processor_folder, tmp_path / name, ignore=shutil.ignore_patterns(missing))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=message):
        run([{**DENSE, "processor": source}])


def test_the_tokenizer_of_a_folder_replaces_a_missing_one(run, processor_folder, tmp_path):
    shutil.copytree(processor_folder, tmp_path / "half", ignore=shutil.ignore_patterns("tokenizer*"))
    learn_tokenizer(HARBOR_CAPTIONS, 600, 16).save_pretrained(tmp_path / "words")
    output = run([{**DENSE, "processor": str(tmp_path / "half"), "tokenizer": str(tmp_path / "words")}])
    assert AutoProcessor.from_pretrained(output / "dense").tokenizer.tokenize("harbour") == ["harbour</w>"]
    inputs = json.loads((output / "dense" / "manifest.json").read_text())["inputs"]
    assert set(inputs) == {str(tmp_path / "half"), str(tmp_path / "words")}
    # A model card names what weights start from: neither
    lineage = Lineage.of(output / "dense")
    assert (lineage.bases, lineage.unknown) == ([], [])


@pytest.mark.parametrize(
    "tokens, message",
    [
        ({}, "no bos_token, eos_token, pad_token"),
        ({"bos_token": "<s>", "eos_token": "</s>"}, "no pad_token"),
        # CLIP takes the end token's features: of texts without one, all the same
        ({"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}, "above its end token, 0"),
    ],
)
def test_a_tokenizer_without_special_tokens_is_refused(run, processor_folder, tmp_path, tokens, message):
    model = models.WordLevel({"a": 0, "<s>": 1, "</s>": 2, "<unk>": 3}, unk_token="<unk>")
    plain = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), unk_token="<unk>", model_max_length=16, **tokens)
    plain.save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match=message):
        run([{**DENSE, "processor": str(processor_folder), "tokenizer": str(tmp_path / "plain")}])


# Sparse models and shared encoders from scratch, and what is done with them

FOUR = {"preset": "clip_up", "changes": {"num_experts": 4}}
GROUPS = {"capacity_group_size": 4, "eval_capacity_factor": 2.0}
SCRATCH = {
    **{**DENSE, "name": "scratch", "openai_weights": True, **FOUR},
    **{tower: DENSE[tower] | GROUPS for tower in ("text_config", "vision_config")},
}
TRAIN = {"stage": "train", "data": {"source": "symbols", "num_samples": 40, "in_memory": True}}
TRAIN |= {"global_batch_size": 8, "max_steps": 4, "learning_rate": 1e-2, "logging_steps": 1}


def test_experts_from_scratch_differ_and_have_the_size_of_an_ffn(run):
    output = run([SCRATCH, {**SCRATCH, "name": "plain", "openai_weights": False}, {**DENSE, "openai_weights": True}])
    dense = CLIPModel.from_pretrained(output / "dense")
    for name in ("scratch", "plain"):
        model = AutoModel.from_pretrained(output / name)
        assert type(model) is CLIPMoEModel and model.config.vision_config.moe_layers == [1]
        for tower in (model.text_model, model.vision_model):
            experts = tower.encoder.layers[1].mlp.experts
            for stacked in (experts.up_proj, experts.down_proj):
                distances = torch.cdist(stacked.flatten(1), stacked.flatten(1))
                assert (distances[~torch.eye(4, dtype=torch.bool)] > 0.5 * stacked[0].norm()).all()
    scratch = AutoModel.from_pretrained(output / "scratch")
    pairs = {"up_proj": "fc1.weight", "down_proj": "fc2.weight", "up_proj_bias": "fc1.bias"}
    for tower in ("text_model", "vision_model"):
        name = f"{tower}.encoder.layers.1.mlp"
        for expert_weights, ffn_weights in pairs.items():
            found = scratch.get_parameter(f"{name}.experts.{expert_weights}").std().item()
            assert found == pytest.approx(dense.get_parameter(f"{name}.{ffn_weights}").std().item(), rel=0.25)
    assert scratch.config.router_z_loss_coef == 0.001  # of the preset
    assert scratch.config.text_config.eval_capacity_factor == 2.0


SHARED = {"balance_top_k": None, "balance_mean": "shared"}


def test_a_shared_encoder_is_trained_upcycled_and_trained_on(run):
    """Dense from scratch, then sparse, and dense again: both conversions compare models with those they come from."""
    stages = [
        {**DENSE, "shared_encoder": True, "openai_weights": True},
        {**TRAIN, "name": "grown", "model": "dense"},
        {"name": "sparse", "stage": "upcycle", "model": "grown", "preset": "clip_moe"},
        {"name": "expert", "stage": "dense", "model": "sparse", "take": 3},
        {**TRAIN, "name": "tuned", "stage": "train_router", "model": "sparse", "trainable": ".", **SHARED},
    ]
    output = run(stages)
    for name in ("dense", "grown", "sparse", "tuned"):
        model = AutoModel.from_pretrained(output / name)
        text, vision = (getattr(model, tower).encoder for tower in ("text_model", "vision_model"))
        assert all(a is b for a, b in zip(text.parameters(), vision.parameters(), strict=True)), name
    assert not same_weights(output / "sparse", output / "tuned")
    assert len(losses(output / "tuned")) == 4


SIGLIP = DENSE | {"name": "siglip", "family": "siglip", "openai_weights": True, "preset": "clip_up"}
SIGLIP["changes"] = {"num_experts": 4, "capacity_factor": None}


def test_a_siglip_from_scratch_trains_by_its_sigmoid_loss_or_by_softmax(run):
    """Parts of batches (gradient caching) are in test_gradient_cache.py."""
    sigmoid = {**TRAIN, "name": "sigmoid", "model": "siglip"}
    output = run([SIGLIP, DENSE | {"family": "siglip"}, sigmoid, sigmoid | {"name": "softmax", "loss": "softmax"}])
    assert type(AutoModel.from_pretrained(output / "dense")) is SiglipModel
    start, trained, other = (weights(output / name) for name in ("siglip", "sigmoid", "softmax"))
    assert (start["logit_scale"].exp().item(), start["logit_bias"].item()) == pytest.approx((10, -10))
    assert trained["logit_bias"] != -10 and other["logit_bias"] == -10
    assert losses(output / "softmax")[0] != losses(output / "sigmoid")[0]
