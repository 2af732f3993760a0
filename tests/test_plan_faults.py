"""Recipes with one fault each, which settings, configurations and counts tell: none runs its first stage. Of those that
only a stage itself can find out, each ends in one line."""

import json
import re
import shutil

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from documents import ROOT
from transformers import SiglipConfig

from training.plan import plan
from training.recipe import load_recipe
from training.runner import run_recipe

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT, VISION = {**SIZES, "max_position_embeddings": 24}, {**SIZES, "image_size": 32, "patch_size": 16}
DATA = {"source": "symbols", "num_samples": 40}
INITIAL = {"stage": "initialize", "projection_dim": 16, "text_config": TEXT, "vision_config": VISION}
TRAIN = {"data": DATA, "global_batch_size": 8, "max_steps": 1, "learning_rate": 1e-3}
POLICIES = [{"policy": "full", "column": column} for column in ("caption", "raw_caption")]
WEIGHTS = {"caption_weights": [0.5, 0.5]}
ONE = {"num_experts": 1, "num_experts_per_tok": 1}
EXPERT = {"stage": "train_data_expert", "model": "dense", "clusters": "coarse"}
STAGES = {
    "words": {"stage": "tokenizer", "data": DATA, "vocab_size": 600},
    "learned": {**INITIAL, "tokenizer": "words"},
    "dense": {**INITIAL, "processor": "symbols"},
    "several": {"stage": "captions", "model": "dense", "data": DATA, "captions": POLICIES},
    "pre": {"stage": "train", "model": "dense"},
    "features": {"stage": "embed", "model": "pre", "data": DATA},
    "clusters": {"stage": "cluster", "features": "features", "num_image_clusters": 2},
    "inner": {
        "stage": "cluster",
        "features": "features",
        "previous": "clusters",
        "within": True,
        "num_image_clusters": 2,
    },
    "expert": {"stage": "train_experts", "expert": 1, "model": "pre", "clusters": "clusters"},
    "unified": {"stage": "unify", "model": "pre", "experts": ["expert"]},
    "fused": {"stage": "upcycle", "model": "dense", "preset": "clip_fmoe", "changes": ONE},
    "narrow": {"stage": "train", "model": "fused", "trainable": r"\.mlp\.(experts|fusion_gate)"},
    "stacked": {
        "stage": "unify",
        "model": "fused",
        "experts": ["narrow"],
        "preset": "clip_fmoe",
        "changes": {"num_experts_per_tok": 1},
    },
    "kept": {"stage": "hidden_states", "model": "unified", "data": {"source": "several"}, **WEIGHTS},
    "warmed": {"stage": "train_router", "model": "unified"},
    "tuned": {
        "stage": "train_router",
        "model": "warmed",
        "data": {"source": "several", "num_samples": None},
        "hidden_states": "kept",
        **WEIGHTS,
    },
    "sentences": {"stage": "embed_captions", "encoder": "tfidf", "data": DATA, "dim": 4},
    "others": {"stage": "embed_captions", "encoder": "tfidf", "data": DATA, "dim": 3},
    "fine": {"stage": "cluster_fine", "captions": "sentences", "num_centers": 4},
    "assigned": {"stage": "cluster_fine", "captions": "sentences", "centers": "fine"},
    "coarse": {"stage": "cluster_coarse", "fine": "assigned", "num_experts": 2},
    "chosen": {"stage": "select", "fine": "assigned", "captions": "sentences", "metadata": ["a red circle"]},
    "first": {**EXPERT, "expert": 2, "cluster": 0, "global_batch_size": 4},
    "second": {**EXPERT, "expert": 3, "cluster": 1, "global_batch_size": 4},
    "mixture": {"stage": "assemble", "experts": ["first", "second"], "clusters": "coarse", "captions": "sentences"},
    "mean": {"stage": "average", "models": ["first"]},
    "sparse": {"stage": "upcycle", "model": "dense", "preset": "clip_up", "changes": {"num_experts": 2}},
    "taken": {"stage": "dense", "model": "sparse", "take": 0, "scale": 1.0},
    "long": {
        "stage": "train_long_clip",
        "model": "dense",
        "data": {"source": "several", "num_samples": None},
        "global_batch_size": 16,
        "num_components": 4,
    },
    "scores": {
        "stage": "evaluate",
        "models": {"mixture": "mixture"},
        "tasks": [{"task": "retrieval", "dataset": "symbols", "num_samples": 8}],
    },
}
OWN = {"task": "retrieval", "dataset": "symbols"}


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows").mkdir()
    rows = {"image": [b""] * 40, "caption": ["a red circle"] * 40}
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "rows" / "train.parquet")
    (tmp_path / "pairs.csv").write_text("image,caption\n" + "a.png,a red circle\n" * 40)
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        for file in (ROOT / "training" / "symbol_clip").glob("*.json"):
            shutil.copy(file, tmp_path / folder)
    settings = json.loads((tmp_path / "other" / "processor_config.json").read_text())
    settings["image_processor"]["image_mean"] = [0.4, 0.5, 0.5]
    (tmp_path / "other" / "processor_config.json").write_text(json.dumps(settings))
    SiglipConfig().save_pretrained(tmp_path / "siglip")
    stages = [{"name": name, **stage} for name, stage in STAGES.items()]
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({"output_dir": "out", "defaults": {"train": TRAIN}, "stages": stages}))
    return path


def fault_of(recipe, overrides):
    """The only line of the error with which a run ends before any stage runs, as --plan does."""
    with pytest.raises(ValueError) as error:
        run_recipe(load_recipe(recipe, overrides))
    assert not (recipe.parent / "out").exists()
    (line,) = str(error.value).splitlines()
    return line.partition(" has a fault: ")[2]


def fits(pattern, line):
    return re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), line)


FAULTS = {
    "an expert that was trained whole": (
        {"expert.trainable": "."},
        "unified.experts.0: expert was not trained from this base, or more of it was than an expert is: it differs in "
        "logit_scale, *: train the sparse FFNs alone (trainable, in its stage)",
    ),
    "an expert of one expert, trained whole": (
        {"narrow.trainable": "."},
        "stacked.experts.0: narrow was not trained from this base, *",
    ),
    "an expert of the model before its base": (
        {"expert.model": "dense"},
        "unified.experts.0: expert was not trained from this base, *",
    ),
    "experts with other vocabularies": (
        {"second.model": "learned"},
        "mixture.experts: second has vocab_size 600, but first has *",
    ),
    "experts with other image processors": (
        {"first.model": "one", "second.model": "other", "mean.models": ["first", "other"]},
        "mixture.experts, mean.models: the image processor of other makes something else of images than that of one, *",
    ),
    "an expert that reads otherwise than its base": (
        {"pre.model": "one", "expert.model": "other"},
        "unified.experts: the image processor of other makes something else of images than that of one, *",
    ),
    "hidden states of other data": (
        {"kept.data.num_samples": 30},
        "tuned.hidden_states: kept is of other data: the number of pairs is 30 there and 40 here. Use the same *",
    ),
    "hidden states of other captions": (
        {"kept.data.source": "symbols", "kept.data.num_samples": 40, "kept.caption_weights": None},
        "tuned.hidden_states: kept is of 1 captions of an image, not of 2",
    ),
    "hidden states of a model that was trained since": (
        {"warmed.trainable": "embeddings"},
        "tuned.hidden_states: kept is of a model before text_model.embeddings.*, * trained",
    ),
    "clusters of other data": (
        {"features.data.seed": 1},
        "expert.clusters: clusters is of other data: seed is 1 there and 0 here. Use the same data in both",
    ),
    "a split that a world lacks": (
        {"pre.data.split": "validation"},
        "pre.data: symbols have no split 'validation', only train, test",
    ),
    "more pairs left out than there are": (
        {"features.data": {"source": "rows", "num_samples": None, "skip": 40}},
        "features.data.skip: 40 leaves no pair of rows",
    ),
    "more clusters than rows": (
        {"clusters.num_image_clusters": 41, "inner.within": False},
        "clusters.num_image_clusters: 40 samples cannot make 41 clusters: ask for fewer",
    ),
    "more clusters within clusters than rows": (
        {"inner.num_image_clusters": 21},
        "inner.num_image_clusters: 20 samples each cannot make 21 clusters: ask for fewer",
    ),
    "more centers than captions": (
        {"fine.num_centers": 41},
        "fine.num_centers: 40 captions cannot make 41 clusters: ask for fewer",
    ),
    "more data experts than centers": (
        {"coarse.num_experts": 5},
        "coarse.num_experts: 4 centers cannot make 5 clusters: ask for fewer",
    ),
    "more nearest centers than centers": ({"chosen.num_nearest": 5}, "chosen.num_nearest: 5 of 4 centers"),
    "a cluster that there is not": (
        {"expert.cluster": 2},
        "expert.cluster: there is no cluster 2: those of clusters are 0 to 1",
    ),
    "more experts than clusters": (
        {"mixture.experts": ["first", "second", "dense"]},
        "mixture.experts: 3 experts, but coarse has 2 clusters",
    ),
    "centers of another encoder": (
        {"fine.captions": "others"},
        "assigned.centers: fine goes back to the encoder tfidf of others, sentences to tfidf of sentences: *",
    ),
    "own data of a task that are not there": (
        {"scores.tasks": [OWN | {"dataset": "./nowhere"}]},
        "scores.tasks: retrieval: there is no file or folder ./nowhere",
    ),
    "data that are measured while training and not there": (
        {"pre.evaluation": {"every_steps": 1, "tasks": [OWN | {"dataset": "nowhere.parquet"}]}},
        "pre.evaluation.tasks: retrieval: there is no file or folder nowhere.parquet",
    ),
    "weights of captions where images have one": (
        {"pre.caption_weights": [0.5, 0.5]},
        "pre.caption_weights: 2 weights, but the images of symbols have one caption, a text: leave them out, or *",
    ),
    "weights of captions where rows hold a text": (
        {"pre.data.source": "rows", "pre.data.num_samples": None, "pre.caption_weights": [0.5, 0.5]},
        "pre.caption_weights: 2 weights, but the images of rows have one caption, a text: *",
    ),
    "weights of captions in a table": (
        {"pre.data.source": "pairs.csv", "pre.data.num_samples": None, "pre.caption_weights": [0.5, 0.5]},
        "pre.caption_weights: 2 weights, but the images of pairs.csv have one caption, a text: *",
    ),
    "fewer weights than captions": (
        {"several.captions": POLICIES + POLICIES[:1]},
        "kept.caption_weights, tuned.caption_weights, long.caption_weights: 2 weights, but the images of several have "
        "3 captions: give as many",
    ),
    "a tokenizer of longer texts than its model": (
        {"words.max_length": 77},
        "learned.text_config: max_position_embeddings is 24, but the tokenizer words cuts captions at its max_length*",
    ),
    "a model to measure that is no CLIP": (
        {"scores.models": {"mixture": "mixture", "another": "siglip"}},
        "scores.models.another: a dense or sparse CLIP is needed, not a model of type 'siglip'",
    ),
    "an expert that needs a scale": (
        {"taken.scale": None},
        "taken.scale: the weights of a token's experts do not sum to 1 *",
    ),
}


def test_the_recipe_without_a_fault_has_none(recipe):
    loaded = load_recipe(recipe)
    rows, faults = plan(loaded, loaded.stages, 1)
    assert not faults and len(rows) == len(STAGES)


@pytest.mark.parametrize(("overrides", "fault"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_found_before_the_first_stage(recipe, overrides, fault):
    line = fault_of(recipe, overrides)
    assert fits(fault, line), f"{line!r} is not {fault!r}"


def test_adapters_change_more_than_an_expert_may(recipe):
    pytest.importorskip("peft")
    line = fault_of(recipe, {"expert.lora": {"r": 2}, "expert.trainable": "."})
    assert line.startswith("unified.experts.0: expert was not trained from this base") and "q_proj" in line


UNKNOWN = {
    # Only decoding tells
    "images that cannot be read": (
        {"features.data": {"source": "rows"}},
        "features: 40 of 40 pairs of rows cannot be used; the first is pair 0 *",
        ["dense", "pre", "features"],
    ),
    # Only clustering tells how large the clusters are, and whether features differ
    "clusters smaller than a batch": (
        {"expert.global_batch_size": 40},
        "expert: none of the 2 clusters fills a global batch of 40 *",
        ["dense", "pre", "features", "clusters", "expert"],
    ),
    "a cluster of fewer pairs than a batch": (
        {"first.global_batch_size": 40, "first.cluster": 1},
        "first: cluster 1 of coarse has * pairs, fewer than global_batch_size 40: lower it, or make fewer clusters",
        ["dense", "sentences", "fine", "assigned", "coarse", "first"],
    ),
    "captions that are all the same": (
        {"sentences.data.source": "rows", "sentences.data.num_samples": None},
        "sentences: 40 texts have 3 different words, fewer than dim 4: lower it",
        ["sentences"],
    ),
    # Only the Hub tells
    "a folder that is not there and has the name of a repository": (
        {"features.data": {"source": "my/images"}},
        "features: there is no file or folder my/images: *",
        ["dense", "pre", "features"],
    ),
}


@pytest.mark.parametrize(("overrides", "fault", "stages"), UNKNOWN.values(), ids=UNKNOWN)
def test_what_only_a_stage_finds_out_ends_in_one_line(recipe, overrides, fault, stages, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    loaded = load_recipe(recipe, overrides)
    assert plan(loaded, loaded.stages, 1)[1] == []
    with pytest.raises((ValueError, OSError)) as error:
        run_recipe(loaded, stages)
    assert fits(fault, line := str(error.value)) and "\n" not in line, line
