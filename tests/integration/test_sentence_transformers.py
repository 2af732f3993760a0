"""Sentence Transformers: images and texts, with the package and without it."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from backbones import both_backbones
from PIL import Image
from safetensors.numpy import load_file

from data import symbols

TEXTS = ["a large red star", "a small blue circle on a striped green background", "a seven", "a red star " * 60]
PROGRAM = """
import sys
sys.modules["modeling_clip_moe"] = None
from PIL import Image
from safetensors.numpy import save_file
from sentence_transformers import SentenceTransformer

repository, texts, number = sys.argv[1], sys.argv[2].split("|"), int(sys.argv[3])
images = [Image.open(f"{i}.png") for i in range(number)]
for name, folder in (("first", repository), ("again", "first")):
    model = SentenceTransformer(folder, trust_remote_code=True, device="cpu")
    assert type(model[0].model).__module__.startswith("transformers_modules.")
    save_file({"texts": model.encode(texts), "images": model.encode(images)}, f"{name}.safetensors")
    model.save_pretrained(name)
"""


@pytest.fixture(scope="module")
def images():
    images = [sample["image"] for sample in symbols.load("test", "detailed", 3)]
    return [*images, Image.linear_gradient("L").resize((50, 40))]


@pytest.fixture
def expected(model, processor, images):
    """What our model says of each text and image alone."""
    with torch.no_grad():
        texts = [
            model.encode_text(**processor(text=text, truncation=True, return_tensors="pt")).numpy() for text in TEXTS
        ]
        pixels = [processor(images=image, return_tensors="pt")["pixel_values"] for image in images]
        return {"texts": np.concatenate(texts), "images": model.encode_image(torch.cat(pixels)).numpy()}


def assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@both_backbones
def test_without_the_package(repository, images, expected, tmp_path):
    for i, image in enumerate(images):
        image.save(tmp_path / f"{i}.png")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(repository), "|".join(TEXTS), str(len(images))],
        cwd=tmp_path,
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    for name in ("first", "again"):
        embeddings = load_file(tmp_path / f"{name}.safetensors")
        assert_close(embeddings["texts"], expected["texts"])
        assert_close(embeddings["images"], expected["images"])
