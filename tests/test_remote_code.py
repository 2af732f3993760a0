"""A saved folder loads with `trust_remote_code=True` in a process that does not have the package."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from modeling_clip_moe import CLIPMoEConfig, CLIPMoEForImageClassification, CLIPMoEModel

pytestmark = pytest.mark.slow

CODE = {"configuration_clip_moe.py", "modeling_clip_moe.py"}
# The package is installed where the tests run: the other process is told that it is not
WITHOUT_PACKAGE = """
import sys
sys.modules["modeling_clip_moe"] = None
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig, AutoModel, AutoModelForImageClassification, AutoModelForZeroShotImageClassification
)

torch.set_num_threads(1)
inputs = load_file("inputs.safetensors")
"""


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    tower = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_experts": 4,
        "moe_layers": [1],
        "projection_dim": 8,
    }
    text_config = {**tower, "vocab_size": 50, "max_position_embeddings": 8, "bos_token_id": 48, "eos_token_id": 49}
    vision_config = {**tower, "image_size": 16, "patch_size": 8, "fusion_gate": True}
    config = CLIPMoEConfig(text_config=text_config, vision_config=vision_config, projection_dim=8)
    return CLIPMoEModel(config).eval()


@pytest.fixture
def inputs(tmp_path):
    torch.manual_seed(1)
    inputs = {
        "input_ids": torch.tensor([[48, 3, 4, 49, 1], [48, 7, 49, 1, 1]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]]),
        "pixel_values": torch.randn(2, 3, 16, 16),
    }
    save_file(inputs, tmp_path / "inputs.safetensors")
    return inputs


def run_without_package(code, folder, **environment):
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "home"),
        "HF_MODULES_CACHE": str(folder / "modules"),
        **environment,
    }
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_PACKAGE + code], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_folder_loads_and_saves_again(model, inputs, tmp_path):
    model.save_pretrained(tmp_path / "model")
    classifier = CLIPMoEForImageClassification.from_pretrained(tmp_path / "model", num_labels=3)
    classifier.save_pretrained(tmp_path / "classifier")
    run_without_package(
        """
try:
    AutoModel.from_pretrained("model", trust_remote_code=False)
except ValueError as error:
    assert "trust_remote_code" in str(error), error
else:
    raise AssertionError("code was run without trust")

model = AutoModel.from_pretrained("model", trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules"), type(model)
zero_shot = AutoModelForZeroShotImageClassification.from_pretrained("model", trust_remote_code=True)
zero_shot.save_pretrained("again")
again = AutoModel.from_pretrained("again", trust_remote_code=True)
new_head = AutoModelForImageClassification.from_pretrained("model", trust_remote_code=True)
assert type(new_head).__name__ == "CLIPMoEForImageClassification"
classifier = AutoModelForImageClassification.from_pretrained("classifier", trust_remote_code=True)
with torch.no_grad():
    outputs = {str(i): m(**inputs).logits_per_image.contiguous() for i, m in enumerate((model, zero_shot, again))}
    outputs["classes"] = classifier(inputs["pixel_values"]).logits
save_file(outputs, "outputs.safetensors")
""",
        tmp_path,
    )
    outputs = load_file(tmp_path / "outputs.safetensors")
    with torch.no_grad():
        classes = classifier(inputs["pixel_values"]).logits
        expected = model(**inputs).logits_per_image
    torch.testing.assert_close(outputs.pop("classes"), classes, rtol=0, atol=0)
    for actual in outputs.values():
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    for folder in ("model", "again"):
        assert CODE <= {path.name for path in (tmp_path / folder).iterdir()}
        config = json.loads((tmp_path / folder / "config.json").read_text())
        assert config["auto_map"] == {
            "AutoConfig": "configuration_clip_moe.CLIPMoEConfig",
            "AutoModel": "modeling_clip_moe.CLIPMoEModel",
            "AutoModelForImageClassification": "modeling_clip_moe.CLIPMoEForImageClassification",
            "AutoModelForZeroShotImageClassification": "modeling_clip_moe.CLIPMoEModel",
        }
    # With the package, the same folder gives the package's classes
    assert type(AutoModel.from_pretrained(tmp_path / "again")) is CLIPMoEModel
