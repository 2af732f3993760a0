"""The stage that makes a new model: settings, processors and tokenizers that fit, or are refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from tiny_runs import DENSE, HARBOR_CAPTIONS
from tokenizers import Tokenizer, models
from transformers import AutoModel, AutoProcessor, CLIPModel, PreTrainedTokenizerFast

from conversion.publishing.lineage import Lineage
from data.tokenizer import learn_tokenizer
from data.worlds import build_processor


@pytest.fixture(scope="module")
def processor_folder(tmp_path_factory):
    """The symbol world's processor: images of 32 x 32, texts of 16 tokens."""
    folder = tmp_path_factory.mktemp("processor")
    build_processor("symbols", 16, 32).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"vision_config.image_size": 48}, r"images of 3 x 32 x 32, but .*image_size .*takes 3 x 48 x 48"),
        ({"text_config.max_position_embeddings": 8}, r"model_max_length is 16.*max_position_embeddings is 8"),
        ({"text_config.hidden_act": "nonsense"}, r"make no CLIP.*nonsense"),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_both_numbers(run, processor_folder, overrides, message):
    stage = {**DENSE, "processor": str(processor_folder)}
    with pytest.raises(ValueError, match=message) as error:
        run([stage], {f"dense.{key}": value for key, value in overrides.items()})
    assert "dense" in str(error.value)


def test_openai_s_number_of_the_end_token_means_the_highest(run, processor_folder):
    """Their configuration says eos_token_id 2, by which transformers takes the highest token for the end."""
    stage = {**DENSE, "processor": str(processor_folder)}
    output = run([stage], {"dense.text_config.eos_token_id": 2})
    assert AutoModel.from_pretrained(output / "dense").config.text_config.eos_token_id == 2


def test_weights_as_large_as_openai_draws_them(run, processor_folder):
    stages = [{**DENSE, "name": name, "processor": str(processor_folder)} for name in ("dense", "openai")]
    output = run(stages, {"openai.openai_weights": True})
    before, model = (AutoModel.from_pretrained(output / name) for name in ("dense", "openai"))
    text, vision = model.text_model, model.vision_model

    def deviation(weight, expected):
        assert weight.std().item() == pytest.approx(expected, rel=0.2)

    width, layers = text.config.hidden_size, len(text.encoder.layers)
    deviation(text.embeddings.token_embedding.weight, 0.02)
    deviation(text.embeddings.position_embedding.weight, 0.01)
    deviation(text.encoder.layers[0].self_attn.q_proj.weight, width**-0.5)
    deviation(text.encoder.layers[0].self_attn.out_proj.weight, width**-0.5 * (2 * layers) ** -0.5)
    deviation(text.encoder.layers[0].mlp.fc1.weight, (2 * width) ** -0.5)
    deviation(text.encoder.layers[0].mlp.fc2.weight, width**-0.5 * (2 * layers) ** -0.5)
    width = vision.config.hidden_size
    inputs = vision.embeddings.patch_embedding.weight[0].numel()
    deviation(vision.embeddings.patch_embedding.weight, (3 * inputs) ** -0.5)
    deviation(vision.embeddings.position_embedding.weight, width**-0.5)
    deviation(vision.encoder.layers[0].self_attn.v_proj.weight, (2 * width) ** -0.5)
    deviation(vision.encoder.layers[0].mlp.fc1.weight, (3 * width) ** -0.5)
    deviation(before.vision_model.embeddings.position_embedding.weight, 0.02)


@pytest.mark.parametrize("missing", ["tokenizer.json", "processor_config.json"])
def test_a_folder_with_half_a_processor_is_refused(run, processor_folder, tmp_path, missing):
    shutil.copytree(processor_folder, tmp_path / "half", ignore=shutil.ignore_patterns(missing))
    name = "tokenizer" if missing == "tokenizer.json" else "image processor"
    with pytest.raises(ValueError, match=f"half has no {name}.*{missing}"):
        run([{**DENSE, "processor": str(tmp_path / "half")}])


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


@pytest.mark.parametrize("setting, file", [("processor", "processor_config.json"), ("tokenizer", "tokenizer.json")])
def test_a_processor_that_was_changed_is_another_one(run, processor_folder, tmp_path, capsys, setting, file):
    folder = Path(shutil.copytree(processor_folder, tmp_path / "here"))
    stage = {**DENSE, "processor": str(processor_folder), setting: str(folder)}
    run([stage])
    (folder / "README.md").write_text("no part of it")
    run([stage])
    (folder / file).write_text((folder / file).read_text() + " ")
    with pytest.raises(ValueError, match="dense was made with other settings .inputs..*here"):
        run([stage])
    shutil.rmtree(folder)  # it need not be carried
    run([stage])
    assert capsys.readouterr().out.count("dense: done before, skipped") == 2


@pytest.mark.parametrize("path", ["none/a/b", "./none", "/none", "none/", "~", "~/none", "../none", ""])
def test_a_path_that_is_not_there_is_no_hub_name(run, path):
    for setting in ("processor", "tokenizer"):
        with pytest.raises(ValueError, match="dense: no such folder"):
            run([{**DENSE, setting: path}])


def test_a_hub_name_that_cannot_be_had_may_be_meant_as_a_folder(run):
    with pytest.raises(FileNotFoundError, match="nobody/nothing has no image processor.* here or on the Hub"):
        run([{**DENSE, "processor": "nobody/nothing"}])


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


def test_the_first_weights_are_those_of_the_seed(run, processor_folder):
    """Checks before a model is saved draw no random numbers."""
    output = run([{**DENSE, "processor": str(processor_folder)}])
    torch.manual_seed(0)
    expected = CLIPModel(AutoModel.from_pretrained(output / "dense").config).state_dict()
    found = CLIPModel.from_pretrained(output / "dense").state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
