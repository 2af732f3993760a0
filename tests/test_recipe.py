"""Recipes: what is read, what is overridden, what is refused."""

import re

import pytest
import yaml
from documents import ROOT
from programs import run_program

from clip_moe.data.arguments import Augmentation, CaptionPolicy, DataArguments
from clip_moe.engine.kinds import KINDS, stage_of_kind
from clip_moe.engine.plan import wanted_stages
from clip_moe.engine.recipe import Recipe, RecipeError, load_recipe, validated
from clip_moe.engine.settings import dump
from clip_moe.evaluation.own_task import OwnTask
from clip_moe.training.train_settings import Evaluation, LoraSettings

RECIPES = sorted(ROOT.glob("training/recipes/*.yaml")) + sorted(ROOT.glob("lab/recipes/*.yaml"))

RECIPE = """
output_dir: out
defaults:
  train: {learning_rate: 1e-3, global_batch_size: 8, max_steps: 10, data: {source: symbols, num_samples: 64}}
stages:
  - {name: sparse, stage: upcycle, model: dense, preset: clip_up}
  - {name: tuned, stage: train, model: sparse, max_steps: 20, data: {captions: web}}
"""


def changed(old, new):
    assert old in RECIPE
    return RECIPE.replace(old, new)


@pytest.fixture
def recipe(tmp_path):
    def write(text=RECIPE):
        path = tmp_path / "recipe.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_recipes_of_the_project_load(path):
    for name, package in (("icons", "resvg_py"), ("clip_up_worlds", "rdkit")):
        if name in path.name:
            pytest.importorskip(package, reason=f"{package} is not installed")
    recipe = load_recipe(path)
    assert len({stage.name for stage in recipe.stages}) == len(recipe.stages)


def test_defaults_are_merged_under_the_stage_and_overridden(recipe):
    loaded = load_recipe(recipe())
    tuned = loaded.stages[1]
    assert tuned.learning_rate == 1e-3  # from the defaults; YAML 1.1 reads "1e-3" as a string
    assert tuned.max_steps == 20  # the stage's own
    assert (tuned.data.num_samples, tuned.data.captions) == (64, "web")  # merged key by key
    assert load_recipe(recipe(yaml.safe_dump(dump(loaded)))) == loaded  # resolved, it is a recipe
    overrides = {"seed": 3, "tuned.max_steps": 5, "tuned.data.num_samples": 7, "defaults.train.learning_rate": 0.5}
    loaded = load_recipe(recipe(), overrides)
    tuned = loaded.stages[1]
    assert (loaded.seed, tuned.max_steps, tuned.data.num_samples, tuned.learning_rate) == (3, 5, 7, 0.5)


def test_keys_with_hyphens_are_those_with_underscores(recipe):
    """At every depth, but for names of one's own within a setting."""
    text = "stages:\n  - {name: scores-1, stage: evaluate, tasks: [symbols_pairs], models: {my-model: a}}\n"
    path = recipe(changed("stages:\n", text))
    given = {"tuned.max-steps": 5, "tuned.data.num-samples": 7, "defaults.train.learning-rate": 0.5}
    loaded = load_recipe(path, given | {"scores_1.batch-size": 3, "scores-1.models.my-model": "b"})
    assert (loaded.stages[-1].max_steps, loaded.stages[-1].data.num_samples) == (5, 7)
    sparse = {"sparse.changes.num-experts": 4, "sparse.text-config.norm-topk-prob": True}
    assert load_recipe(path, sparse).stages[-2].changes == {"num_experts": 4}
    assert loaded.stages[0].batch_size == 3 and loaded.stages[0].models == {"my-model": "b"}
    with pytest.raises(ValueError, match="--sparse.changes: given both whole and in parts"):
        load_recipe(path, {"sparse.changes.num_experts": 4, "sparse.changes": {}})
    with pytest.raises(ValueError, match="--tuned.max_steps is given twice, once with - and once with _"):
        load_recipe(path, {"tuned.max-steps": 5, "tuned.max_steps": 6})


def test_defaults_of_train_hold_for_all_that_trains(recipe):
    """The more special ones win, the stage's own most of all; neither trains what the other does."""
    more = """
  - {name: labels, stage: cluster, features: elsewhere, num_image_clusters: 2}
  - {name: first, stage: train_experts, expert: 1, model: dense, clusters: labels}
  - {name: routed, stage: train_router, model: sparse, max_steps: 30}
"""
    text = changed("defaults:\n", "defaults:\n  train_router: {weight_decay: 0.5, max_steps: 40}\n")
    *_, first, routed = load_recipe(recipe(text + more.lstrip("\n"))).stages
    assert (first.learning_rate, first.weight_decay, first.max_steps) == (1e-3, 0.0, 10)
    assert (routed.learning_rate, routed.weight_decay, routed.max_steps) == (1e-3, 0.5, 30)
    assert (first.trainable, routed.trainable) == (r"\.layers\.\d+\.mlp\.", r"\.mlp\.router\.")
    assert (routed.balance_top_k, routed.balance_mean) == (1, "layer")


CLASSES = [
    *map(stage_of_kind, KINDS),
    DataArguments,
    Augmentation,
    CaptionPolicy,
    OwnTask,
    Evaluation,
    LoraSettings,
    Recipe,
]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_what_a_setting_cannot_be_is_refused_by_its_name(kind):
    for name in {*kind.__pydantic_fields__} - {"stages"}:  # which are read by their own classes
        with pytest.raises(RecipeError, match=rf"\b{name}\b"):
            validated(kind, {name: [{"x": [None]}]}, "x")
    with pytest.raises(RecipeError, match="nonsense: unknown key: (did you mean|known are)"):
        validated(kind, {"nonsense": 1}, "x")


def test_kinds_and_their_help_import_nothing_heavy(tmp_path):
    code = "import sys, clip_moe\ntry:\n    clip_moe.main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
    code += "print({'torch', 'transformers', 'datasets', 'numpy', 'PIL'} & {*sys.modules})"
    for arguments in (["--help"], ["train", "--help"], ["run", "--help"], ["train", "out", "--max_stepz", "1"]):
        assert run_program(tmp_path, "-c", code, *arguments).endswith("set()\n"), arguments


def test_help_ends_quietly_where_nobody_reads_on(tmp_path):
    code = (
        "import subprocess as s, sys; p = s.Popen([sys.executable, '-m', 'clip_moe', '--help'], stdout=-1, stderr=-1)"
    )
    assert run_program(tmp_path, "-c", f"{code}; p.stdout.close(); print(p.stderr.read(), p.wait())") == "b'' 0\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (changed("name: tuned", "name: sparse"), "'sparse' is used twice"),
        (changed("max_steps: 20", "max_steps: 20, num_epochs: 2"), "exactly one of max_steps"),
        (changed("max_steps: 20", "max_steps: null"), "exactly one of max_steps"),
        (RECIPE[: RECIPE.index("stages:")] + "stages: []", "stages: List should have at least 1 item"),
        (changed("  train: ", "  train: 5 #"), "defaults.train: Input should be a valid dictionary"),
        (changed("output_dir: out", "output_dir: ''"), "output_dir"),
        (changed("output_dir: out", "output_dir: out\noutput_dir: other"), "line 2: duplicate key output_dir"),
        (changed("output_dir: out", "output_dir: ~/runs"), "output_dir: ~/runs: only a shell expands ~"),
        (changed("model: dense, ", ""), "has a fault: sparse.model: is required: set it, as by --sparse.model$"),
        (changed("max_steps: 20", "max_steps: yes"), "tuned.max_steps: takes a number, but YAML reads yes, .* as True"),
        (changed("max_steps: 20", "max_steps: 020"), "YAML reads 020 as a different number"),
        (f"inputs: {{seed: 2}}\n{RECIPE}", "the input seed has the name of a recipe key or a stage"),
        ("", "recipe: Input should be a valid dictionary"),
        ("[", "not valid YAML"),
        (f"x: !!python/object/apply:os.system [ls]\n{RECIPE}", "not valid YAML: could not determine a constructor"),
        (f"{RECIPE}---\n{RECIPE}", "not valid YAML: expected a single document"),
        (f"5: x\n{RECIPE}", "the key 5 is not text: quote it"),
        (f"# é\n{RECIPE}".encode("utf-16"), "recipe.yaml is not UTF-8 text"),
        (f"# é\n{RECIPE}".encode("latin-1"), "recipe.yaml is not UTF-8 text"),
    ],
)
def test_mistakes_are_named(recipe, text, message):
    with pytest.raises(ValueError, match=message):
        load_recipe(recipe(text))


def test_names_of_stages(recipe):
    for name in ["CLIP-UP 1", "étape", "x" * 200]:
        assert load_recipe(recipe(), {"tuned.name": name}).stages[1].name == name
    for name in [*". ../out a/b / a\\b .git -a recipe.yaml tuned.partial seed defaults logs".split(), "", " a", "a\nb"]:
        with pytest.raises(ValueError, match="cannot name a stage|name: String should match pattern"):
            load_recipe(recipe(), {"tuned.name": name})


def test_overrides_that_break_a_recipe_are_refused(recipe):
    missing = {key: f"--{key}: {key.split('.')[0]!r} is not an option" for key in ("", ".", "tuned", "nope.x")}
    missing |= {key: f"{key}: unknown key" for key in ("tuned.", "tuned.learning_rte")}
    missing |= {"tuned..x": "tuned.: unknown key", "tuned.max_steps.x": "--tuned.max_steps.x: 'max_steps' has"}
    missing |= {"stages.x": "--stages.x: 'stages' is a list", "seed.x": "seed: Input should be a valid integer (got {"}
    invalid = {key: f"{key}: Input should be a valid dictionary (got 5)" for key in ("defaults", "defaults.train")}
    invalid |= {"stages": "stages.0: Input should be a valid dictionary (got 5)"}
    invalid |= {f"tuned.{key}": f"stages.1.{key}: Input should be a valid string (got " for key in ("name", "stage")}
    for key, message in (missing | invalid).items():
        with pytest.raises(ValueError, match=re.escape(message)):
            load_recipe(recipe(), {key: 1 if key in missing else [5] if key == "stages" else 5, "output_dir": "x"})
    with pytest.raises(ValueError, match="--stages: 'stages' is not an option"):
        load_recipe(recipe(), {"stages": "tuned", "output_dir": "x"})


def test_an_alias_is_overridden_in_one_place_alone_and_no_means_no():
    recipe = load_recipe(RECIPES[0].parent / "mode_symbols.yaml", {"defaults.train.data.num_samples": 1000})
    sizes = {stage.name: stage.data.num_samples for stage in recipe.stages if getattr(stage, "data", None)}
    assert sizes["dense"] == sizes["expert_1"] == 1000 and sizes["captions"] == 48000
    recipe = load_recipe(RECIPES[0].parent / "mode_metaclip_400m.yaml", {"mixed_precision": False})
    assert recipe.mixed_precision == "no"


def test_worlds_take_the_seed_of_the_recipe(recipe):
    """For what is trained on, and for what is measured."""
    scores = "  - {name: scores, stage: evaluate, models: {tuned: tuned}, tasks: [symbols_retrieval]}\n"
    path = recipe(changed("output_dir: out", "output_dir: out\nseed: 3") + scores)
    given = {"tuned.data.seed": (1, 3), "scores.test_seed": (3, 1), "seed": (1, 1)}
    for overrides, seeds in [({}, (3, 3)), *(({setting: 1}, seeds) for setting, seeds in given.items())]:
        _, tuned, scores = load_recipe(path, overrides).stages
        assert (tuned.data.seed, scores.test_seed) == seeds


def test_only_stages_that_train_an_expert_have_its_number():
    recipe = load_recipe("training/recipes/clip_moe_demo.yaml", {"experts.batch_size": 1})
    chosen = [stage.name for stage in wanted_stages(recipe, None, [1])]
    assert "expert_1" in chosen and not {"expert_2", "experts"} & set(chosen)


def test_a_recipe_that_moved_is_named(monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(FileNotFoundError, match="^no recipe at .*; see lab/recipes/names_kept.yaml$"):
        load_recipe("training/recipes/names_kept.yaml")
