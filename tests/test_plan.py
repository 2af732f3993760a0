"""What --plan says, against what runs write and the papers count."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file
from transformers import AutoModel, BertConfig, CLIPConfig

from training import engine, upcycle
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


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache of the Hub with the configurations of models, as huggingface_hub lays it out."""
    cache, commit = tmp_path_factory.mktemp("hub"), "0" * 40
    for name, config in HUB.items():
        folder = cache / f"models--{name.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text(commit)
        config.save_pretrained(folder / "snapshots" / commit)
    return cache


def printed(command, cache=None):
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    environment |= {"HF_HUB_CACHE": str(cache)} if cache else {}
    words = [sys.executable, *shlex.split(command.replace("\\\n", " "))[1:]]
    return subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("recipe", ["clip_moe_sharegpt4v", "mode_metaclip_400m"])
def test_the_page_shows_what_is_printed(cache, recipe):
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8").split("## What a run will take: --plan")[1]
    blocks = re.findall(r"```text\n\$ (python -m training\.upcycle (?:.*\\\n)*.*)\n((?:.*\n)*?)```\n", page)
    ((command, shown),) = [block for block in blocks if recipe in block[0]]
    assert printed(command, cache).stdout == shown


@pytest.fixture
def plan_of(tmp_path):
    """The rows of a recipe's plan by name, and its faults."""

    def plan_of(path, overrides, num_processes=1):
        recipe = load_recipe(path, {"output_dir": str(tmp_path / "out")} | overrides)
        rows, faults = plan(recipe, recipe.stages, num_processes)
        return {row.name: row for row in rows}, faults

    return plan_of


def upcycled(folder, **stages):
    stages = [{"name": name, "stage": "upcycle", "model": str(folder), **stage} for name, stage in stages.items()]
    return yaml.safe_dump({"output_dir": "out", "stages": stages})


def test_counts_of_the_papers(plan_of, tmp_path):
    """CLIP-FMoE, Table 5 and section 4; CLIP-MoE, section 5. In millions, of L/14 with 77 tokens."""
    HUB["openai/clip-vit-large-patch14"].save_pretrained(tmp_path / "l14")
    without_gate = {"num_experts": 5, "num_experts_per_tok": 3, "fusion_gate": False}
    stages = {
        "fused": {"preset": "clip_fmoe"},
        "no_gate": {"preset": "clip_fmoe", "changes": without_gate},
        "moe": {"preset": "clip_moe"},
    }
    (tmp_path / "recipe.yaml").write_text(upcycled(tmp_path / "l14", **stages))
    rows, _ = plan_of(tmp_path / "recipe.yaml", {})
    counts = {name: [row.numbers[key] / 1e6 for key in ("parameters", "activated")] for name, row in rows.items()}
    assert counts["fused"][0] == pytest.approx(693.830, abs=5e-4)
    assert counts["no_gate"][0] == pytest.approx(685.78, abs=0.01)
    assert counts["moe"] == pytest.approx([1202.1, 685.87], abs=0.01)
    # In the recipe, the table of positions is longer: 248 rows instead of 77
    rows, _ = plan_of(ROOT / "training/recipes/clip_fmoe_sharegpt4v.yaml", {"base.model": str(tmp_path / "l14")})
    assert rows["unified"].numbers["parameters"] == pytest.approx(693.830e6 + 171 * 768, abs=500)
    assert rows["expert_1"].numbers["trainable"] == pytest.approx(72.591e6, abs=500)
    assert rows["clip_fmoe"].numbers["trainable"] == pytest.approx(8.095e6, abs=500)


TRAINED = {
    "data": {"source": "glyphs", "num_samples": 50},
    "global_batch_size": 8,
    "num_epochs": 1,
    "learning_rate": 1e-3,
    "save_steps": 1,
    "save_total_limit": 2,
}
REAL = {
    "output_dir": "out",
    "defaults": {"train": TRAINED, "embed": {"data": TRAINED["data"]}, "hidden_states": {"data": TRAINED["data"]}},
    "stages": [
        {"name": "sparse", "stage": "upcycle", "model": str(ROOT / "training/glyph_clip"), "preset": "clip_up"},
        {"name": "kept", "stage": "hidden_states", "model": "sparse"},
        {"name": "features", "stage": "embed", "model": "sparse"},
        {"name": "clusters", "stage": "cluster", "features": "features", "num_image_clusters": 2},
        {"name": "tuned", "stage": "train", "model": "sparse", "trainable": r"\.mlp\."},
        {"name": "both", "stage": "assemble", "experts": ["sparse", "tuned"]},
    ],
}


def size(folder):
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def test_a_run_takes_what_the_plan_says(plan_of, tmp_path, monkeypatch):
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(REAL))
    rows, faults = plan_of(tmp_path / "recipe.yaml", {})
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
    output = run_recipe(load_recipe(tmp_path / "recipe.yaml", {"output_dir": str(tmp_path / "out")}))
    for name in ("sparse", "features", "tuned", "both"):
        assert size(output / name) == pytest.approx(rows[name].numbers["disk"], rel=0.02, abs=1000), name  # headers
    labels = load_file(output / "clusters" / "clusters.safetensors")["labels"]
    assert labels.nbytes == rows["clusters"].numbers["disk"]
    assert size(output / "kept") < 1.02 * rows["kept"].numbers["disk"]  # no text is longer than it may be
    tuned, model = rows["tuned"].numbers, AutoModel.from_pretrained(output / "tuned")
    of_experts = [parameter.numel() for name, parameter in model.named_parameters() if ".mlp." in name]
    assert (tuned["parameters"], tuned["trainable"]) == (model.num_parameters(), sum(of_experts))
    log = [json.loads(line) for line in (output / "tuned" / "log.jsonl").read_text().splitlines()]
    assert (tuned["steps"], tuned["samples"]) == (log[-1]["step"], 8 * log[-1]["step"]) == (6, 48)
    memory, checkpoints = max(taken)
    assert memory == pytest.approx(tuned["memory"], rel=1e-6)
    assert checkpoints == pytest.approx(tuned["disk at most"], rel=0.02)
    rows, faults = plan_of(tmp_path / "recipe.yaml", {"tuned.learning_rate": 1})
    states = {name: row.state for name, row in rows.items()}
    assert states.pop("tuned") == "made otherwise" and set(states.values()) == {"done"}
    assert len(faults) == 1 and "tuned was made with other settings (stage.learning_rate: 0.001 -> 1" in faults[0]


def test_what_is_begun_goes_on(plan_of, tmp_path, monkeypatch):
    tuned = {"name": "tuned", "stage": "train", "model": str(ROOT / "training/glyph_clip")}
    settings = {"output_dir": "out", "defaults": {"train": TRAINED}, "stages": [tuned]}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(settings))
    original = engine.save_checkpoint

    def stop(*arguments):
        if arguments[4] == 3:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(engine, "save_checkpoint", stop)
    with pytest.raises(KeyboardInterrupt):
        run_recipe(load_recipe(tmp_path / "recipe.yaml", {"output_dir": str(tmp_path / "out")}))
    rows, _ = plan_of(tmp_path / "recipe.yaml", {})
    assert rows["tuned"].state == "goes on from step 2"


def test_faults_come_after_the_plan(tmp_path, capsys):
    command = ["--plan", "--output-dir", str(tmp_path / "out"), "--clip_moe.global_batch_size", "100000"]
    with pytest.raises(SystemExit) as exit:
        upcycle.main([*command, "--evaluation.tasks", "[symbol_pairs]"])
    assert "clip_moe    train_router   to do  unified, symbols" in capsys.readouterr().out
    first, *faults = str(exit.value.code).splitlines()
    assert first.startswith("error: ") and first.endswith("demo.yaml has 2 faults:")
    assert [fault.split(":")[0] for fault in faults] == ["  clip_moe.global_batch_size", "  evaluation.tasks"]
    assert not (tmp_path / "out").exists()
