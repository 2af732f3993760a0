"""Wrong recipes: settings and folders tell some faults at once, and a rehearsal finds all others."""

import json
import re
import shutil
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import torch
import yaml
from documents import ROOT
from tiny_runs import DENSE, STEP, read_log
from tiny_runs import recipe as tiny_recipe
from transformers import BertConfig

import clip_moe
from clip_moe.data.symbols import SYMBOLS
from clip_moe.engine import rehearsal
from clip_moe.engine.command_line import read_stage_command, run_stage
from clip_moe.engine.files import locked
from clip_moe.engine.kinds import stage_of_kind
from clip_moe.engine.plan import aligned, plan, require_sound, wanted_stages
from clip_moe.engine.program import peak_memory
from clip_moe.engine.recipe import Recipe, RecipeError, load_recipe
from clip_moe.engine.rehearsal import measure_stages, rehearse
from clip_moe.engine.runner import run_recipe

STEPS = {"global_batch_size": 8, "learning_rate": 1e-3}
EVERY = ROOT / "tests" / "recipes" / "every_stage.yaml"


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A recipe without a fault, in a working folder with data, models and folders of stages."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows").mkdir()
    rows = {"image": [b""] * 40, "caption": ["a red circle"] * 40, "number": [1] * 40}
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "rows" / "train.parquet")
    (tmp_path / "empty").mkdir()
    (tmp_path / "my" / "images").mkdir(parents=True)
    (tmp_path / "captions").mkdir()
    (tmp_path / "captions" / "manifest.json").write_text(json.dumps({"stage": {"stage": "captions"}}))
    (tmp_path / "former").mkdir()
    (tmp_path / "former" / "manifest.json").write_text(json.dumps({"stage": {"stage": "cluster_fine"}}))
    BertConfig().save_pretrained(tmp_path / "bert")
    return shutil.copy(EVERY, tmp_path / "recipe.yaml")


def said_at_once(path, overrides, only=None):
    with pytest.raises(RecipeError) as error:
        recipe = load_recipe(path, overrides)
        plan(recipe, wanted_stages(recipe, only, None))
    return str(error.value)


AT_ONCE = {
    "kind": ({"trained.stage": "trian"}, "trained.stage: unknown kind of stage 'trian': did you mean 'train'?"),
    "key": ({"trained.learning_rte": 1}, "trained.learning_rte: unknown key.* did you mean 'learning_rate'"),
    "key within": ({"several.captions": [{"polcy": 1}]}, "several.captions.0.polcy: .*did you mean 'policy'"),
    "unused defaults": ({"defaults.trian.max_steps": 1}, "defaults.trian: no stage uses it: did you mean 'train'?"),
    "choice": ({"sparse.preset": "clip_upp"}, "sparse.preset: Input should be .*did you mean 'clip_up'"),
    "field of a preset": ({"sparse.changes.num_expert": 2}, "sparse.changes.num_expert: .*did you mean 'num_experts'"),
    "range": ({"trained.max_steps": 0}, "trained.max_steps: Input should be greater than 0"),
    "settings that need others": ({"dense.changes.num_experts": 4}, "dense: num_experts: of sparse models alone"),
    "no shared SigLIP": ({"dense.family": "siglip", "dense.shared_encoder": True}, "shared_encoder: a SigLIP always"),
    "settings that exclude others": ({"mixture.captions": None}, "mixture: set both clusters and captions, or neither"),
    "images by tfidf": ({"sentences.what": "images"}, "sentences: tfidf embeds captions only: set what: captions"),
    "weights of no caption": (
        {"features.what": "images", "features.caption_weights": [0.5, 0.5]},
        "features: caption_weights need what: both, got images",
    ),
    "misspelt stage": ({"trained.model": "sprase"}, "trained.model: there is no stage or folder 'sprase'.*'sparse'"),
    "no stage": ({"expert.clusters": "nowhere"}, "expert.clusters: there is no stage 'nowhere', and no such folder"),
    "later stage": ({"sparse.model": "trained"}, "sparse.model: trained is a later stage: move it up"),
    "itself": ({"sparse.model": "sparse"}, "sparse.model: sparse is this stage itself"),
    "another kind": ({"expert.clusters": "features"}, "features is a stage of type embed, not cluster"),
    "folder of another kind": ({"expert.clusters": "./captions"}, "is the folder of a stage of type captions, not cl"),
    "folder of a former kind": ({"expert.clusters": "./former"}, "former kind cluster_fine: make it again with clus"),
    "folder of no model": ({"trained.model": "empty"}, "empty is the folder of neither a model nor a stage"),
    "misspelt data": ({"words.data.source": "my/imagess"}, "words.data.source: .*did you mean my/images"),
    "output in a model": (
        {"output_dir": "bert/out", "features.model": "bert"},
        "features.model: bert/out/features is inside bert, whose files are all read",
    ),
    "output in a task": (
        {"output_dir": "rows/out", "scores.tasks": [{"task": "retrieval", "dataset": "rows"}]},
        "scores.tasks.0.dataset: rows/out is inside rows",
    ),
    "no image root": ({"pre.data": {"source": "rows", "image_root": "x"}}, "pre.data.image_root: there is no folder x"),
    "split of a world": ({"pre.data.split": "tets"}, "pre.data: symbols have no split 'tets', only train, test"),
    "stream without numbers": (
        {"features.data": {"source": "rows", "num_samples": None, "streaming": True}},
        "features.data: streaming: this stage needs numbered samples",
    ),
    "misspelt task": ({"scores.tasks": ["symbols_retreival"]}, "scores.tasks: unknown task.*'symbols_retrieval'"),
    "no data of a task": (
        {"scores.tasks": [{"task": "retrieval", "dataset": "no.parquet"}]},
        "scores.tasks.0.dataset: there is no file or folder no.parquet",
    ),
}


@pytest.mark.parametrize(("overrides", "message"), AT_ONCE.values(), ids=AT_ONCE)
def test_what_settings_and_folders_tell_is_said_at_once(path, overrides, message):
    assert re.search(message, said_at_once(path, overrides))


def test_all_faults_are_named_at_once_and_that_of_several_stages_is_one(path):
    missing = {"pre.data.source": "missing.tar", "trained.data.source": "missing.tar", "expert.clusters": "nowhere"}
    first, *lines = said_at_once(path, missing).splitlines()
    assert first == f"{path} has 2 faults:"
    assert "  pre.data.source, trained.data.source: there is no file or folder missing.tar" in lines


def test_a_stage_that_is_neither_done_nor_to_be_run_is_missed(path):
    assert "sparse.model: the stage 'dense' has not finished" in said_at_once(path, {}, only=["sparse"])


def test_a_plan_lists_stages_and_names_of_the_hub_pass(path):
    recipe = load_recipe(path, {"trained.model": "gpt2", "trained.data.source": "user/pairs"})
    require_sound(recipe, wanted_stages(recipe, ["trained"], None))
    run_recipe(load_recipe(path), ["dense"])
    lines = plan(load_recipe(path), load_recipe(path).stages).splitlines()
    assert lines[2].split() == ["stage", "kind", "state", "reads"]
    assert ["dense", "initialize", "done", "-"] in [line.split() for line in lines]
    assert ["pre", "train", "to", "do", "dense,", "symbols"] in [line.split() for line in lines]
    assert aligned([["a", "bb"], ["ccc", "d"]], left=1) == ["a    bb", "ccc   d"]
    for step in ("step-000002", "step-000010", "step-000011.partial"):
        (Path(load_recipe(path).output_dir) / "pre.partial" / "checkpoints" / step).mkdir(parents=True)
    assert re.search("pre +train +goes on from step 10 ", plan(load_recipe(path), load_recipe(path).stages))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of the stages that the faults below are read by."""
    recipe = load_recipe(EVERY, {"output_dir": str(tmp_path_factory.mktemp("finished") / "out")})
    return run_recipe(recipe, "dense pre features clusters expert unified sparse trained".split())


def link(finished, path, stages):
    """Gives the run of a recipe the finished folders of some stages."""
    (path.parent / "out").mkdir()
    for name in stages:
        (path.parent / "out" / name).symlink_to(finished / name)


FIELDS = {"sparse.changes": {"num_experts_per_tok": 1, "norm_topk_prob": True}}
FOUND = {
    "field of a configuration": ("dense", {"dense.text_config.hidden_siz": 1}, "dense: text_config: .*'hidden_size'"),
    "tokenizer": ("dense", {"dense.text_config.vocab_size": 700}, "dense: the tokenizer of symbols has 1313 tokens"),
    "loss of another family": ("pre", {"pre.loss": "sigmoid"}, "pre.loss: sigmoid needs a model with a logit_bias"),
    "dropout of a dense model": (
        "warmed",
        {"warmed.model": "pre", "warmed.trainable": ".", "warmed.expert_dropout": 0.1},
        "warmed.expert_dropout: it needs a sparse model",
    ),
    "nothing trains": ("trained", {"trained.trainable": "nothing"}, "trained.trainable: .*matches no parameter"),
    "routers in vain": ("sparse,trained", FIELDS, "trained.trainable: routers would follow their balance loss alone"),
    "balance": ("warmed", {"warmed.balance_top_k": 5}, "warmed.balance_top_k: 5 of 2 experts"),
    "mini batch": ("expert", {"expert.mini_batch_size": 3}, "expert.mini_batch_size: 3 does not divide .* of 8 pairs"),
    "accumulation": (
        "trained",
        {"trained.gradient_accumulation_steps": 3},
        "trained.global_batch_size: 8 cannot be shared by 1 processes x 3 accumulation steps",
    ),
    "no pair is left": (
        "features",
        {"features.data": {"source": "rows", "num_samples": None, "skip": 40}},
        "features: skip: 40 leaves no pair of rows",
    ),
    "images": ("pre", {"pre.data": {"source": "rows"}}, "pre: 40 of 40 pairs of rows cannot be used; the first is"),
    "not a clip": (
        "scores",
        {"scores.models": {"trained": "bert"}},
        "scores: cannot load bert: expected a model of type",
    ),
}


@pytest.mark.parametrize(("stages", "overrides", "message"), FOUND.values(), ids=FOUND)
def test_what_only_a_stage_finds_a_rehearsal_says(path, finished, stages, overrides, message):
    """Of stages that read finished ones. Nothing is kept."""
    link(finished, path, {folder.name for folder in finished.iterdir()} - {*stages.split(",")})
    before = sorted(path.parent.rglob("*"))
    recipe = load_recipe(path, overrides)
    with pytest.raises((ValueError, OSError), match=f"^{message}.*a rehearsal: nothing was saved$"):
        rehearse(recipe, wanted_stages(recipe, stages.split(","), None))
    assert sorted(path.parent.rglob("*")) == before


@pytest.mark.slow
def test_a_recipe_without_a_fault_is_rehearsed_whole(path, capsys):
    recipe = load_recipe(path, {"pre.num_epochs": 3, "pre.max_steps": None, "pre.data.num_samples": 2000})
    stages = [stage for stage in recipe.stages if stage.name not in ("looked", "scores")]
    rows = {line.split()[0]: line.split() for line in rehearse(recipe, stages).splitlines() if line}
    assert rows["in"][:2] == ["in", "all"] and rows["in"][-1].count(":") == 2
    assert [*rows][1 : len(stages) + 1] == [stage.name for stage in stages]
    assert rows["pre"][-6] == "750"  # steps: three epochs of 2,000 pairs
    assert not (path.parent / "out").exists() and not (path.parent / ".out.rehearsal").exists()
    with locked(path.parent / ".out.rehearsal"), pytest.raises(ValueError, match="is in use"):
        rehearse(recipe, stages)


@pytest.mark.slow
def test_a_rehearsal_measures_what_a_run_takes(tmp_path):
    """Here only roughly: `lab.speed.runs rehearsal` has the numbers. Also with a batch of another size."""
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tiny_recipe() | {"output_dir": str(tmp_path / "out")}))
    recipe = load_recipe(tmp_path / "recipe.yaml")
    measured = measure_stages(recipe, recipe.stages)
    assert measured["tuned"].cost.steps == 6 and measured["sparse"].cost.step is None
    assert measured["tuned"].cost.seconds == 6 * measured["tuned"].cost.step
    folder = run_recipe(recipe) / "tuned"
    seconds = 8 / read_log(folder)[-1]["images_per_second"]
    assert 0.1 < measured["tuned"].cost.step / seconds < 10
    weights = (folder / "model.safetensors").stat().st_size
    assert 3 * weights < measured["tuned"].cost.disk < 6 * weights  # with a checkpoint: weights and two moments
    assert measured["tuned"].memory > 4 * weights
    shutil.rmtree(folder)
    small = measure_stages(recipe, recipe.stages, 4)["tuned"]
    assert (small.cost.steps, small.cost.seconds) == (6, None) and small.cost.step > 0


@pytest.mark.parametrize("batch_size", ["0", "-1", "true", "2.0"])
def test_a_rehearsed_batch_is_a_number_of_samples(path, batch_size):
    for command in (["run", "--config", str(path)], ["upcycle", "out/sparse", "--model", "x", "--preset", "clip_up"]):
        with pytest.raises(SystemExit, match="rehearse_batch: Input should be "):
            clip_moe.main([*command, "--rehearse_batch", batch_size])


def test_memory_of_a_stage_is_its_own(tmp_path):
    """Neither what was held before nor the images of the stage before count, which kept all of its own."""
    torch.ones(200_000_000).sum()  # 800 MB
    before = peak_memory(torch.device("cpu"))
    data = {"source": "symbols", "num_samples": 60_000}
    kept = {"name": "kept", "stage": "train", "model": "dense", "data": data | {"in_memory": True}, **STEP}
    stages = [DENSE, kept, kept | {"name": "read", "data": data}]
    recipe = Recipe(output_dir=str(tmp_path / "out"), stages=stages)
    measured = measure_stages(recipe, recipe.stages)
    images = 60_000 * 3 * 32 * 32
    assert measured["dense"].memory < before - 400e6
    assert measured["dense"].cost.seconds == measured["dense"].seconds  # of no data there are more
    assert measured["kept"].memory > measured["read"].memory + 0.9 * images


@pytest.mark.slow
def test_steps_of_pairs_that_other_stages_cut(tmp_path):
    """Stages of 600 pairs, of which the rehearsal has 256: 100 pairs left of them, all but 500, and those that a
    split leaves to train on."""
    SYMBOLS.load("train", "detailed", 600).save_to_disk(tmp_path / "data")
    data = {"model": "dense", "data": {"source": str(tmp_path / "data")}}
    captions = [{"policy": "full", "column": "caption"}]
    cuts = {"first": {"source": "made", "num_samples": 100}, "last": {"source": "made", "skip": 500}}
    stages = [DENSE, {"name": "made", "stage": "captions", **data, "captions": captions}]
    stages.append({"name": "pairs", "stage": "split", **data})
    for name, source in (cuts | {"tuned": {"source": "pairs"}}).items():
        stages.append({"name": name, "stage": "train", "model": "dense", "data": source, "num_epochs": 2, **STEPS})
    recipe = Recipe(output_dir=str(tmp_path / "out"), stages=stages)
    measured = measure_stages(recipe, recipe.stages)
    train = datasets.load_from_disk(str(run_recipe(recipe, ["dense", "pairs"]) / "pairs"))["train"]
    assert 450 < len(train) < 500
    assert [measured[name].cost.steps for name in (*cuts, "tuned")] == [24, 24, 2 * (len(train) // 8)]


def test_rows_and_time_grow_with_the_pairs_alone(tmp_path, finished, monkeypatch, capsys):
    """Features of 1,000 pairs are measured on 256. Clusters are fewer in a rehearsal, so their time is not known; from
    another recipe's clusters, experts read all of their pairs. The output has no parent folder."""
    monkeypatch.chdir(tmp_path)
    data = {"source": "symbols", "num_samples": 1000}
    features = {"name": "features", "stage": "embed", "model": str(finished / "dense"), "data": data}
    clusters = {"name": "clusters", "stage": "cluster", "features": "features", "num_image_clusters": 64}
    recipe = Recipe(output_dir="out", stages=[features, clusters])
    measured = measure_stages(recipe, recipe.stages)
    assert measured["features"].cost.disk > 1000 * 2 * 16 * 4 and measured["clusters"].cost.seconds is None
    assert capsys.readouterr().out.count("features: ") == 1  # its seconds, and nothing of a part of the pairs
    monkeypatch.setattr(rehearsal, "FEW", 8)
    read = {"model": finished / "pre", "clusters": finished / "clusters", "expert": 1, "data.source": "symbols"}
    settings = read | {"data.num_samples": 40, "num_epochs": 1, **STEPS}
    arguments = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    assert "alone" in run_stage("train_experts", ["alone", *arguments, "--rehearse"])
    assert "alone: begins" in capsys.readouterr().out


def test_a_stage_alone_may_be_called_like_what_it_reads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = str(ROOT / "training" / "symbol_clip")
    arguments = ["out/symbols", "--data.source", "symbols", "--data.num_samples", "40", "--model", model]
    recipe, _ = read_stage_command(stage_of_kind("split"), [*arguments, "--trackers", "tensorboard"])
    assert recipe.trackers == ["tensorboard"]
    require_sound(recipe, recipe.stages)
    run_stage("split", arguments)
    assert (tmp_path / "out" / "symbols" / "train").is_dir()
