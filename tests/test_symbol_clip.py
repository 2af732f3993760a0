"""The dense symbol CLIPs that come with the repository."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from data import symbols
from evaluation.embedder import Embedder
from evaluation.zero_shot import class_embeddings, zero_shot_metrics

BASE = Path(__file__).parents[1] / "training" / "symbol_clip"
# Of the whole, of a half and of a quarter of its pretraining
FOLDERS = {"whole": BASE, "half": BASE / "half", "quarter": BASE / "quarter"}


@pytest.fixture(scope="module")
def accuracy():
    """Zero-shot accuracy on 250 symbols; the whole test is in the folder's README."""
    rows = symbols.load("test", "detailed", 250, seed=1, two=False)
    labels = np.array([symbols.KINDS.index(kind) for kind in rows["kind"]])
    prompts = [f"a picture of a {kind}" for kind in symbols.KINDS]
    found = {}
    for name, folder in FOLDERS.items():
        embedder = Embedder(folder, None, 64, torch.device("cpu"))
        classes = class_embeddings(embedder.texts(prompts)[:, None])
        found[name] = zero_shot_metrics(embedder.images(rows), classes, labels)["accuracy"]
    return found


def test_they_learn_on(accuracy):
    assert 5 / len(symbols.KINDS) < accuracy["quarter"] < accuracy["half"] < accuracy["whole"] < 0.9


def test_together_they_are_small():
    files = [file for file in BASE.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 15e6
    with safe_open(FOLDERS["half"] / "model.safetensors", "pt") as weights:
        assert weights.get_tensor("logit_scale").dtype == torch.float16
