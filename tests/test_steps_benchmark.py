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
