"""A finished run on this machine, what may be changed of it, and the card that is made of it."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from documents import BASE
from huggingface_hub import ModelCard
from test_report import result
from tiny_clip import change_json, change_weights

from clip_moe.conversion.publishing.card import render
from clip_moe.conversion.publishing.lineage import Lineage
from clip_moe.engine.provenance import weights_fingerprint
from clip_moe.engine.recipe import load_recipe
from clip_moe.engine.runner import run_recipe
from modeling_clip_moe import CLIPMoEConfig

SCORE = 0.75
# What an analysis says of experts
SUMMARY = {
    "collapse": [{"title": "retrieval, my_*photos*: R@1 image→text", "routed": 0.75, "mean": 0.5, "error": 0.0625}],
    "entropy": {"mean": 1.5, "lowest": 1.25, "highest": 1.75},
    "most_entropy": 2.0,
    "agreement": {"mean": 0.5, "lowest": 0.25, "highest": 0.875},
}


def write_recipe(folder, stages):
    path = folder.with_suffix(".yaml")
    path.write_text(yaml.safe_dump({"output_dir": str(folder), "stages": stages}))
    return load_recipe(path)


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> Path:
    """A run in a folder that nobody else has to know, which goes on with a model of another one."""
    private = tmp_path_factory.mktemp("made") / "private place"
    private.mkdir()
    first = run_recipe(write_recipe(private / "first", [{"name": "mean", "stage": "average", "models": [str(BASE)]}]))
    upcycled = {"name": "sparse", "stage": "upcycle", "model": str(first / "mean"), "preset": "clip_moe"}
    return run_recipe(write_recipe(private / "second", [upcycled]))


@pytest.fixture
def run(made, tmp_path) -> Path:
    """A copy of it, for changes."""
    return Path(shutil.copytree(made, tmp_path / "private place" / "second"))


def weights_of(run):
    return weights_fingerprint(str(run / "sparse"))


def lineage_of(run):
    return Lineage.of(run / "sparse")


def change_record(run, **fields):
    """Sets whole fields of what is recorded of the model."""
    path = run / "sparse" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_stage(run, **changes):
    change_json(run / "sparse" / "manifest.json", stage=changes)


def change_recipe(run, change):
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    change(recipe["stages"])
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))


def change_model(run):
    change_weights(run / "sparse" / "model.safetensors", lambda weights: weights["visual_projection.weight"].add_(1))


def write_result(run, stage="evaluation", name="symbols_pairs--a.json", **changes):
    """A result of the run's model as it is now; a key that is None is left out."""
    pair_scores = {"metrics": {"group": SCORE, "text": 0.8}, "primary": {"group": "group score"}, "num_samples": 1200}
    pair_scores |= {"title": "attribute pairs", "protocol": "1,200 pairs", "source": str(run / "sparse")}
    pair_scores["weights"] = None if "weights" in changes else weights_of(run)
    content = result("a", "symbols_pairs") | pair_scores | changes
    (run / stage).mkdir(exist_ok=True)
    (run / stage / name).write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def write_analysis(run, summary=SUMMARY):
    analysis = {"source": str(run / "sparse"), "weights": weights_of(run), "summary": summary}
    (run / "experts").mkdir(exist_ok=True)
    (run / "experts" / "experts.json").write_text(json.dumps(analysis))


def card_of(lineage, **options):
    """The card as it is read."""
    card = render(CLIPMoEConfig(), lineage, "user/clip", **{"license": None, "base_model": None} | options)
    return ModelCard(str(card))
