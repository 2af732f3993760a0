"""Wrong recipes: all that is wrong is said at once, before the first stage runs."""

import json
import time

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from data import sources
from training.checks import Outlook, RecipeError, find_faults
from training.plan import plan
from training.recipe import load_recipe
from training.runner import run_recipe

TOWER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
RECIPE = {
    "output_dir": "out",
    "defaults": {
        "train": {
            "data": {"source": "symbols", "num_samples": 40},
            "global_batch_size": 8,
            "max_steps": 2,
            "learning_rate": 1e-3,
        },
        "embed": {"data": {"source": "symbols", "num_samples": 40}},
    },
    "stages": [
        {
            "name": "dense",
            "stage": "initialize",
            "processor": "symbols",
            "projection_dim": 16,
            "text_config": {**TOWER, "max_position_embeddings": 16},
            "vision_config": {**TOWER, "image_size": 32, "patch_size": 16},
        },
        {
            "name": "several",
            "stage": "captions",
            "model": "dense",
            "captions": [{"policy": "full", "column": "caption"}],
        },
        {"name": "features", "stage": "embed", "model": "dense"},
        {"name": "clusters", "stage": "cluster", "features": "features", "num_image_clusters": 2},
        {"name": "expert", "stage": "train_experts", "expert": 1, "model": "dense", "clusters": "clusters"},
        {"name": "unified", "stage": "unify", "model": "dense", "experts": ["expert"]},
        {"name": "sparse", "stage": "upcycle", "model": "dense", "preset": "clip_up", "changes": {"num_experts": 4}},
        {"name": "tuned", "stage": "train", "model": "sparse"},
        {"name": "scores", "stage": "evaluate", "models": {"tuned": "tuned"}, "tasks": ["symbols_pairs"]},
        {"name": "looked", "stage": "analyze", "model": "tuned", "tasks": ["symbols_pairs"]},
    ],
}
RECIPE["stages"][1]["data"] = RECIPE["defaults"]["embed"]["data"]


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A recipe without a fault, in a working folder with data and folders of stages."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows").mkdir()
    rows = {"image": [b""] * 9, "text": ["a"] * 9, "number": [1] * 9}
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "rows" / "train.parquet")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "manifest.json").write_text(json.dumps({"stage": {"stage": "captions"}}))
    (tmp_path / "empty").mkdir()
    (tmp_path / "entries.json").write_text("[]")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    return tmp_path / "recipe.yaml"


def faults(path, overrides, only=None):
    """The lines of the error that name a fault each."""
    with pytest.raises(RecipeError) as error:
        run_recipe(load_recipe(path, overrides), only)
    first, *lines = str(error.value).splitlines()
    assert first.startswith(f"{path} has {f'{len(lines)} faults:' if lines else 'a fault: '}")
    lines = lines or [first.replace(f"{path} has a fault: ", "  ")]
    assert not (path.parent / "out").exists()  # nothing ran
    return lines


ROWS = {"tuned.data.source": "rows", "tuned.data.caption_column": "text"}


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        # Kinds of stages and keys
        ({"tuned.stage": "trian"}, "tuned.stage: there is no kind of stage 'trian': did you mean 'train'?"),
        ({"tuned.learning_rte": 1}, "tuned.learning_rte: there is no such key, * did you mean 'learning_rate'? *"),
        ({"tuned.data.num_sample": 1}, "tuned.data.num_sample: there is no such key, * did you mean 'num_samples'? *"),
        (
            {"several.captions": [{"polcy": "full", "policy": "full", "column": "caption"}]},
            "several.captions.0.polcy: there is no such key, * did you mean 'policy'? *",
        ),
        ({"defaults.trian.max_steps": 1}, "defaults.trian: no stage uses them: did you mean 'train'?"),
        (
            {"dense.text_config.hidden_siz": 1},
            "dense.text_config: * no field 'hidden_siz': did you mean 'hidden_size'?",
        ),
        # References
        ({"tuned.model": "sprase"}, "tuned.model: there is no stage or folder 'sprase': did you mean 'sparse'?"),
        ({"scores.models.tuned": "tunde"}, "scores.models.tuned: there is no stage *: did you mean 'tuned'?"),
        (
            {"expert.data.source": "severel"},
            "expert.data.source: there is no stage or folder *: did you mean 'several'?",
        ),
        ({"unified.experts": ["dense", "exprt"]}, "unified.experts.1: there is no stage *: did you mean 'expert'?"),
        ({"expert.clusters": "nowhere"}, "expert.clusters: there is no stage 'nowhere', and no such folder"),
        ({"sparse.model": "tuned"}, "sparse.model: tuned is a later stage: move it up"),
        ({"sparse.model": "sparse"}, "sparse.model: sparse is this stage itself"),
        ({"expert.clusters": "features"}, "expert.clusters: features is a stage of type embed, not cluster"),
        (
            {"expert.clusters": "./other"},
            "expert.clusters: ./other is the folder of a stage of type captions, not cluster",
        ),
        ({"dense.tokenizer": "several"}, "dense.tokenizer: several is a stage of type captions, not tokenizer"),
        ({"tuned.model": "./nowhere"}, "tuned.model: there is no stage './nowhere', and no such folder"),
        ({"tuned.model": "empty"}, "tuned.model: empty is the folder of neither a model nor a stage: *config.json*"),
        # Tasks, presets and what they change
        ({"scores.tasks": ["symbol_pairs"]}, "scores.tasks: unknown task symbol_pairs: did you mean 'symbols_pairs'?"),
        ({"looked.tasks": ["symbols_pairs"] * 2}, "looked.tasks: the task symbols_pairs occurs twice"),
        ({"sparse.preset": "clip_upp"}, "sparse.preset: Input should be *: did you mean 'clip_up'? (got 'clip_upp')"),
        ({"sparse.changes.num_expert": 2}, "sparse.changes: * no num_expert (did you mean 'num_experts'?)"),
        ({"sparse.changes.num_experts_per_tok": 5}, "sparse.changes: *num_experts_per_tok*5*"),
        ({"unified.changes.num_experts_per_tok": 3}, "unified.changes: *num_experts_per_tok*3*"),
        ({"sparse.text_config.capacity_factor": -1}, "sparse.text_config: *capacity_factor*-1*"),
        ({"dense.text_config.num_hidden_layers": 1}, "sparse.*: the text tower has 1 layers, too few *"),
        ({"sparse.model": "unified"}, "sparse.model: unified is sparse already, and a dense CLIP is needed"),
        ({"looked.model": "dense"}, "looked.model: a dense CLIP has no experts to analyze"),
        ({"looked.expert": 4}, "looked.expert: 4, but the experts are 0 to 3"),
        ({"looked.layers": {"text": 0}}, "looked.layers.text: 0, but the sparse layers are 1"),
        ({"looked.capacity_factors": [0]}, "looked.capacity_factors.*greater than 0"),
        ({"looked.num_experts_per_tok": [1, 5]}, "looked.num_experts_per_tok: 5 of 4 experts"),
        ({"looked.tasks": ["symbols_linear_probe"]}, "looked.tasks: no text of a linear probe reaches the sparse *"),
        ({"tuned.balance_top_k": 5}, "tuned.balance_top_k: *5 of 4 experts"),
        ({"tuned.trainable": "nothing"}, "tuned.trainable: * 'nothing' is found in no parameter's name*"),
        # Data
        ({"tuned.data.source": "rows/*.tar"}, "tuned.data.source: there is no file or folder rows/*.tar"),
        ({"tuned.data.source": "no.json"}, "tuned.data.source: there is no file or folder no.json"),
        ({**ROWS, "tuned.data.split": "tets"}, "tuned.data: rows has no split 'tets', only train*"),
        (
            {"tuned.data.source": "entries.json", "tuned.data.split": "test"},
            "tuned.data.split: * has no split 'test', *",
        ),
        (
            {"tuned.data.source": "rows"},
            "tuned.data: rows has no column 'caption'; its columns are 'image', 'text', 'number'.*",
        ),
        (
            {**ROWS, "tuned.data.image_column": "img"},
            "tuned.data: rows has no column 'img'; its columns are 'image', *",
        ),
        ({**ROWS, "tuned.data.image_root": "nowhere"}, "tuned.data.image_root: there is no folder nowhere"),
        (
            {"several.data.source": "rows", "several.captions": [{"policy": "full", "column": "number"}]},
            "several.data: column number of rows holds *int64*, not text",
        ),
        (
            {"several.captions": [{"policy": "full", "column": "alt"}]},
            "several.captions: symbols has no column 'alt'; its columns are 'caption', 'raw_caption'",
        ),
        (
            {"tuned.data.source": "several", "tuned.data.caption_column": "text"},
            "tuned.data.caption_column: several makes the column caption, not text",
        ),
        # Batches
        ({"expert.mini_batch_size": 3}, "expert.mini_batch_size: 3 does not divide a process's batch of 8 pairs"),
        ({"tuned.gradient_accumulation_steps": 3}, "tuned.global_batch_size: 8 cannot be shared by 1 processes x 3 *"),
        ({**ROWS, "tuned.global_batch_size": 16}, "tuned.global_batch_size: a dataset of 9 samples does not fill *16"),
    ],
)
def test_a_fault_is_named_with_its_setting(path, overrides, fault):
    (line,) = faults(path, overrides)
    parts = iter(fault.split("*"))
    at = len("  ")
    for number, part in enumerate(parts):
        found = line.find(part, at)
        assert found >= 0 and (number or found == at), f"{line!r} is not {fault!r}"
        at = found + len(part)


def test_all_faults_are_named_at_once(path):
    overrides = {
        "looked.task": ["symbols_pairs"],
        "tuned.model": "sprase",
        "expert.data.source": "missing.parquet",
        "sparse.changes.num_experts_per_tok": 9,
        "scores.tasks": ["symbols_pears"],
    }
    settings = [line.split(":")[0].strip() for line in faults(path, overrides)]
    assert settings == ["looked.task", "tuned.model", "expert.data.source", "sparse.changes", "scores.tasks"]
    del overrides["looked.task"]  # of which the others do not depend
    assert len(faults(path, overrides)) == 4


def test_the_same_fault_of_several_stages_is_one(path):
    changed = {"defaults.train.data.source": "missing.tar"}
    assert faults(path, changed) == ["  expert.data.source, tuned.data.source: there is no file or folder missing.tar"]


def test_what_only_the_hub_knows_passes(path):
    recipe = load_recipe(
        path, {"dense.processor": "symbols", "sparse.model": "gpt2", "tuned.data.source": "user/pairs"}
    )
    outlook = Outlook(recipe.stages, recipe.output_dir)
    assert list(find_faults(outlook, set(outlook.stages))) == []


def test_a_stage_that_is_neither_done_nor_to_be_run_is_missed(path):
    (line,) = faults(path, {}, only=["sparse"])
    assert line.startswith("  sparse.model: the stage 'dense' has not finished") and line.endswith("Run it first")


def test_finished_stages_need_no_data(path):
    changes = {"several.data.source": "rows", "several.data.caption_column": "text"}
    recipe = load_recipe(path, changes | {"several.captions": [{"policy": "full", "column": "text"}]})
    run_recipe(recipe, ["dense", "several"])
    (path.parent / "rows" / "train.parquet").unlink()
    outlook = Outlook(recipe.stages, recipe.output_dir)
    assert list(find_faults(outlook, {"dense", "several"})) == []


def test_processes_share_a_batch(path):
    recipe = load_recipe(path)
    by_four, by_three = (Outlook(recipe.stages, recipe.output_dir, number) for number in (4, 3))
    assert list(find_faults(by_four, set(by_four.stages))) == []
    shared = list(find_faults(by_three, set(by_three.stages)))
    assert shared[-1] == "tuned.global_batch_size: 8 cannot be shared by 3 processes x 1 accumulation steps"


def test_an_optimizer_has_to_be_installed(path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (line,) = faults(path, {"tuned.optimizer": "adamw_8bit"})
    assert line.endswith("tuned.optimizer: adamw_8bit is torchao's: pip install torchao, or take adamw")


def test_forty_stages_are_checked_at_once(path):
    settings = RECIPE | {"stages": [dict(stage) for stage in RECIPE["stages"]]}
    train = settings["stages"][7]
    settings["stages"] += [{**train, "name": f"tuned_{number}", "model": "tuned"} for number in range(30)]
    path.write_text(yaml.safe_dump(settings))
    recipe = load_recipe(path)
    list(find_faults(Outlook(recipe.stages, recipe.output_dir), set()))
    started = time.process_time()
    list(find_faults(Outlook(recipe.stages, recipe.output_dir), set()))
    assert time.process_time() - started < 1


def test_a_folder_is_opened_once_for_all_checks(path, monkeypatch):
    data = {"source": "rows", "caption_column": "text", "num_samples": None}
    tasks = [{"task": "retrieval", "dataset": "rows", "split": "train", "caption_column": "text"}]
    overrides = {f"{name}.data": data for name in ("several", "features", "expert", "tuned")} | {"scores.tasks": tasks}
    overrides |= {"several.captions": [{"policy": "full", "column": "text"}]}
    recipe, listed = load_recipe(path, overrides), []
    original = sources.get_data_patterns
    monkeypatch.setattr(sources, "get_data_patterns", lambda folder: listed.append(folder) or original(folder))
    assert plan(recipe, recipe.stages, 1)[1] == [] and len(listed) == 1
    # Later, the folder may hold other files
    (path.parent / "rows" / "train.parquet").unlink()
    assert len(plan(recipe, recipe.stages, 1)[1]) == 5


def test_names_that_settings_know(tmp_path):
    """A stage may have the name of an encoder that is built in, or be called as the model that it reads."""
    captions = {"stage": "embed_captions", "data": {"source": "symbols", "num_samples": 20}, "dim": 4}
    stages = [
        {"name": "tfidf", "encoder": "tfidf", **captions},
        {"name": "again", "encoder": "tfidf", **captions},
        {"name": "centers", "stage": "cluster_fine", "captions": "tfidf", "num_centers": 2},
    ]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"output_dir": str(tmp_path / "out"), "stages": stages}))
    run_recipe(load_recipe(recipe))
    of_hub = {"name": "bert_base_uncased", "encoder": "bert-base-uncased", **captions}
    recipe.write_text(yaml.safe_dump({"output_dir": str(tmp_path / "out"), "stages": [*stages, of_hub]}))
    assert load_recipe(recipe).stages[-1].encoder == "bert-base-uncased"


def test_a_slip_in_the_name_of_a_folder_is_no_name_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my" / "images").mkdir(parents=True)
    stages = [{"name": "a", "stage": "tokenizer", "vocab_size": 600, "data": {"source": "my/imagess"}}]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"output_dir": "out", "stages": stages}))
    with pytest.raises(RecipeError, match="a.data.source: there is no file or folder my/imagess: did you mean my/im"):
        run_recipe(load_recipe(tmp_path / "recipe.yaml"))


def test_a_slip_in_the_name_of_a_run_is_no_model_on_the_hub(tmp_path, monkeypatch):
    """Copies of the Hub's models have names like those of other models there."""
    monkeypatch.chdir(tmp_path)
    stages = [{"name": "a", "stage": "long_context", "model": "runs/sparsee", "length": 32}]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"output_dir": "out", "stages": stages}))
    (tmp_path / "runs" / "sparse").mkdir(parents=True)
    loaded = load_recipe(tmp_path / "recipe.yaml")
    assert not list(find_faults(Outlook(loaded.stages, "out"), {"a"}))
    (tmp_path / "runs" / "sparse" / "manifest.json").write_text("{}")
    with pytest.raises(RecipeError, match="a.model: there is no stage or folder 'runs/sparsee': did you mean 'runs/sp"):
        run_recipe(loaded)
