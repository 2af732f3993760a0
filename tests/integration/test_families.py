"""Each family around what is trained here: published, in pipelines, in other libraries."""

import os
import subprocess
import sys

import pytest
import torch
from PIL import Image
from tiny_clip import moved
from tiny_families import saved, tiny_dense
from transformers import AutoModel, AutoProcessor

from conversion.commands import publish
from conversion.families import FAMILIES
from conversion.presets import PRESETS
from conversion.upcycle import upcycle

LENGTH = 64  # transformers' pipeline pads SigLIP's texts to it
TEXTS = ["a red cat", "a round cat"]
PIPELINE = """
import sys
sys.modules["modeling_clip_moe"] = None
from PIL import Image
from transformers import pipeline
classify = pipeline("zero-shot-image-classification", model=sys.argv[1], trust_remote_code=True)
scores = classify(Image.open(sys.argv[2]), candidate_labels=["red", "round"], hypothesis_template="a {} cat")
of_label = {score["label"]: score["score"] for score in scores}
print(type(classify.model).__module__.split(".")[0], of_label["red"], of_label["round"])
"""


@pytest.fixture(
    scope="module", params=[family for family in FAMILIES if not family.naflex], ids=lambda family: family.model_type
)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    path = tmp_path_factory.mktemp("image") / "image.png"
    Image.effect_noise((40, 32), 80).convert("RGB").save(path)
    return path


@pytest.fixture(scope="module")
def published(family, tmp_path_factory):
    """A sparse model with experts that differ, as it is published."""
    folder = tmp_path_factory.mktemp(family.model_type)
    sparse = moved(upcycle(tiny_dense(family, LENGTH), PRESETS["clip_moe"]), ("experts", "router"), seed=1)
    saved(family, sparse, folder / "sparse", LENGTH)
    publish.main([str(folder / "sparse"), "user/sparse", "--dry-run", str(folder / "published")])
    return folder / "published"


@pytest.fixture(scope="module")
def inputs(family, published, image):
    padding = {"padding": "max_length", "truncation": True} if family.sigmoid else {"padding": True}
    return AutoProcessor.from_pretrained(published)(
        text=TEXTS, images=Image.open(image), return_tensors="pt", **padding
    )


def test_the_card_and_the_code_are_the_familys(family, published):
    card = (published / "README.md").read_text()
    assert f"A {family.name} with sparse Mixture-of-Experts layers" in card
    assert ("sigmoid()" in card) == ('padding="max_length"' in card) == family.sigmoid
    assert ("zhai2023siglip" in card) == family.sigmoid and "{{ " not in card
    assert (published / f"modeling_{family.sparse.config_class.model_type}.py").is_file()


@torch.no_grad()
def test_without_the_package_a_pipeline_scores_as_the_model(family, published, inputs, image, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PIPELINE, published, image],
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    module, *scores = done.stdout.split()
    logits = AutoModel.from_pretrained(published)(**inputs).logits_per_image[0]
    expected = logits.sigmoid() if family.sigmoid else logits.softmax(dim=-1)
    assert module == "transformers_modules"
    assert [float(score) for score in scores] == pytest.approx(expected.tolist(), rel=1e-4)
