"""The modules of the `evaluate` library: the same numbers as the functions that they call, offline."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_metrics import random_unit, unit

from evaluation.pairs import pair_metrics
from evaluation.retrieval import retrieval_metrics

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("evaluate") is None, reason="the `evaluate` library of the training extra is not installed"
)
METRICS = Path(__file__).parents[1] / "evaluation" / "metrics"
COMMAND = """
import json, sys
import evaluate
if sys.argv[1] == "alone":
    sys.modules["evaluation"] = None  # cannot be imported
for module, inputs in json.load(open("inputs.json")):
    try:
        print(json.dumps(evaluate.load(module).compute(**inputs)))
    except ValueError as error:
        print(json.dumps({"error": str(error)}))
"""


def computed(folder, how, *modules):
    """In a process without the network and with an empty cache: a module's scores of inputs, one after the other."""
    content = [
        [module, {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in inputs.items()}]
        for module, inputs in modules
    ]
    (folder / "inputs.json").write_text(json.dumps(content))
    environment = os.environ | {"HF_HOME": str(folder / "home"), "HF_EVALUATE_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", COMMAND, how]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_modules_compute_what_the_functions_do(tmp_path):
    (tmp_path / "evaluation").symlink_to(METRICS.parent)
    rng = np.random.default_rng(0)
    images, texts = random_unit(rng, 3, 4), random_unit(rng, 5, 4)
    of_one, of_several = [0, 1, 2, 2, 1], [[0], [1, 2], [2], [2], [1, 0]]
    recall = {"predictions": texts, "image_embeds": images, "ks": [1, 2]}
    pairs = unit([[0, 90], [0, 90]]), unit([[10, 80], [5, 44]])
    found = computed(
        tmp_path,
        "in a checkout",
        ("evaluation/metrics/retrieval_recall", recall | {"references": of_one}),
        ("evaluation/metrics/retrieval_recall", recall | {"references": of_several}),
        (
            "evaluation/metrics/pair_score",
            {"predictions": pairs[0], "references": pairs[1], "attributes": ["a", "b"], "score": "image"},
        ),
    )
    assert found[:2] == [retrieval_metrics(images, texts, of, ks=(1, 2)) for of in (of_one, of_several)]
    assert found[2] == pair_metrics(*pairs, ["a", "b"], "image") and found[2]["image/b"] == 0


def test_modules_refuse_other_lengths_than_one(tmp_path):
    """Rounded to half precision, lengths are still 1."""
    (tmp_path / "evaluation").symlink_to(METRICS.parent)
    pairs = random_unit(np.random.default_rng(0), 3, 2, 64)
    long = pairs * [[[1], [1]], [[1], [1.5]], [[1], [1]]]
    recall = {"predictions": pairs[:, 0], "references": [0, 1, 2], "image_embeds": pairs[:, 1]}
    found = computed(
        tmp_path,
        "in a checkout",
        ("evaluation/metrics/pair_score", {"predictions": pairs, "references": pairs.astype(np.float16)}),
        ("evaluation/metrics/pair_score", {"predictions": long, "references": pairs}),
        ("evaluation/metrics/pair_score", {"predictions": pairs, "references": long}),
        ("evaluation/metrics/retrieval_recall", recall | {"predictions": long[:, 1]}),
        ("evaluation/metrics/retrieval_recall", recall | {"image_embeds": long[:, 1]}),
    )
    assert "group" in found[0]
    named = ["predictions", "references", "predictions", "image_embeds"]
    assert [scores.get("error") for scores in found[1:]] == [
        f"{name} has an embedding of length 1.5: divide each by its length" for name in named
    ]


def test_a_space_needs_nothing_else(tmp_path):
    """The folders, as an upload copies them, work without the rest of this package."""
    for name in ("retrieval_recall", "pair_score"):
        shutil.copytree(METRICS / name, tmp_path / name)
    pairs = unit([[0, 90], [0, 90]])
    recall = {"predictions": pairs[0], "references": [0, 1], "image_embeds": pairs[0]}
    modules = ("./retrieval_recall", recall), ("./pair_score", {"predictions": pairs, "references": pairs})
    assert [set(scores.values()) for scores in computed(tmp_path, "alone", *modules)] == [{1.0}, {1.0}]
