"""The modules of the `evaluate` library: the same numbers as the functions that they call, offline."""

import shutil
import socket
import sys
from pathlib import Path

import numpy as np
import pytest
from test_metrics import random_unit, unit

from clip_moe.evaluation.pairs import pair_metrics
from clip_moe.evaluation.retrieval import retrieval_metrics

evaluate = pytest.importorskip("evaluate", reason="the `evaluate` library of the training extra is not installed")
ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    """In a checkout, without the network, and as in a process that has loaded no module yet."""
    monkeypatch.setattr(socket.socket, "connect", None)  # calling it would fail
    monkeypatch.setattr(evaluate.config, "HF_MODULES_CACHE", tmp_path / "modules")
    monkeypatch.setattr(evaluate.config, "HF_METRICS_CACHE", tmp_path / "metrics")
    monkeypatch.setattr(sys, "path", [*sys.path])  # `evaluate` adds its cache
    for name in [name for name in sys.modules if name.split(".")[0] == "evaluate_modules"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.chdir(ROOT)


def load_both():
    return evaluate.load("evaluation/retrieval_recall.py"), evaluate.load("evaluation/pair_score.py")


def test_modules_compute_what_the_functions_do():
    rng = np.random.default_rng(0)
    images, texts = random_unit(rng, 3, 4), random_unit(rng, 5, 4)
    recall, score = load_both()
    image_of_text = [0, 1, 2, 2, 1]
    found = recall.compute(predictions=texts, references=image_of_text, image_embeds=images, ks=[1, 2])
    assert found == retrieval_metrics(images, texts, image_of_text, ks=(1, 2))
    pairs = unit([[0, 90], [0, 90]]), unit([[10, 80], [5, 44]])
    found = score.compute(predictions=pairs[0], references=pairs[1], attributes=["a", "b"], score="image")
    assert found == pair_metrics(*pairs, ["a", "b"], "image") and found["image/b"] == 0


def test_modules_refuse_other_lengths_than_one():
    """Rounded to half precision, lengths are still 1. What is not finite has none."""
    pairs = random_unit(np.random.default_rng(0), 3, 2, 64)
    factors = np.array([[[1], [1]], [[1], [1.5]], [[1], [1]]])
    long, broken = pairs * factors, pairs * np.where(factors == 1.5, np.nan, factors)
    recall, score = load_both()
    assert "group" in score.compute(predictions=pairs, references=pairs.astype(np.float16))
    of_pairs = {"predictions": pairs, "references": pairs}
    of_recall = {"predictions": pairs[:, 0], "references": [0, 1, 2], "image_embeds": pairs[:, 1]}
    for module, inputs, name in (
        *((score, of_pairs, name) for name in ("predictions", "references")),
        *((recall, of_recall, name) for name in ("predictions", "image_embeds")),
    ):
        for wrong, length in ((long, "1.5"), (broken, "nan")):
            wrong = wrong if module is score else wrong[:, 1]
            with pytest.raises(ValueError, match=f"^{name} has an embedding of length {length}: divide each by its"):
                module.compute(**inputs | {name: wrong})


@pytest.mark.parametrize("name, others", [("retrieval_recall", ["retrieval"]), ("pair_score", ["pairs", "retrieval"])])
def test_a_space_needs_these_files_alone(name, others, tmp_path, monkeypatch):
    """Those that docs/evaluation.md names, in one folder, without the rest of this package."""
    for file in (name, *others):
        shutil.copy(ROOT / "evaluation" / f"{file}.py", tmp_path)
    for module in [module for module in sys.modules if module.split(".")[0] == "evaluation"]:
        monkeypatch.setitem(sys.modules, module, None)  # cannot be imported
    pairs = unit([[0, 90], [0, 90]])
    inputs = {"predictions": pairs, "references": pairs}
    if name == "retrieval_recall":
        inputs = {"predictions": pairs[0], "references": [0, 1], "image_embeds": pairs[0]}
    monkeypatch.chdir(tmp_path)
    assert set(evaluate.load(f"./{name}.py").compute(**inputs).values()) == {1.0}
