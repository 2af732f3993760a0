"""Wrong recipes: all that settings, configurations and counts tell is said at once, before the first stage runs. Of
faults that only a stage itself can find out, each ends in one line."""

import json
import re
import shutil
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from documents import ROOT
from tiny_clip import change_json
from tiny_runs import run_stages
from training.recipe_file import RecipeError
from transformers import BertConfig

from training.checks import Outlook, find_faults
from training.plan import plan
from training.recipe import load_recipe
from training.runner import run_recipe


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A recipe without a fault, in a working folder with data, models and folders of stages."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows").mkdir()
    rows = {"image": [b""] * 40, "caption": ["a red circle"] * 40, "number": [1] * 40}
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "rows" / "train.parquet")
    (tmp_path / "pairs.csv").write_text("image,caption\n" + "a.png,a red circle\n" * 40)
    (tmp_path / "entries.json").write_text("[]")
    (tmp_path / "empty").mkdir()
    (tmp_path / "my" / "images").mkdir(parents=True)
    (tmp_path / "captions").mkdir()
    (tmp_path / "captions" / "manifest.json").write_text(json.dumps({"stage": {"stage": "captions"}}))
    for folder in ("one", "other"):
        weights = shutil.ignore_patterns("*.safetensors")
        shutil.copytree(ROOT / "training" / "symbol_clip", tmp_path / folder, ignore=weights)
    change_json(tmp_path / "other" / "processor_config.json", image_processor={"image_mean": [0.4, 0.5, 0.5]})
    BertConfig().save_pretrained(tmp_path / "bert")
    return Path(shutil.copy(ROOT / "tests" / "recipes" / "every_stage.yaml", tmp_path / "recipe.yaml"))


def faults(path, overrides, only=None):
    """The lines of the error that name a fault each, where nothing ran."""
    with pytest.raises(RecipeError) as error:
        run_recipe(load_recipe(path, overrides), only)
    first, *lines = str(error.value).splitlines()
    assert first.startswith(f"{path} has {f'{len(lines)} faults:' if lines else 'a fault: '}")
    assert not (path.parent / "out").exists()
    return [line.strip() for line in lines] or [first.removeprefix(f"{path} has a fault: ")]


def found_in(recipe, *names, num_processes=1):
    """The faults of some stages of a recipe, or of all."""
    outlook = Outlook(recipe.stages, recipe.output_dir, num_processes)
    return list(find_faults(outlook, set(names or outlook.stages)))


# "settings => what is said of the first one", or "settings -> what is said", * for any text, also at the end
FAULTS = r"""
# Kinds of stages and keys
trained.stage: trian => there is no kind of stage 'trian': did you mean 'train'?
trained.learning_rte: 1 => there is no such key, * did you mean 'learning_rate'?
several.captions: [{polcy: full, policy: full, column: caption}] -> several.captions.0.polcy: * did you mean 'policy'
defaults.trian.max_steps: 1 -> defaults.trian: no stage uses them: did you mean 'train'?
dense.text_config.hidden_siz: 1 -> dense.text_config: * no field 'hidden_siz': did you mean 'hidden_size'?

# References
trained.model: sprase => there is no stage or folder 'sprase': did you mean 'sparse'?
unified.experts: [dense, exprt] -> unified.experts.1: there is no stage *: did you mean 'expert'?
expert.clusters: nowhere => there is no stage 'nowhere', and no such folder
sparse.model: trained => trained is a later stage: move it up
sparse.model: sparse => sparse is this stage itself
expert.clusters: features => features is a stage of type embed, not cluster
expert.clusters: ./captions => ./captions is the folder of a stage of type captions, not cluster
trained.model: empty => empty is the folder of neither a model nor a stage: *config.json

# New models
dense.changes.num_experts: 4 -> dense: num_experts: of sparse models alone; set preset
dense.text_config.capacity_factor: 2 -> dense: capacity_factor: of sparse models alone; set preset
dense.text_config.vocab_size: 700 -> dense: the tokenizer of symbols has 1313 tokens, but vocab_size is 700
dense.text_config.eos_token_id: 5 -> dense: the tokenizer of symbols ends texts with 1312 *, but eos_token_id is 5
dense.text_config.max_position_embeddings: 2 -> dense: *model_max_length is 2 and max_position_embeddings is 2
learned.family: siglip, learned.projection_dim: 8 -> learned: projection_dim is 8, but * must be the hidden_size of
learned.shared_encoder: true, learned.text_config.hidden_size: 32 => *hidden_size, but it is 32 in text_config and 16
learned.preset: clip_up, learned.changes.num_experts_per_tok: 9 -> learned.changes: num_experts_per_tok must be between
learned.preset: clip_up, learned.text_config.norm_before_capacity: true -> learned.*=True needs norm_topk_prob=True
learned.preset: clip_up, learned.shared_encoder: true, learned.towers: [text] => *needs towers of one moe_layers
pre.loss: sigmoid => sigmoid needs a model with a logit_bias, as SigLIP; 'clip' has none
long.label_smoothing: 0.1, long.model: learned, learned.family: siglip => it goes with the softmax loss; this model's is
pre.expert_dropout: 0.1 => it goes with a sparse model, but dense is dense
pre.patch_dropout: 0.99 => it leaves none of 4 patches: take at most 0.75

# Tasks, presets and what they change
scores.tasks: [symbol_pairs] => unknown task symbol_pairs: did you mean 'symbols_pairs'?
sparse.preset: clip_upp => Input should be * (did you mean 'clip_up'?) (got 'clip_upp')
sparse.changes.num_expert: 2 -> sparse.changes: * no num_expert (did you mean 'num_experts'?)
sparse.changes.num_experts_per_tok: 5 -> sparse.changes: *num_experts_per_tok*5
sparse.changes.sparse_layers: [2] -> sparse.*: *2
sparse.text_config.num_experts: 1 -> sparse.text_config: an upcycled tower has no field 'num_experts' to set here
sparse.model: unified => unified is sparse already, and a dense CLIP is needed
looked.model: dense => a dense CLIP has no experts to analyze
looked.expert: 4 => 4, but the experts are 0 to 1
looked.layers: {text: 0} -> looked.layers.text: 0, but the sparse layers are 1
looked.num_experts_per_tok: [1, 5] => 5 of 2 experts
looked.tasks: [symbols_linear_probe] => no text of a linear probe reaches the sparse
trained.balance_top_k: 5 => *5 of 2 experts
trained.balance_mean: shared => shared needs a model with shared_encoder: true; this one has two encoders
trained.text_router_weight: 0.5, trained.balance_mean: token -> trained: text_router_weight goes with a sum over
trained.global_entropy_coef: {text: 1} -> trained: global_entropy_coef is for text, but *min_experts for no tower
trained.global_entropy_min_experts: {text: 2} -> trained: global_entropy_coef is for no tower, but *min_experts for text
trained.global_entropy_min_experts: {text: 5}, trained.global_entropy_coef: {text: 1} -> *text: 5 of 2 experts
trained.local_entropy_coef: {text: 1}, sparse.towers: [vision] -> trained.*.text: that tower has no sparse layers: leave
trained.trainable: router, sparse.changes: {num_experts: 1, num_experts_per_tok: 1} -> trained.trainable: routers would
trained.trainable: nothing => *'nothing' is found in no parameter's name
sparse.changes: {num_experts_per_tok: 1, norm_topk_prob: true} -> trained.trainable: routers would follow their balance

# Together
mixture.captions: null -> mixture: clusters and captions go together
scores.oracles: {best: [one, three]} -> scores: oracles.best needs rows of the models
scores.changes: {other: {routing: paper}} -> scores: changes.other is none of the models

# Data
trained.data.source: rows/*.tar => there is no file or folder rows/*.tar
words.data.source: my/imagess => there is no file or folder my/imagess: did you mean my/images
trained.data: {source: rows, split: tets} => rows has no split 'tets', only train
trained.data: {source: entries.json, split: test} -> trained.data.split: * has no split 'test',
trained.data: {source: rows, caption_column: text} => rows has no column 'text'; its columns are 'image', 'caption',
trained.data: {source: rows, image_root: nowhere} -> trained.data.image_root: there is no folder nowhere
trained.data: {source: several, caption_column: text} -> trained.data.caption_column: several makes the column caption
several.captions: [{policy: full, column: alt}, {policy: full, column: caption}] => symbols has no column 'alt'; its
pre.data.num_samples: null -> pre.data: *num_samples must say how many symbols to draw
pre.data.split: validation -> pre.data: symbols have no split 'validation', only train, test
features.data: {source: rows, num_samples: null, skip: 40} -> features.data.skip: 40 leaves no pair of rows
scores.tasks: [retrieval] => the task retrieval needs data: in a recipe, {task: retrieval
scores.tasks: [dci] => dci is not read from the Hub: put it into
scores.tasks: [{task: retrieval}] -> scores.tasks.0.own.dataset: Field required
scores.tasks: [{task: pairs, dataset: rows, split: train}] => rows has no column 'image_0', 'image_1', 'caption_0'
scores.tasks: [{task: retrieval, dataset: rows, split: train, caption_column: text}] => rows has no column 'text'
scores.tasks: [{task: retrieval, dataset: ./nowhere}] => retrieval: there is no file or folder ./nowhere
pre.evaluation: {every_steps: 1, tasks: [{task: retrieval, dataset: no.parquet}]} -> pre.evaluation.tasks: *no.parquet

# What has no numbers, and what changes in every epoch
features.data: {source: rows, num_samples: null, streaming: true} -> *streaming: a stream has no numbered samples
tuned.data.streaming: true -> tuned: data.streaming: caption_weights need samples with numbers
tuned.augmentation: {random_resized_crop: [0.9, 1]}, tuned.data.in_memory: true -> tuned: augmentation changes images in every epoch, but data.in_
pre.augmentation: {random_resized_crop: [0.9, 1]}, pre.data.in_memory: true -> pre: augmentation *, but data.in_memory

# Batches
expert.mini_batch_size: 3 => 3 does not divide a process's batch of 8 pairs
trained.gradient_accumulation_steps: 3 -> trained.global_batch_size: 8 cannot be shared by 1 processes x 3
trained.global_batch_size: 48, trained.data.source: rows => a dataset of 40 samples does not fill *48

# Models that do not fit
expert.trainable: . -> unified.experts.0: expert was not trained from this base, or more *: it differs in logit_scale
narrow.trainable: . -> stacked.experts.0: narrow was not trained from this base,
expert.model: dense -> unified.experts.0: expert was not trained from this base,
first.model: one, second.model: other, mean.models: [first, other] -> mean.models: the image processor
pre.model: one, expert.model: other -> unified.experts: the image processor of other makes something else of images
scores.models.trained: bert => a dense or sparse CLIP is needed, not a model of type 'bert'
stacked.experts: [dense] => a model of type 'clip_moe' is needed
stacked.towers: [vision] -> stacked: fused is sparse already, which settles towers
stacked.changes: {fusion_gate: false} -> stacked: the experts were trained with fusion gates, which cannot be left out
taken.take: 4 => *there is no expert 4, only 0 to 1
taken.take: base => *there is no base FFN
taken.scale: => the weights of a token's experts do not sum to 1
"""


def is_like(pattern, line):
    return re.match(re.escape(pattern).replace(r"\*", ".*"), line)


@pytest.mark.parametrize("fault", [line for line in FAULTS.splitlines() if line and not line.startswith("#")], ids=str)
def test_a_fault_is_named_with_its_setting(path, fault):
    settings, arrow, said = re.fullmatch("(.*) ([=-]>) (.*)", fault).groups()
    overrides = yaml.safe_load(f"{{{settings}}}")
    (line,) = faults(path, overrides)
    assert is_like(f"{next(iter(overrides))}: {said}" if arrow == "=>" else said, line), line


def test_the_recipe_without_a_fault_has_none(path):
    recipe = load_recipe(path)
    rows, found = plan(recipe, recipe.stages, 1)
    assert not found and len(rows) == len(recipe.stages)
    started = time.process_time()
    assert found_in(recipe) == [] and time.process_time() - started < 1


def test_all_faults_are_named_at_once_and_that_of_several_stages_is_one(path):
    """Names that do not exist come first, then what settings of a class hold, then all the rest."""
    overrides = {"trained.model": "sprase", "expert.data.source": "missing.parquet"}
    overrides |= {"sparse.changes.num_experts_per_tok": 9, "scores.tasks": ["symbols_pears"]}
    settings = [line.split(":")[0] for line in faults(path, overrides)]
    assert sorted(settings) == sorted([*list(overrides)[:2], "sparse.changes", "scores.tasks"])
    wrong = overrides | {"seed": -1, "trained.max_steps": 0}
    assert {line.split(":")[0] for line in faults(path, wrong)} == {"trained.max_steps", "seed"}
    wrong |= {"sed": 1, "looked.task": ["symbols_pairs"]}
    with pytest.raises(ValueError, match="--sed: 'sed' is neither"):
        load_recipe(path, wrong)
    del wrong["sed"]
    assert [line.split(":")[0] for line in faults(path, wrong)] == ["looked.task"]
    changed = {"pre.data.source": "missing.tar", "trained.data.source": "missing.tar"}
    assert faults(path, changed) == ["pre.data.source, trained.data.source: there is no file or folder missing.tar"]


def test_what_only_the_hub_knows_passes(path):
    assert found_in(load_recipe(path, {"trained.model": "gpt2", "trained.data.source": "user/pairs"}), "trained") == []


def test_a_stage_that_is_neither_done_nor_to_be_run_is_missed(path):
    (line,) = faults(path, {}, only=["sparse"])
    assert line.startswith("sparse.model: the stage 'dense' has not finished") and line.endswith("Run it first")


def test_finished_stages_need_no_data(path):
    recipe = load_recipe(path, {"sentences.data.source": "pairs.csv", "sentences.dim": 3})
    run_recipe(recipe, ["sentences"])
    (path.parent / "pairs.csv").unlink()
    assert found_in(recipe, "sentences") == []


def test_processes_share_a_batch_and_an_optimizer_has_to_be_installed(path, monkeypatch):
    recipe = load_recipe(path, {"pre.optimizer": "adamw_8bit"})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    by_four, by_three = (found_in(recipe, "dense", "pre", num_processes=number) for number in (4, 3))
    missing = "pre.optimizer: adamw_8bit is torchao's: pip install torchao, or take adamw"
    shared = "pre.global_batch_size: 8 cannot be shared by 3 processes x 1 accumulation steps"
    assert by_four == [missing] and sorted(by_three) == sorted([missing, shared])


def test_names_that_settings_know(tmp_path):
    """A stage may have the name of an encoder that is built in, or be called as the model that it reads."""
    captions = {"stage": "embed_captions", "data": {"source": "symbols", "num_samples": 20}, "dim": 4}
    stages = [{"name": name, "encoder": "tfidf", **captions} for name in ("tfidf", "again")]
    run_stages(tmp_path, [*stages, {"name": "c", "stage": "cluster_fine", "captions": "tfidf", "num_centers": 2}])
    of_hub = {"again.encoder": "bert-base-uncased", "again.name": "bert_base_uncased"}
    assert load_recipe(tmp_path / "recipe.yaml", of_hub).stages[1].encoder == "bert-base-uncased"


def test_adapters_change_more_than_an_expert_may(path):
    pytest.importorskip("peft")
    (line,) = faults(path, {"expert.lora": {"r": 2}, "expert.trainable": "."})
    assert line.startswith("unified.experts.0: expert was not trained from this base") and "q_proj" in line


# "settings of a stage | the stages that run | what the last one says"
UNKNOWN = """
# Only decoding tells
features: {data: {source: rows}} | dense, pre, features | features: 40 of 40 pairs of rows cannot be used; the first is
# Only clustering tells how large the clusters are, and whether features differ
expert: {global_batch_size: 40} | *expert | expert: none of the 2 clusters fills a global batch of 40
expert: {global_batch_size: 40, gradient_accumulation_steps: 10, max_steps: null, num_epochs: 1} | *expert | *an epoch
# Only the stage compares its data with those of the labels
features: {data.seed: 1} | *expert | expert: the labels in * belong to another dataset
first: {cluster: 2} | *first | first: cluster 2 of coarse has 0 pairs, fewer than global_batch_size 4:
pre: {caption_weights: [0.5, 0.5]} | dense, pre | pre: caption_weights has 2 weights, but image 0 of symbols has one
sentences: {data: {source: rows, num_samples: null}} | sentences | sentences: 40 texts have 3 different words, fewer
"""
BEFORE = {
    "*expert": "dense, pre, features, clusters, expert",
    "*first": "dense, sentences, fine, assigned, coarse, first",
}


@pytest.mark.parametrize("fault", [line for line in UNKNOWN.splitlines() if line and not line.startswith("#")], ids=str)
def test_what_only_a_stage_finds_out_ends_in_one_line(path, fault):
    text, stages, said = fault.split(" | ")
    ((stage, settings),) = yaml.safe_load(text).items()
    loaded = load_recipe(path, {f"{stage}.{key}": value for key, value in settings.items()})
    assert plan(loaded, loaded.stages, 1)[1] == []
    with pytest.raises((ValueError, OSError)) as error:
        run_recipe(loaded, BEFORE.get(stages, stages).split(", "))
    assert is_like(said, line := str(error.value)) and "\n" not in line, line
