"""The dense glyph CLIP that comes with the repository, and what becomes of it."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoProcessor, CLIPModel, pipeline

from conversion import upcycle
from data import glyphs
from evaluation.embedder import Embedder
from evaluation.tasks import TASKS
from evaluation.zero_shot import class_embeddings, zero_shot_metrics

BASE = Path(__file__).parents[1] / "training" / "glyph_clip"
TEMPLATE = "a picture of a {}"
WITHOUT_PACKAGE = """
import json, sys
sys.modules["modeling_clip_moe"] = None  # it is installed where the tests run
import torch
from PIL import Image
from safetensors.torch import save_file
from transformers import AutoModel, AutoProcessor, pipeline

folder, kinds = sys.argv[1], sys.argv[2].split(",")
torch.set_num_threads(1)
image = Image.open("glyph.png")
model = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
inputs = processor(text=kinds, images=image, return_tensors="pt", padding=True)
with torch.no_grad():
    outputs = model(**inputs)
save_file({"image": outputs.image_embeds, "text": outputs.text_embeds}, "embeds.safetensors")
classify = pipeline("zero-shot-image-classification", model=folder, trust_remote_code=True)
print(json.dumps(classify(image, candidate_labels=kinds, hypothesis_template="a picture of a {}")[0]["label"]))
"""


@pytest.fixture(scope="module")
def glyph():
    """A test glyph that the base knows."""
    return glyphs.load("test", "detailed", 1, kinds=["star"])[0]


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    folder = tmp_path_factory.mktemp("glyphs") / "sparse"
    upcycle.main([str(BASE), str(folder), "--preset", "clip_up", "--norm-topk-prob"])
    return folder


def test_the_base_is_good(tmp_path):
    """On 320 glyphs; the whole test is in the base's README."""
    rows = glyphs.load("test", "detailed", 320, seed=1)
    embedder = Embedder(BASE, tmp_path, 64, torch.device("cpu"), torch.float32)
    templates = TASKS["glyphs_zero_shot"].templates
    prompts = embedder.texts([template.format(kind) for kind in glyphs.KINDS for template in templates])
    classes = class_embeddings(prompts.reshape(len(glyphs.KINDS), len(templates), -1))
    labels = np.array([glyphs.KINDS.index(kind) for kind in rows["kind"]])
    assert zero_shot_metrics(embedder.images(rows), classes, labels)["accuracy"] > 0.8


def test_upcycled_it_computes_the_same(sparse, glyph):
    dense, model, processor = (
        CLIPModel.from_pretrained(BASE),
        AutoModel.from_pretrained(sparse),
        AutoProcessor.from_pretrained(sparse),
    )
    inputs = processor(text=glyphs.KINDS, images=glyph["image"], return_tensors="pt", padding=True)
    with torch.no_grad():
        expected, found = dense.eval()(**inputs), model.eval()(**inputs)
    torch.testing.assert_close(found.image_embeds, expected.image_embeds, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.text_embeds, expected.text_embeds, atol=1e-5, rtol=0)
    assert glyphs.KINDS[expected.logits_per_image.argmax()] == "star"


def test_pipeline(sparse, glyph):
    classify = pipeline("zero-shot-image-classification", model=str(sparse))
    best, *_ = classify(glyph["image"], candidate_labels=glyphs.KINDS, hypothesis_template=TEMPLATE)
    assert best["label"] == "star"


def test_without_the_package(sparse, glyph, tmp_path):
    """A fresh process, offline, with nothing of this project but the folder."""
    glyph["image"].save(tmp_path / "glyph.png")
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "home"),
    }
    command = [sys.executable, "-c", WITHOUT_PACKAGE, str(sparse), ",".join(glyphs.KINDS)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == '"star"'
    inputs = AutoProcessor.from_pretrained(sparse)(
        text=glyphs.KINDS, images=glyph["image"], return_tensors="pt", padding=True
    )
    with torch.no_grad():
        outputs = AutoModel.from_pretrained(sparse).eval()(**inputs)
    embeds = load_file(tmp_path / "embeds.safetensors")
    torch.testing.assert_close(embeds["image"], outputs.image_embeds, atol=1e-6, rtol=0)
    torch.testing.assert_close(embeds["text"], outputs.text_embeds, atol=1e-6, rtol=0)
