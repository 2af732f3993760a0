"""Scores and tokens of experts: by hand, and on small models, each of which is analyzed once."""

import itertools
import json
import math
import re

import numpy as np
import pytest
import small_experts
import torch
from transformers import AutoModel, CLIPModel

from clip_moe.conversion.checkpoints import load_sparse
from clip_moe.conversion.dense import extract, force_expert, read_scale, verify
from clip_moe.conversion.presets import PRESETS
from clip_moe.conversion.upcycle import upcycle
from clip_moe.data import symbols
from clip_moe.data.symbols import SYMBOLS
from clip_moe.engine.intervals import difference_reach
from clip_moe.evaluation.embedder import Embedder
from clip_moe.evaluation.experts import analyze_experts
from clip_moe.evaluation.experts_page import agreement, linear_cka, summarize
from clip_moe.evaluation.measures import measure
from clip_moe.evaluation.routing import count_tokens
from clip_moe.evaluation.tasks import Task, loaded_once

slow = pytest.mark.slow
TASKS = loaded_once(
    {
        "pairs": Task("pairs", "pairs", "42 pairs", lambda: (symbols.load_minimal_pairs("test", 42), 0)),
        "retrieval": Task("retrieval", "retrieval", "24", lambda: (SYMBOLS.load("test", "detailed", 24), 0)),
    }
)
RETRIEVAL = {"retrieval": TASKS["retrieval"]}
sparse, unnormalized, gated = small_experts.sparse, small_experts.unnormalized, small_experts.gated


def embedder_of(folder, batch_size=64):
    return Embedder(folder, None, batch_size, torch.device("cpu"))


def scores_of(folder, task):
    return measure(TASKS[task], embedder_of(folder))["metrics"]


@pytest.fixture(scope="module")
def analyses(sparse, unnormalized, gated, tmp_path_factory):
    """Folder, page and JSON of each model's analysis."""
    found = {}
    for name, (_, folder), tasks, kwargs in (
        ("sparse", sparse, TASKS, {"batch_size": 16}),
        ("unnormalized", unnormalized, RETRIEVAL, {}),
        ("gated", gated, RETRIEVAL, {}),
    ):
        out = tmp_path_factory.mktemp("out") / name
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("clip_moe.evaluation.experts.NUM_SHOWN", 2)  # patches are slow to draw
            beginning = analyze_experts(folder, tasks, out, **kwargs)
        found[name] = out, (out / "experts.md").read_text(), json.loads((out / "experts.json").read_text())
        assert found[name][1].startswith(f"# Experts\n\n{beginning}\n")
    return found


def cells(page):
    return {tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in page.splitlines() if line[:1] == "|"}


@slow
def test_every_expert_scores_as_its_dense_model(sparse, analyses, tmp_path):
    model, folder = sparse
    _, page, result = analyses["sparse"]
    embeds = []
    for expert in range(4):
        small_experts.save(extract(model, expert), tmp_path / str(expert))
        for task in TASKS:
            expected = pytest.approx(scores_of(tmp_path / str(expert), task))
            assert result["metrics"][task][f"expert {expert}"] == expected
    assert result["metrics"]["pairs"]["routed"] == pytest.approx(scores_of(folder, "pairs"))
    averaged = AutoModel.from_pretrained(folder)
    with torch.no_grad():
        for name, parameter in averaged.named_parameters():
            if ".experts." in name:
                for expert in range(4):
                    parameter[expert] = torch.stack(list(model.get_parameter(name))).mean(dim=0)
    expected = scores_of(small_experts.save(averaged, tmp_path / "averaged")[1], "pairs")
    assert result["metrics"]["pairs"]["mean of experts"] == pytest.approx(expected)
    pairs_summary = result["summary"]["collapse"][0]
    assert pairs_summary["title"] == "pairs: group score" and pairs_summary["mean"] == pytest.approx(expected["group"])
    assert pairs_summary["routed"] == result["metrics"]["pairs"]["routed"]["group"]
    assert result["metrics"]["pairs"]["routed"] != result["metrics"]["pairs"]["mean of experts"]
    assert ("metric", "expert 0", "expert 1", "expert 2", "expert 3", "routed") in cells(page)
    # Agreement: of all images, those of both tasks
    alike, rows = result["agreement"], [task.load()[0] for task in TASKS.values()]
    for expert in (0, 1):
        alone = embedder_of(tmp_path / str(expert))
        columns = ((rows[0], "image_0"), (rows[0], "image_1"), (rows[1], "image"))
        embeds.append(np.concatenate([alone.images(of, column) for of, column in columns]))
    assert alike["images"]["expert 0"]["expert 1"] == pytest.approx(linear_cka(*embeds), abs=1e-4)
    assert 0 < alike["images"]["expert 0"]["expert 1"] < 0.999 > result["summary"]["agreement"]["highest"]
    assert list(alike["texts"]) == ["expert 0", "expert 1", "expert 2", "expert 3", "routed"]


@slow
def test_the_routing_that_the_page_shows_is_what_was_counted(sparse, gated, analyses):
    for name, (_, folder), tasks, batch_size in (("sparse", sparse, TASKS, 16), ("gated", gated, RETRIEVAL, 64)):
        embedder, (_, page, result) = embedder_of(folder, batch_size), analyses[name]
        with count_tokens(embedder.model) as counts:
            for task in tasks.values():
                measure(task, embedder)
        for tower, layers in counts.items():
            for layer, of in layers.items():
                expected, shown = of.means(), result["routing"][tower][str(layer)]
                assert shown.keys() == expected.keys()
                for quantity, value in expected.items():
                    assert (value is None) == (shown[quantity] is None) == (quantity == "gate" and name == "sparse")
                    np.testing.assert_allclose(shown[quantity] or 0, value or 0, rtol=1e-4, atol=1e-6)
        of = result["routing"]["text"]["7"]
        (row,) = [row for row in cells(page) if row[:2] == ("text", "7")]
        assert row[2:4] == (f"{of['share_entropy']:.2f}", f"{of['entropy']:.2f}")
        assert result["scales"] == {} and "clip-moe dense" not in page


@slow
def test_equal_experts_score_as_the_routed_model(unnormalized, analyses):
    """An expert alone has the weight that a token's experts have together, where that is not 1."""
    (_, folder), (_, page, result) = unnormalized, analyses["unnormalized"]
    scores, summary = result["metrics"]["retrieval"], result["summary"]
    for expert in range(8):
        assert scores[f"expert {expert}"] == pytest.approx(scores["routed"])
    other, rows = embedder_of(folder), TASKS["retrieval"].load()[0]
    routed = other.images(rows)
    for weights, equal in (((), True), ((1.0,), False)):  # weight 1 gives something else
        with force_expert(other.model, 0, *weights):
            assert np.allclose(other.images(rows), routed, atol=1e-5) == equal
    assert "better than every expert alone in 0 of" in page and "CKA 1.000 (pairs: 1.000 to 1.000)" in page
    assert all(score["mean"] == score["routed"] for score in summary["collapse"])
    assert list(summary["agreement"].values()) == pytest.approx([1, 1, 1], abs=1e-6) and summary["most_entropy"] == 3


@slow
def test_scales_are_what_dense_takes(unnormalized, analyses, tmp_path):
    (_, folder), (out, page, result) = unnormalized, analyses["unnormalized"]
    scales = result["scales"]
    assert {tower: "".join(sorted(layers)) for tower, layers in scales.items()} == {"text": "1357", "vision": "1357"}
    for tower, layers in scales.items():
        for layer, scale in layers.items():
            assert scale == result["routing"][tower][layer]["weight"] and 0.26 < scale < 0.9
    assert f"{scales['text']['1']:.3f}" in page
    scale = read_scale(out, folder)
    extract(load_sparse(folder), 3, scale).save_pretrained(tmp_path)
    verify(folder, tmp_path, 3, scale)


@slow
def test_the_page_shows_all_pictures_and_the_last_layer(analyses, tmp_path):
    """What a model lacks is not drawn: here, of one with a sparse text tower alone."""
    out, page, _ = analyses["sparse"]
    pictures = {"routing.png", "patches.png"}
    assert {path.name for path in out.iterdir()} == {"experts.md", "experts.json", "experts.html"} | pictures
    assert set(re.findall(r"\]\((\S+)\)", page)) == pictures and "layer 7 of the vision tower" in page
    model = upcycle(CLIPModel.from_pretrained("training/symbol_clip"), PRESETS["dense_price"], towers=["text"])
    small_experts.save(model, tmp_path / "model")
    beginning = analyze_experts(tmp_path / "model", RETRIEVAL, tmp_path / "out")
    assert "Expert N is an FFN, the 4 from 4 N on" in beginning and "FFN" not in page
    assert {path.stem for path in (tmp_path / "out").glob("*.png")} == {"routing"}


def cka(*pairs):
    """A matrix of three experts and of the routed model, which is like all, from the pairs 01, 02 and 12."""
    titles = ["expert 0", "expert 1", "expert 2", "routed"]
    found = {one: dict.fromkeys(titles, 1.0) for one in titles}
    for (one, other), value in zip(itertools.combinations(titles[:3], 2), pairs, strict=True):
        found[one][other] = found[other][one] = value
    return found


def task_scores(photos, animals, **more):
    animals = {"metrics": {"mean_per_class_recall": animals}, "num_samples": 10}
    return {"photos": {"metrics": photos, "num_samples": 40, **more}, "animals": animals}


def test_summary_by_hand():
    none, recalls = lambda: None, ["image_to_text_recall@1", "text_to_image_recall@1", "text_to_image_recall@5"]
    tasks = {
        "photos": Task("retrieval", "photos", "40 photos", none),
        "animals": Task("zero_shot", "animals", "10 photos", none, metrics=["mean_per_class_recall"]),
    }
    routed = task_scores(dict(zip(recalls, [0.5, 0.4, 0.9], strict=True)), 0.75, num_captions=160)
    scores = tasks, routed, task_scores({recalls[0]: 0.2, recalls[1]: 0.4}, 0.8)
    routing = {"text": {1: {"entropy": 0.5}, 3: {"entropy": 1.5}}, "vision": {3: {"entropy": 0.25}}}
    found = summarize(*scores, routing, {"images": cka(0.9, 0.6, 0.3), "texts": cka(0.6, 0.6, None)}, 3)
    assert [(score.routed, score.mean) for score in found.collapse] == [(0.5, 0.2), (0.4, 0.4), (0.75, 0.8)]
    expected = [max(difference_reach(0.5, 0.2, 40)), max(difference_reach(0.4, 0.4, 40))]  # 4 captions an image
    assert [score.error for score in found.collapse[:2]] == pytest.approx(expected, rel=1e-6)
    assert found.collapse[2].error is None  # a mean of means
    assert found.most_entropy == math.log2(3)
    assert [text for _, text in found.rows] == [
        "50.0% routed, 20.0% with the mean of the experts: -30.0 ± 20.9 points",
        "40.0% routed, 40.0% with the mean of the experts: +0.0 ± 20.6 points",
        "75.0% routed, 80.0% with the mean of the experts: +5.0 points",
        "0.75 of at most 1.58 bits (layers: 0.25 to 1.50)",
        "CKA 0.600 (pairs: 0.300 to 0.900)",
    ]
    assert found.rows[0][0] == "collapse test, photos: R@1 image→text"
    # A dense tower says nothing of experts, and one expert is alike to none
    agreements = {"images": cka(1.0, 1.0, 1.0), "texts": cka(0.2, 0.3, 0.4)}
    dense = summarize(*scores, {"text": {1: {"entropy": 0.5}}}, agreements, 3)
    assert dense.agreement.model_dump() == pytest.approx({"mean": 0.3, "lowest": 0.2, "highest": 0.4})
    one_expert = {"expert 0": {"expert 0": 1.0}}
    assert summarize(*scores, {"text": {1: {"entropy": 0.0}}}, {"texts": one_expert}, 1).agreement is None


def test_cka_is_that_of_the_gram_matrices():
    """Kornblith et al., equations 1 and 2: HSIC of linear kernels; and by hand."""
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(30, 5)), rng.normal(size=(30, 3)) ** 3
    center = np.eye(30) - 1 / 30

    def hsic(x, y):
        return np.trace(center @ x @ x.T @ center @ y @ y.T)

    expected = hsic(first, second) / np.sqrt(hsic(first, first) * hsic(second, second))
    assert linear_cka(first, second) == pytest.approx(expected)
    rotation = np.linalg.qr(rng.normal(size=(5, 5)))[0]
    assert linear_cka(first, -7 * first @ rotation + 2) == pytest.approx(1, abs=1e-6)
    by_hand = np.array([[1.0, 0], [-1, 0], [0, 2], [0, -2]]) + 5  # centered: X'X = diag(2, 8)
    other = np.array([[1.0], [-1], [1], [-1]]) - 3  # Y'Y = 4, X'Y = (2, 4)'
    assert linear_cka(by_hand, other) == pytest.approx((2**2 + 4**2) / (np.sqrt(2**2 + 8**2) * 4))
    found = agreement({"a": first, "b": second, "constant": np.ones((30, 2))})
    assert found["a"]["b"] == pytest.approx(found["b"]["a"]) and found["a"]["b"] < 1
    assert [row["constant"] for row in found.values()] == [None] * 3
