"""Models from scratch: a tokenizer learnt from captions, processors that fit, and stages whose models load."""

import json
import logging
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset
from PIL import Image
from safetensors.torch import load_file, save_file
from test_sources import images_and_texts, rows, shard
from tokenizers import Tokenizer, models
from transformers import (
    AutoModel,
    AutoProcessor,
    AutoTokenizer,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPTokenizer,
    PreTrainedTokenizerFast,
)

from conversion import assemble
from conversion.checkpoints import require_loadable
from conversion.lineage import Provenance
from conversion.upcycle import ROUTING_FIELDS
from data import glyphs
from data.tokenizer import learn_tokenizer, pieces_per_word
from training import stages
from training.manifests import input_fingerprint
from training.recipe import STAGES, load_recipe
from training.runner import run_recipe, wanted_stages
from training.stages import InitializeStage, UpcycleStage

TOWER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
DENSE = {
    "name": "dense",
    "stage": "initialize",
    "processor": "glyphs",
    "projection_dim": 16,
    "text_config": {**TOWER, "max_position_embeddings": 16},
    "vision_config": {**TOWER, "image_size": 32, "patch_size": 16},
}
SPARSE = {"name": "sparse", "stage": "upcycle", "model": "dense", "preset": "clip_up", "changes": {"num_experts": 4}}
TUNED = {"name": "tuned", "stage": "train", "model": "dense", "global_batch_size": 4, "max_steps": 1}
TUNED |= {"learning_rate": 1e-3}
WORDS = {"name": "words", "stage": "tokenizer", "vocab_size": 600, "max_length": 16}
CAPTIONS = [
    "A Surfboard leans on the harbour wall.",
    "two surfboards, a harbour and the café's bicycle",
    "The bicycle stands in the harbour at night",
    "an old bicycle beside surfboards",
]


@pytest.fixture
def run(tmp_path):
    """Runs stages, with settings of theirs overridden by `STAGE.KEY`."""

    def run(stages, overrides=None):
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump({"output_dir": str(tmp_path / "out"), "stages": stages}))
        return run_recipe(load_recipe(path, overrides))

    return run


@pytest.fixture(scope="module")
def processor_folder(tmp_path_factory):
    """The glyph world's processor: images of 32 x 32, texts of 16 tokens."""
    folder = tmp_path_factory.mktemp("processor")
    glyphs.build_processor(16, 32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def dense_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({"output_dir": str(folder / "out"), "stages": [DENSE]}))
    return run_recipe(load_recipe(path)) / "dense"


def pairs(folder, captions):
    """A dataset of small gray images with these captions."""
    images = [Image.new("RGB", (40, 30), (90, 90, 90)) for _ in captions]
    Dataset.from_dict({"image": images, "caption": captions}).save_to_disk(folder)
    return {"source": str(folder), "in_memory": True}


# Processors


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"vision_config.image_size": 48}, r"images of 3 x 32 x 32, but .*image_size .* takes 3 x 48 x 48"),
        ({"vision_config.num_channels": 1}, r"3 x 32 x 32, but .*1 x 32 x 32"),
        ({"text_config.vocab_size": 700}, r"723 tokens.*vocab_size is 700.*leave"),
        ({"text_config.max_position_embeddings": 8}, r"model_max_length is 16.*max_position_embeddings is 8"),
        ({"text_config.eos_token_id": 5}, r"eos_token_id is 5.*722"),
        ({"text_config.hidden_siz": 5}, r"no field 'hidden_siz'"),
        ({"text_config.layer_norm_eps": float("nan")}, r"text_config.layer_norm_eps.*finite"),
        ({"vision_config.patch_size": 0}, r"image_size 32 .*patch_size 0"),
        ({"vision_config.patch_size": 64}, r"image_size 32 .*patch_size 64"),
        ({"vision_config.image_size": [32, 32]}, r"image_size \[32, 32\]"),
        ({"vision_config.num_attention_heads": 0}, r"make no CLIP"),
        ({"text_config.hidden_act": "nonsense"}, r"make no CLIP.*nonsense"),
        ({"text_config.hidden_size": 15}, r"make no CLIP(.|\n)*15"),
        ({"text_config.max_position_embeddings": 2, "processor": "glyphs"}, r"model_max_length is 2"),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_both_numbers(run, processor_folder, overrides, message):
    stage = {**DENSE, "processor": str(processor_folder)}
    with pytest.raises(ValueError, match=message) as error:
        run([stage], {f"dense.{key}": value for key, value in overrides.items()})
    assert "dense" in str(error.value)


def test_a_larger_vocabulary_and_a_shorter_tokenizer_are_taken(run, processor_folder):
    stage = {**DENSE, "processor": str(processor_folder)}
    output = run([stage], {"dense.text_config.vocab_size": 1000, "dense.text_config.max_position_embeddings": 20})
    config = AutoModel.from_pretrained(output / "dense").config.text_config
    assert (config.vocab_size, config.max_position_embeddings, config.eos_token_id) == (1000, 20, 722)


def test_openai_s_number_of_the_end_token_means_the_highest(run, processor_folder):
    """Their configuration says eos_token_id 2, by which transformers takes the highest token for the end."""
    stage = {**DENSE, "processor": str(processor_folder)}
    output = run([stage], {"dense.text_config.eos_token_id": 2})
    assert AutoModel.from_pretrained(output / "dense").config.text_config.eos_token_id == 2


@pytest.mark.parametrize("missing", ["tokenizer.json", "processor_config.json"])
def test_a_folder_with_half_a_processor_is_refused(run, processor_folder, tmp_path, missing):
    shutil.copytree(processor_folder, tmp_path / "half", ignore=shutil.ignore_patterns(missing))
    name = "tokenizer" if missing == "tokenizer.json" else "image processor"
    with pytest.raises(ValueError, match=f"half has no {name}.*{missing}"):
        run([{**DENSE, "processor": str(tmp_path / "half")}])


def test_the_tokenizer_of_a_folder_replaces_a_missing_one(run, processor_folder, tmp_path):
    shutil.copytree(processor_folder, tmp_path / "half", ignore=shutil.ignore_patterns("tokenizer*"))
    learn_tokenizer(CAPTIONS, 600, 16).save_pretrained(tmp_path / "words")
    output = run([{**DENSE, "processor": str(tmp_path / "half"), "tokenizer": str(tmp_path / "words")}])
    assert AutoProcessor.from_pretrained(output / "dense").tokenizer.tokenize("harbour") == ["harbour</w>"]
    inputs = json.loads((output / "dense" / "manifest.json").read_text())["inputs"]
    assert set(inputs) == {str(tmp_path / "half"), str(tmp_path / "words")}
    # A model card names what weights start from: neither
    provenance = Provenance.of(output / "dense")
    assert (provenance.bases, provenance.unknown) == ([], [])


@pytest.mark.parametrize("setting, file", [("processor", "processor_config.json"), ("tokenizer", "tokenizer.json")])
def test_a_processor_that_was_changed_is_another_one(run, processor_folder, tmp_path, capsys, setting, file):
    folder = Path(shutil.copytree(processor_folder, tmp_path / "here"))
    stage = {**DENSE, "processor": str(processor_folder), setting: str(folder)}
    manifest = run([stage]) / "dense" / "manifest.json"
    (folder / "README.md").write_text("no part of it")
    run([stage])
    (folder / file).write_text((folder / file).read_text() + " ")
    with pytest.raises(ValueError, match="dense was made with other settings .inputs..*here"):
        run([stage])
    entries = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(entries | {"inputs": {}}))  # of a run before there were such inputs
    run([stage])
    manifest.write_text(json.dumps(entries))
    shutil.rmtree(folder)  # it need not be carried
    run([stage])
    assert capsys.readouterr().out.count("dense: done before, skipped") == 3


@pytest.mark.parametrize("file", ["tokenizer.json", "processor_config.json"])
def test_a_damaged_processor_is_refused(run, processor_folder, tmp_path, file):
    shutil.copytree(processor_folder, tmp_path / "damaged")
    (tmp_path / "damaged" / file).write_text("[")
    with pytest.raises(ValueError, match="cannot load .*damaged"):
        run([{**DENSE, "processor": str(tmp_path / "damaged")}])


@pytest.mark.parametrize("path", ["runs/a/b", "./x", "/x", "x/", "~", "~/x", "../x", ""])
@pytest.mark.parametrize("setting", ["processor", "tokenizer"])
def test_a_path_that_is_not_there_is_no_hub_name(run, setting, path):
    with pytest.raises(ValueError, match=f"dense.{setting}: no such folder"):
        run([{**DENSE, setting: path}])


def test_a_hub_name_that_cannot_be_had_may_be_meant_as_a_folder(run):
    with pytest.raises(FileNotFoundError, match="no such folder.*the Hub"):
        run([{**DENSE, "processor": "nobody/nothing"}])


@pytest.mark.parametrize(
    "tokens, message",
    [
        ({}, "no bos_token, eos_token, pad_token"),
        ({"bos_token": "<s>", "eos_token": "</s>"}, "no pad_token"),
        # CLIP takes the end token's features: of texts without one, all the same
        ({"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}, "puts no <s> before and no </s> after"),
    ],
)
def test_a_tokenizer_without_special_tokens_is_refused(run, processor_folder, tmp_path, tokens, message):
    model = models.WordLevel({"a": 0, "<s>": 1, "</s>": 2, "<unk>": 3}, unk_token="<unk>")
    plain = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), unk_token="<unk>", model_max_length=16, **tokens)
    plain.save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match=message):
        run([{**DENSE, "processor": str(processor_folder), "tokenizer": str(tmp_path / "plain")}])


# Tokenizers


def test_a_learnt_tokenizer_is_clip_s(tmp_path):
    tokenizer = learn_tokenizer(CAPTIONS, vocab_size=600, max_length=12)
    tokenizer.save_pretrained(tmp_path)
    for loaded in (AutoTokenizer.from_pretrained(tmp_path), CLIPTokenizer.from_pretrained(tmp_path)):
        assert type(loaded) is CLIPTokenizer
        assert loaded(CAPTIONS)["input_ids"] == tokenizer(CAPTIONS)["input_ids"]
        assert loaded.model_max_length == 12
        assert (loaded.bos_token_id, loaded.eos_token_id) == (len(loaded) - 2, len(loaded) - 1)
        assert loaded.pad_token_id == loaded.eos_token_id
    assert 514 < len(tokenizer) <= 600
    # CLIP's own splitting and lower-casing, and any text whatever
    assert tokenizer.tokenize("HARBOUR the bicycle's") == ["harbour</w>", "the</w>", "bicycle</w>", "'s</w>"]
    for text in ("a café", "日本 🏄", "x%$§ 12"):
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True).replace(" ", "") == (
            text.replace(" ", "")
        )
    assert tokenizer("日本 🏄 ÿ", add_special_tokens=False)["input_ids"].count(tokenizer.unk_token_id) == 0


def test_the_vocabulary_has_the_size_that_is_asked_for(tmp_path):
    assert len(learn_tokenizer(CAPTIONS, vocab_size=540, max_length=12)) == 540
    assert len(learn_tokenizer(CAPTIONS, vocab_size=514, max_length=12)) == 514


def test_the_same_captions_give_the_same_bytes_in_every_process(tmp_path):
    """Words made of random letters, with many pairs that are equally frequent."""
    program = """
import random, sys
from data.tokenizer import learn_tokenizer
random.seed(0)
words = ["".join(random.choices("abcdefghijklmnop", k=random.randint(2, 7))) for _ in range(500)]
captions = [" ".join(random.sample(words, 8)) for _ in range(200)]
if sys.argv[2] == "backwards":
    captions.reverse()
learn_tokenizer(captions, 900, 77).save_pretrained(sys.argv[1])
"""
    for name in ("forwards", "backwards"):
        subprocess.run([sys.executable, "-c", program, str(tmp_path / name), name], check=True)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "backwards" / file).read_bytes() == (tmp_path / "forwards" / file).read_bytes()


def test_the_committed_glyph_tokenizer_stays_what_it_is(tmp_path):
    glyphs.build_tokenizer(64).save_pretrained(tmp_path)
    committed = Path(stages.__file__).parents[1] / "glyph_clip" / "tokenizer.json"
    assert (tmp_path / "tokenizer.json").read_bytes() == committed.read_bytes()


def test_a_recipe_learns_a_tokenizer_and_trains_with_it(run, tmp_path, caplog):
    data = pairs(tmp_path / "pairs", CAPTIONS)
    dense = {key: value for key, value in DENSE.items() if key != "processor"} | {"tokenizer": "words"}
    recipe = [{**WORDS, "data": data}, dense, {**TUNED, "data": data}]
    output = run(recipe)
    processor, model = AutoProcessor.from_pretrained(output / "tuned"), AutoModel.from_pretrained(output / "tuned")
    assert processor.tokenizer.tokenize("A harbour") == ["a</w>", "harbour</w>"]
    assert model.config.text_config.vocab_size == len(processor.tokenizer)
    assert model.config.text_config.eos_token_id == processor.tokenizer.eos_token_id
    # CLIP's own image processor, at the model's size
    images = processor.image_processor
    expected = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    image = Image.effect_mandelbrot((60, 45), (-2, -1, 1, 1), 50).convert("RGB")
    found, wanted = (p(image, return_tensors="pt")["pixel_values"] for p in (images, expected))
    assert found.shape == (1, 3, 32, 32)
    torch.testing.assert_close(found, wanted, atol=0.05, rtol=0)
    assert "pieces" not in caplog.text  # the captions are its own
    # The model knows its tokenizer: another one makes another model
    manifest = json.loads((output / "dense" / "manifest.json").read_text())
    assert manifest["inputs"] == {"words": input_fingerprint(str(output / "words"))}
    assert run(recipe) == output
    shutil.rmtree(output / "words")
    with pytest.raises(ValueError, match="dense was made with other settings .*inputs.words"):
        run(recipe, {"words.vocab_size": 530})


def test_a_tokenizer_goes_with_another_processor(run, tmp_path, processor_folder):
    data = pairs(tmp_path / "pairs", CAPTIONS)
    for processor in ("glyphs", str(processor_folder)):
        dense = {**DENSE, "tokenizer": "words", "processor": processor}
        output = run([{**WORDS, "data": data}, dense])
        loaded = AutoProcessor.from_pretrained(output / "dense")
        assert loaded.tokenizer.tokenize("A harbour") == ["a</w>", "harbour</w>"]
        assert list(loaded.image_processor.image_mean) == [0.5, 0.5, 0.5]
        shutil.rmtree(output)


def test_all_captions_of_an_image_are_learnt_from(run, tmp_path):
    data = pairs(tmp_path / "pairs", [["", *CAPTIONS[:2]], ["", *CAPTIONS[2:]]])
    output = run([{**WORDS, "data": data}])
    one_each = learn_tokenizer(CAPTIONS, 600, 16)
    assert AutoTokenizer.from_pretrained(output / "words").get_vocab() == one_each.get_vocab()


def test_experts_bring_their_tokenizer(tmp_path):
    """--experts runs the stages that an expert needs: of these, the tokenizer and the captions it is learnt from."""
    pairs(tmp_path / "pairs", CAPTIONS)
    data = {"source": "glyphs", "num_samples": 8}
    dense = {key: value for key, value in DENSE.items() if key != "processor"} | {"tokenizer": "words"}
    texts = {"name": "texts", "stage": "captions", "model": "glyph_dense", "data": data}
    texts |= {"captions": [{"policy": "full", "column": "caption"}]}
    recipe = [
        {**DENSE, "name": "glyph_dense"},
        texts,
        {**WORDS, "data": {"source": "texts"}},
        dense,
        {"name": "features", "stage": "embed", "model": "dense", "data": data},
        {"name": "parts", "stage": "cluster", "features": "features", "num_image_clusters": 2},
        {**TUNED, "stage": "train_experts", "expert": 1, "clusters": "parts", "data": data},
        {**DENSE, "name": "other"},
    ]
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({"output_dir": str(tmp_path / "out"), "stages": recipe}))
    loaded = load_recipe(path)
    needed = {stage.name for stage in wanted_stages(loaded, None, [1])}
    assert needed == {stage["name"] for stage in recipe} - {"other"}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"words.vocab_size": 513}, "words.vocab_size.*514"),
        ({"words.max_length": 2}, "words.max_length"),
        ({"words.data.streaming": True, "words.data.source": "somewhere"}, "words.*streaming"),
        ({"dense.tokenizer": "tuned"}, "dense.tokenizer: tuned is a stage of type train, not tokenizer"),
        ({"dense.tokenizer": None, "dense.processor": None}, "dense.*processor.*tokenizer"),
    ],
)
def test_recipes_that_cannot_be(run, changes, message):
    data = {"source": "glyphs", "num_samples": 8}
    recipe = [{**WORDS, "data": data}, {**DENSE, "tokenizer": "words"}, {**TUNED, "data": data}]
    with pytest.raises(ValueError, match=message):
        run(recipe, changes)


def test_pieces_per_word():
    tokenizer = learn_tokenizer(CAPTIONS, 600, 16)
    assert pieces_per_word(tokenizer, ["the bicycle", "A harbour, the harbour!"]) == 1
    assert pieces_per_word(tokenizer, ["xyz"]) == 3
    assert pieces_per_word(tokenizer, ["the xyz"]) == 2
    assert pieces_per_word(tokenizer, ["harbour " * 100]) == 1  # longer than the tokenizer's length


@pytest.mark.parametrize("streaming", [False, True])
def test_training_says_into_how_many_pieces_a_word_falls(run, tmp_path, caplog, streaming):
    foreign = pairs(tmp_path / "pairs", CAPTIONS) | {"streaming": streaming, "in_memory": not streaming}
    caplog.set_level(logging.WARNING)
    run([DENSE, {**TUNED, "data": foreign}])
    expected = pieces_per_word(glyphs.build_tokenizer(16), CAPTIONS)
    warnings = [record.getMessage() for record in caplog.records if "pieces" in record.getMessage()]
    assert len(warnings) == 1 and expected > 2
    assert f"{expected:.1f} pieces" in warnings[0] and "tuned" in warnings[0] and "tokenizer stage" in warnings[0]


@pytest.mark.parametrize("captions", [["a harbour", None] * 8, [["a harbour", None], None, [None], []] * 4])
def test_training_on_a_stream_leaves_missing_captions_out(run, tmp_path, captions):
    rows(captions).to_parquet(tmp_path / "x.parquet")
    data = {"source": str(tmp_path / "x.parquet"), "streaming": True, "max_unreadable": 0.9}
    assert (run([DENSE, {**TUNED, "data": data}]) / "tuned").is_dir()


def test_training_on_a_stream_of_numbers_ends_in_one_line(run, tmp_path):
    rows(range(8)).to_parquet(tmp_path / "x.parquet")
    data = {"source": str(tmp_path / "x.parquet"), "streaming": True}
    with pytest.raises(ValueError, match="^tuned: 8 of 8 pairs .*its caption is no text but [0-7]. [^\n]*$"):
        run([DENSE, {**TUNED, "data": data}])


def test_training_on_a_stream_whose_second_shard_is_torn_names_it(run, tmp_path):
    shard(tmp_path / "0.tar", images_and_texts(range(8)))
    shard(tmp_path / "1.tar", images_and_texts(range(8, 16)))
    whole = (tmp_path / "1.tar").read_bytes()
    (tmp_path / "1.tar").write_bytes(whole[:5000])
    data = {"source": str(tmp_path / "*.tar"), "image_column": "png", "caption_column": "txt", "streaming": True}
    message = re.escape(f"cannot be read because of {tmp_path / '1.tar'}: ReadError: ")
    with pytest.raises(ValueError, match=f"^tuned: {re.escape(data['source'])} {message}[^\n]*$"):
        run([DENSE, {**TUNED, "data": data}])


def test_training_on_words_that_are_known_says_nothing(run, caplog):
    caplog.set_level(logging.WARNING)
    run([DENSE, {**TUNED, "data": {"source": "glyphs", "num_samples": 8}}])
    assert "pieces" not in caplog.text


# Upcycling


@pytest.mark.parametrize(
    "field, value",
    [
        ("moe_layers", [1]),
        ("num_experts", 2),
        ("fusion_gate", True),
        ("hidden_size", 8),
        ("intermediate_size", 8),
        ("num_hidden_layers", 1),
        ("num_attention_heads", 4),
        ("hidden_act", "gelu"),
        ("layer_norm_eps", 0.1),
        ("projection_dim", 8),
        ("auto_map", {"AutoModel": "elsewhere--evil.Model"}),
        ("model_type", "clip"),
        ("capacity", 4),
    ],
)
@pytest.mark.parametrize("tower", ["text", "vision"])
def test_upcycling_sets_nothing_that_weights_depend_on(run, tower, field, value):
    with pytest.raises(ValueError, match=f"sparse.{tower}_config.*no field '{field}'.*capacity_factor"):
        run([DENSE, {**SPARSE, f"{tower}_config": {field: value}}])


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"capacity_factor": -1}, "capacity_factor must be greater than 0"),
        ({"capacity_factor": "big"}, "capacity_factor"),
        ({"capacity_factor": float("inf")}, "capacity_factor"),
        ({"capacity_group_size": 1.5}, "capacity_group_size"),
        ({"router_jitter_noise": 1}, "router_jitter_noise"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok"),
        ({"attention_dropout": 1.5}, "attention_dropout"),
        ({"attention_dropout": None}, "attention_dropout"),
    ],
)
def test_values_of_routing_that_cannot_be(run, tmp_path, settings, message):
    with pytest.raises(ValueError, match=f"vision_config.*{message}"):
        run([DENSE, {**SPARSE, "vision_config": settings}])
    assert not (tmp_path / "out" / "sparse").exists()


def test_all_of_routing_can_be_set(run):
    settings = {
        "attention_dropout": 0.1,
        "capacity_factor": 3.0,
        "capacity_group_size": 4,
        "eval_capacity_factor": 2.0,
        "norm_topk_prob": True,
        "num_experts_per_tok": 1,
        "router_jitter_noise": 0.1,
    }
    assert set(settings) == ROUTING_FIELDS
    output = run([DENSE, {**SPARSE, "vision_config": settings}])
    model = AutoModel.from_pretrained(output / "sparse")
    assert {name: getattr(model.config.vision_config, name) for name in settings} == settings
    assert model.config.text_config.num_experts_per_tok == 2


# Models that load


def without_a_tensor(folder):
    weights = load_file(folder / "model.safetensors")
    save_file({name: weights[name] for name in sorted(weights)[1:]}, folder / "model.safetensors", {"format": "pt"})
    return sorted(weights)[0]


def test_what_a_stage_wrote_has_to_load(dense_folder, tmp_path):
    require_loadable(dense_folder)
    folder = tmp_path / "model"
    shutil.copytree(dense_folder, folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot load .*model"):
        require_loadable(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    require_loadable(folder)  # half a processor is no error: a source without one converts
    lost = without_a_tensor(folder)
    with pytest.raises(ValueError, match=f"model does not fit: missing: {lost}"):
        require_loadable(folder)


def test_all_experts_of_a_mixture_have_to_load(dense_folder, tmp_path):
    folder = tmp_path / "mixture"
    assemble.convert([dense_folder] * 3, folder)
    require_loadable(folder)
    without_a_tensor(folder / "expert_2")
    with pytest.raises(ValueError, match="expert_2: missing weights"):
        require_loadable(folder)
    shutil.rmtree(folder / "expert_2")
    with pytest.raises((OSError, ValueError), match="expert_2"):
        require_loadable(folder)


@pytest.mark.parametrize("stage, name", [(InitializeStage, "dense"), (UpcycleStage, "sparse")])
def test_a_model_that_does_not_load_gets_no_name(run, tmp_path, monkeypatch, stage, name):
    write = stage.run

    def damage(stage, inputs, context, directory):
        write(stage, inputs, context, directory)
        without_a_tensor(directory)

    monkeypatch.setattr(stage, "run", damage)
    with pytest.raises(ValueError, match=f"{name}.partial does not .*[mM]issing"):
        run([DENSE, SPARSE])
    assert not (tmp_path / "out" / name).exists()


def test_every_stage_that_writes_a_model_is_known_to():
    """Stages whose folder others use as their `model`."""
    models = {"InitializeStage", "LongContextStage", "UpcycleStage", "TrainStage", "TrainExpertsStage"}
    models |= {"TrainDataExpertStage", "TrainRouterStage", "UnifyStage", "AverageStage", "AssembleStage"}
    assert {stage.__name__ for stage in STAGES.values() if stage.makes_model} == models


def test_the_first_weights_are_those_of_the_seed(run, processor_folder):
    """Checks before a model is saved draw no random numbers."""
    output = run([{**DENSE, "processor": str(processor_folder)}])
    torch.manual_seed(0)
    expected = CLIPModel(AutoModel.from_pretrained(output / "dense").config).state_dict()
    found = CLIPModel.from_pretrained(output / "dense").state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
