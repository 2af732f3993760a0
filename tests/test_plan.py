"""What --plan says, against what runs write and the papers count."""

import contextlib
import re
import shlex
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file
from tiny_families import saved, tiny_dense
from tiny_runs import read_log
from tiny_runs import train as run_until
from tiny_sources import images_and_texts, write_shard
from transformers import AutoModel, BertConfig, CLIPConfig

import clip_moe
from modeling_clip_moe.families import FAMILY_OF_TYPE
from training import engine
from training.commands import train
from training.estimates import AtMost
from training.plan import plan
from training.recipe import load_recipe
from training.runner import run_recipe

ROOT = Path(__file__).parents[1]


def tower(width, layers, embedding, **more):
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
    return {**sizes, "num_attention_heads": width // 64, "projection_dim": embedding, **more}


def clip(text, vision, layers, embedding, patch_size):
    vision = tower(vision, layers, embedding, patch_size=patch_size)
    return CLIPConfig(text_config=tower(text, 12, embedding), vision_config=vision, projection_dim=embedding)


HUB = {
    "openai/clip-vit-large-patch14": clip(768, 1024, 24, 768, 14),
    "facebook/metaclip-b32-400m": clip(512, 768, 12, 512, 32),
    "princeton-nlp/sup-simcse-bert-base-uncased": BertConfig(),
}


def test_the_page_shows_what_is_printed(tmp_path, monkeypatch, capsys):
    for name, config in HUB.items():  # in a cache as huggingface_hub lays it out
        folder = tmp_path / f"models--{name.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text("0" * 40)
        config.save_pretrained(folder / "snapshots" / ("0" * 40))
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8").split("## What a run will take: --plan")[1]
    blocks = re.findall(r"```text\n\$ (clip-moe train (?:.*\\\n)*.*)\n((?:.*\n)*?)```\n", page)
    ((command, shown),) = blocks
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(ROOT)
    with contextlib.suppress(SystemExit):
        clip_moe.main(shlex.split(command.replace("\\\n", " "))[1:])
    assert shown and capsys.readouterr().out.startswith(shown)  # what columns are comes below


@pytest.fixture
def plan_of(tmp_path):
    """The rows of the plan of `recipe.yaml` by name, and its faults."""

    def plan_of(overrides=None):
        recipe = load_recipe(tmp_path / "recipe.yaml", {"output_dir": str(tmp_path / "out")} | (overrides or {}))
        rows, faults = plan(recipe, recipe.stages, 1)
        return {row.name: row for row in rows}, faults

    return plan_of


DATA = {"data": {"source": "symbols", "num_samples": 50}}
SAVED = {"save_steps": 1, "save_total_limit": 2}
TRAINED = {"global_batch_size": 8, "num_epochs": 1, "learning_rate": 1e-3, **DATA, **SAVED}
REAL = {
    "output_dir": "out",
    "defaults": {"train": TRAINED, "embed": DATA},
    "stages": [
        {"name": "sparse", "stage": "upcycle", "model": str(ROOT / "training/symbol_clip"), "preset": "clip_up"},
        {"name": "features", "stage": "embed", "model": "sparse"},
        {"name": "clusters", "stage": "cluster", "features": "features", "num_image_clusters": 2},
        {"name": "tuned", "stage": "train", "model": "sparse", "trainable": r"\.mlp\."},
        {"name": "expert", "stage": "train_experts", "expert": 1, "model": "tuned", "clusters": "clusters"},
        {"name": "both", "stage": "assemble", "experts": ["sparse", "tuned"]},
    ],
}


def size(folder):
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def test_a_run_takes_what_the_plan_says(plan_of, tmp_path, monkeypatch):
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(REAL))
    rows, faults = plan_of()
    whole, half = (plan_of({"tuned.patch_dropout": share})[0]["tuned"].numbers for share in (None, 0.5))
    assert 0.3 < half["memory a pair"] / whole["memory a pair"] < 0.8
    assert not faults and not (tmp_path / "out").exists()
    assert {row.state for row in rows.values()} == {"to do"}
    original, taken = engine.save_checkpoint, []

    def save(accelerator, model, optimizer, checkpoints, step, limit, average):
        """Looks at what is in memory, and on the disk with one checkpoint more than there may be."""
        parameters = list(model.parameters())
        moments = [tensor for state in optimizer.state.values() for tensor in state.values() if tensor.dim()]
        held = [*parameters, *moments, *(one for one in parameters if one.requires_grad)]  # those have a gradient
        path = original(accelerator, model, optimizer, checkpoints, step, limit + 1)
        taken.append((sum(tensor.nbytes for tensor in held), size(checkpoints)))
        return path

    monkeypatch.setattr(engine, "save_checkpoint", save)
    recipe = load_recipe(tmp_path / "recipe.yaml", {"output_dir": str(tmp_path / "out")})
    output = run_recipe(recipe, [name for name in rows if name != "expert"])
    memory, checkpoints = max(taken)
    # The labels of its clusters are there now
    expert = plan_of()[0]["expert"].numbers["steps"]
    assert isinstance(rows["expert"].numbers["steps"], AtMost) and not isinstance(expert, AtMost)
    run_recipe(recipe)
    assert expert == read_log(output / "expert")[-1]["step"] <= rows["expert"].numbers["steps"] == 6
    for name in ("sparse", "features", "tuned", "both"):
        assert size(output / name) == pytest.approx(rows[name].numbers["disk"], rel=0.02, abs=1000), name  # headers
    labels = load_file(output / "clusters" / "clusters.safetensors")["labels"]
    assert labels.nbytes == rows["clusters"].numbers["disk"]
    tuned, model = rows["tuned"].numbers, AutoModel.from_pretrained(output / "tuned")
    of_experts = [parameter.numel() for name, parameter in model.named_parameters() if ".mlp." in name]
    assert (tuned["parameters"], tuned["trainable"]) == (model.num_parameters(), sum(of_experts))
    assert (tuned["steps"], tuned["samples"]) == (6, 48) and read_log(output / "tuned")[-1]["step"] == 6
    assert memory < tuned["memory"] - 8 * tuned["memory a pair"]
    assert checkpoints == pytest.approx(tuned["disk at most"], rel=0.02)
    rows, faults = plan_of({"tuned.learning_rate": 1})
    states = {name: row.state for name, row in rows.items()}
    assert states.pop("tuned") == "made otherwise" and set(states.values()) == {"done"}
    assert len(faults) == 1 and "tuned was made with other settings (stage.learning_rate: 0.001 -> 1" in faults[0]


@pytest.mark.parametrize(
    ("data", "samples"),
    [
        ({"source": "pairs.csv", "caption_column": "text"}, AtMost(3)),
        ({"source": "*.tsv", "caption_column": "text", "skip": 1}, AtMost(2)),
        ({"source": "shards", "image_column": "png", "caption_column": "txt", "num_samples": 9}, AtMost(9)),
        ({"source": "shards", "image_column": "png", "caption_column": "txt"}, "only loading shards tells *"),
        ({"source": "someone/elsewhere", "num_samples": 7}, AtMost(7)),
        ({"source": "damaged.csv"}, "*damaged.csv: line *"),
    ],
    ids=str,
)
def test_pairs_of_data(plan_of, tmp_path, monkeypatch, data, samples):
    monkeypatch.chdir(tmp_path)
    rows = ["image,text", "dot.png,one", 'dot.png,"a caption of\ntwo lines"', "", "dot.png,three"]
    (tmp_path / "pairs.csv").write_text("\n".join(rows))
    (tmp_path / "pairs.tsv").write_text("image\ttext\n" + "dot.png\tone\n" * 3)
    (tmp_path / "damaged.csv").write_text("image,caption\na.png,one\nb.png,two,three\n" + 'c.png,"four\n')
    (tmp_path / "shards").mkdir()
    write_shard(tmp_path / "shards" / "train-0.tar", images_and_texts(range(5)))
    stage = {"name": "features", "stage": "embed", "model": str(ROOT / "training/symbol_clip"), "data": data}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"output_dir": "out", "stages": [stage]}))
    rows, faults = plan_of()
    assert len(faults) == ("damaged" in str(data)) and all("damaged.csv: line " in fault for fault in faults)
    found = rows["features"].numbers["samples"]
    assert type(found) is type(samples) and (found == samples or fnmatch(str(found), str(samples)))


def test_what_is_begun_goes_on(plan_of, tmp_path):
    run_until(tmp_path, stop=3)
    assert plan_of()[0]["tuned"].state == "goes on from step 2"


def test_faults_come_after_the_plan(tmp_path, capsys):
    command = ["--plan", "--output-dir", str(tmp_path / "out"), "--clip_up_8.global_batch_size", "100000"]
    with pytest.raises(SystemExit) as exit:
        train.main([*command, "--evaluation.tasks", "[symbol_pairs]"])
    assert re.search(r"clip_up_8 +train +to do +upcycled_8, names", capsys.readouterr().out)
    first, *faults = str(exit.value.code).splitlines()
    assert first.startswith("error: ") and first.endswith("demo.yaml has 2 faults:")
    assert [fault.split(":")[0] for fault in faults] == ["  clip_up_8.global_batch_size", "  evaluation.tasks"]
    assert not (tmp_path / "out").exists()


def test_patch_dropout_of_images_of_any_shape_is_a_fault(plan_of, tmp_path):
    family = FAMILY_OF_TYPE["siglip2"]
    tuned = {"name": "tuned", "stage": "train", "patch_dropout": 0.5, **TRAINED}
    tuned["model"] = str(saved(family, tiny_dense(family, 20), tmp_path / "dense", 20))
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"output_dir": "out", "stages": [tuned]}))
    _, (fault,) = plan_of()
    assert fault.startswith("tuned.patch_dropout: it goes with images of one size")
