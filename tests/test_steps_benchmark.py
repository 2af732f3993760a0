import subprocess
import sys

import pytest
from tiny_clip_moe import tower_fields
from transformers import CLIPConfig

from benchmarks import steps

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", steps.RECIPES)
def test_a_step_of_each_row(name, monkeypatch):
    text = {**tower_fields(), "vocab_size": 50, "bos_token_id": 48, "eos_token_id": 49}
    vision = {**tower_fields(), "image_size": 32, "patch_size": 8}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    monkeypatch.setattr(steps, "paper_config", lambda size: config)
    found = steps.recipe_step(name, "tiny", 4, mini_batch_size=2 if "texts" in name else None, profiled=True)()
    assert 0 < found["trainable"] <= found["parameters"] and "Self CPU" in found["kernels"]


def test_towers_over_the_dense_one(monkeypatch):
    tower = {**tower_fields(), "projection_dim": 8}
    config = CLIPConfig(text_config=tower, vision_config={**tower, "image_size": 32, "patch_size": 8})
    monkeypatch.setattr(steps, "paper_config", lambda size: config)
    printed = steps.towers(images=2, rounds=1, device="cpu")
    assert [line.split()[1] for line in printed.splitlines()[-3:]] == ["clip_up", "clip_moe", "clip_fmoe"]


def test_images_per_second(monkeypatch):
    tower = {**tower_fields(), "projection_dim": 8}
    config = CLIPConfig(text_config=tower, vision_config={**tower, "image_size": 32, "patch_size": 8})
    monkeypatch.setattr(steps, "paper_config", lambda size: config)
    monkeypatch.setattr("training.engine.compile_layers", lambda tower: None)  # which takes a minute
    printed = steps.inference(images=[1, 3], presets=["clip_up"], dtype="float32", rounds=1, device="cpu")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if line.startswith("| ")]
    assert rows[0] == ["images", "tower", "eager", "compiled"]
    assert [row[:2] for row in rows[1:]] == [["1", "dense"], ["1", "clip_up"], ["3", "dense"], ["3", "clip_up"]]


def test_the_block_beside_dense_ones():
    command = [sys.executable, "-m", "benchmarks.steps", "block", "--images", "1", "--num-experts", "4"]
    printed = subprocess.run([*command, "--rounds", "1"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(" | ")[4] for line in printed.splitlines() if line.startswith("| ViT-B/16 ")]
    assert [row.strip() for row in rows] == ["by_device", "eager", "grouped", "grouped_mm"]
