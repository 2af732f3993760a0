"""`measure` of every kind of task, on the symbol CLIP and on a mixture of it (MoDE eq. 4 to 7), against loops over one
image, one text and one expert at a time."""

import json
import math
import shutil
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_evaluation import plain_embedding, with_captions
from tiny_clip import change_weights, command
from transformers import AutoProcessor, CLIPModel

from clip_moe.app.page import label_scores
from clip_moe.conversion import assemble
from clip_moe.data import symbols
from clip_moe.data.symbols import SYMBOLS
from clip_moe.evaluation.ensemble import Ensemble, open_model
from clip_moe.evaluation.linear_probe import linear_probe_metrics
from clip_moe.evaluation.measures import measure
from clip_moe.evaluation.sentence_encoders import TfidfEncoder
from clip_moe.evaluation.tasks import TASKS, Task, loaded_once, symbol_tasks

BASE, TEMPERATURE = "training/symbol_clip", 0.2
DIGITS, TOOLS = symbols.KIND_SETS["digit"], symbols.KIND_SETS["tool"]
# Not in the order of `symbols.KINDS`, and as many templates as there are not classes
CLASSES, TEMPLATES = [*TOOLS[::-1], *DIGITS[::-1]], ["{}", "a picture of a {}", "{} on white"]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """The symbol CLIP for digits and a damaged copy of another temperature for tools; its encoder and centers."""
    folder = tmp_path_factory.mktemp("mixture")
    model = CLIPModel.from_pretrained(BASE, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.std() / 2)
        model.logit_scale.add_(0.5)
    model.save_pretrained(folder / "damaged")
    AutoProcessor.from_pretrained(BASE).save_pretrained(folder / "damaged")
    captions = [list(SYMBOLS.load("train", "detailed", 60, kinds)["caption"]) for kinds in (DIGITS, TOOLS)]
    encoder = TfidfEncoder.fit(sum(captions, []), 20, seed=0)
    (folder / "encoder").mkdir()
    encoder.save(folder / "encoder")
    centers = np.stack([encoder.encode(texts).mean(axis=0) for texts in captions])
    routing = {"routing": "paper", "routing_temperature": TEMPERATURE, "metadata_encoder": encoder.name}
    routing |= {"centers": torch.as_tensor(centers), "expert_of_center": torch.tensor([0, 1])}
    assemble.convert([BASE, folder / "damaged"], folder / "mixture", folder / "encoder", **routing)
    return folder, encoder, centers


def opened(model, **changes):
    return open_model(model, None, 7, torch.device("cpu"), **changes)


@pytest.fixture(scope="module", params=["alone", "mixture"])
def model(request, mixture):
    """The measured model; its experts' plain embeddings and temperatures; their weights by the metadata of a task."""
    folder, encoder, centers = mixture
    alone = request.param == "alone"
    places = [BASE] if alone else [BASE, folder / "damaged"]
    scales = [CLIPModel.from_pretrained(place, dtype=torch.float32).logit_scale.exp().item() for place in places]

    def weights(texts):
        if alone:
            return [1.0]
        temperature = TEMPERATURE / math.log(len(texts)) if len(texts) > 200 else TEMPERATURE
        similarity = [0.0, 0.0]
        for embed in encoder.encode(list(texts)):
            distances = [float(((embed - center) ** 2).sum()) for center in centers]
            nearest = int(np.argmin(distances))
            similarity[nearest] += math.exp(-distances[nearest] / temperature)
        if len(texts) < 10:
            similarity = [value * math.exp(0.5 - math.sqrt(len(texts))) for value in similarity]
        return [math.exp(value) / sum(map(math.exp, similarity)) for value in similarity]

    experts = list(zip(map(plain_embedding, places), scales, strict=True))
    return SimpleNamespace(measured=opened(BASE if alone else folder / "mixture"), experts=experts, weights=weights)


def similarity(model, weights, image, text):
    """Of an image and a text, by hand; a text of several prompts is their mean direction."""
    total = 0.0
    for weight, (embed, scale) in zip(weights, model.experts, strict=True):
        direction = np.mean([embed(prompt) for prompt in ([text] if isinstance(text, str) else text)], axis=0)
        total += weight * scale * (embed(image) @ direction) / np.linalg.norm(direction)
    return total


def prompts(name):
    return [template.format(name) for template in TEMPLATES]


def require_weights(model, result, **expected):
    """A result has the mean weights of several tasks, those of the cosine similarities."""
    if not isinstance(model.measured, Ensemble):
        assert "routing_weights" not in result
        return
    scales = [scale for _, scale in model.experts]
    scaled = {name: np.array(weights) * scales for name, weights in expected.items()}
    means = {name: (part / part.sum(axis=1, keepdims=True)).mean(axis=0) for name, part in scaled.items()}
    assert result["routing_weights"] == {name: pytest.approx(list(m), abs=1e-6) for name, m in means.items()}


def pictures(number, split="test"):
    rows = symbols.ONE.load(split, "detailed", number, CLASSES)
    return rows.remove_columns("caption").rename_column("kind", "caption")


def measured(model, rows, kind, **more):
    result = measure(Task(kind, "", "", lambda: (rows, 3), **more), model.measured)
    assert (result["num_samples"], result["num_skipped"]) == (len(rows), 3)
    return result


def test_zero_shot(model):
    rows, options = pictures(40), {"classes": CLASSES, "templates": TEMPLATES}
    weights, found = model.weights(CLASSES), []
    for row in rows:
        scores = [similarity(model, weights, row["image"], prompts(name)) for name in CLASSES]
        found.append([CLASSES[place] for place in np.argsort(scores)[::-1]])
    right = [kinds[0] == row["caption"] for kinds, row in zip(found, rows, strict=True)]
    result = measured(model, rows, "zero_shot", **options)
    assert result["metrics"]["accuracy"] == np.mean(right) and 0.4 < np.mean(right) < 1
    in_five = np.mean([row["caption"] in kinds[:5] for kinds, row in zip(found, rows, strict=True)])
    assert result["metrics"]["accuracy_top5"] == in_five
    require_weights(model, result, classes=[weights])
    other = measured(model, rows, "zero_shot", **options | {"classes": CLASSES[::-1]})
    assert other["metrics"] == pytest.approx(result["metrics"])  # classes of another order


def test_zero_shot_groups(model):
    """Images meet the kinds of their own group alone, by which a mixture is routed, however many these have, and every
    group counts the same; one without images does not."""
    rows = pictures(60)
    group_of = {kind: "seen" if kind in DIGITS else "unseen" for kind in CLASSES} | {TOOLS[0]: "alone"}
    options = {"classes": CLASSES, "templates": TEMPLATES, "group_of_class": group_of}
    names = {group: [name for name in CLASSES if group_of[name] == group] for group in ("alone", "unseen", "seen")}
    weights, right = {group: model.weights(group_values) for group, group_values in names.items()}, {}
    for row in rows:
        group = group_of[row["caption"]]
        scores = [similarity(model, weights[group], row["image"], prompts(name)) for name in names[group]]
        right.setdefault(group, []).append(names[group][int(np.argmax(scores))] == row["caption"])
    accuracies = {group: np.mean(group_values) for group, group_values in right.items()}
    result = measured(model, rows, "zero_shot_groups", **options)
    expected = {f"accuracy/{name}": value for name, value in accuracies.items()}
    assert result["metrics"] == {"accuracy": pytest.approx(np.mean(list(accuracies.values()))), **expected}
    assert result["group_samples"] == {group: len(group_values) for group, group_values in right.items()}
    counts = {group: Counter(row["caption"] for row in rows if group_of[row["caption"]] == group) for group in right}
    most = [max(1 / len(names[group]), max(of.values()) / of.total()) for group, of in counts.items()]
    assert result["chance"] == {"accuracy": pytest.approx(np.mean(most))}
    assert accuracies["alone"] == 1 and 0.4 < accuracies["seen"] < 1 and len(set(map(len, right.values()))) == 3
    require_weights(model, result, classes=[weights[group] for group in right])
    seen = rows.filter(lambda row: group_of[row["caption"]] == "seen")
    seen_metrics = measured(model, seen, "zero_shot_groups", **options)["metrics"]
    assert seen_metrics == {name: accuracies["seen"] for name in ("accuracy", "accuracy/seen")}


def test_retrieval(model):
    """Images with one to three captions, of which a blank one is none. Captions are found with the weights of all of
    them, images with those of the caption that asks."""
    rows = SYMBOLS.load("test", "detailed", 24, captions_per_image=3)
    captions = [image_captions[: 1 + number % 3] for number, image_captions in enumerate(rows["caption"])]
    texts = [(number, text) for number, image_captions in enumerate(captions) for text in image_captions]
    corpus_weights = model.weights([text for _, text in texts])
    query_weights = [model.weights([text]) for _, text in texts]
    to_text, to_image = [], []
    for number, image in enumerate(rows["image"]):
        scores = [similarity(model, corpus_weights, image, text) for _, text in texts]
        to_text.append(texts[int(np.argmax(scores))][0] == number)
    for (number, text), weights in zip(texts, query_weights, strict=True):
        scores = [similarity(model, weights, image, text) for image in rows["image"]]
        to_image.append(int(np.argmax(scores)) == number)
    result = measured(model, with_captions(rows, [[*image_captions, " "] for image_captions in captions]), "retrieval")
    assert result["metrics"]["image_to_text_recall@1"] == np.mean(to_text) and 0.1 < np.mean(to_text) <= 1
    assert result["metrics"]["text_to_image_recall@1"] == np.mean(to_image) and 0.1 < np.mean(to_image) < 1
    assert result["num_captions"] == result["texts"]["number"] == len(texts)  # once for all experts
    require_weights(model, result, corpus=[corpus_weights], queries=query_weights)


def test_pairs(model):
    rows = symbols.load_minimal_pairs("test", 40)
    scores, weights = {name: [] for name in ("text", "image", "group")}, []
    for row in rows:
        images, captions = ([row[f"{column}_{side}"] for side in range(2)] for column in ("image", "caption"))
        weights.append(model.weights(captions))
        (a0, a1), (b0, b1) = ([similarity(model, weights[-1], image, text) for text in captions] for image in images)
        scores["text"].append(a0 > a1 and b1 > b0)
        scores["image"].append(a0 > b0 and b1 > a1)
        scores["group"].append(scores["text"][-1] and scores["image"][-1])
    result = measured(model, rows, "pairs")
    require_weights(model, result, pairs=weights)
    for name, right in scores.items():
        assert result["metrics"][name] == np.mean(right) and 0.45 < np.mean(right) < 1
    for attribute in symbols.DIFFERENCES:
        of = [right for right, row in zip(scores["group"], rows, strict=True) if row["attribute"] == attribute]
        assert result["metrics"][f"group/{attribute}"] == np.mean(of)


def test_linear_probe(model):
    """On the features of all experts, side by side."""
    parts, known = [pictures(110, "train"), pictures(40)], []
    for part in parts:
        features = [np.concatenate([embed(image) for embed, _ in model.experts]) for image in part["image"]]
        known += [np.stack(features), [CLASSES.index(name) for name in part["caption"]]]
    expected = linear_probe_metrics(*known)
    options = {"classes": CLASSES, "load_train": lambda: (parts[0], 0)}
    assert measured(model, parts[1], "linear_probe", **options)["metrics"] == expected and expected["accuracy"] > 0.3


def test_scores_of_a_typed_list(model, tmp_path):
    """On the page of `app.page`: the softmax of the summed logits, with the experts' own temperatures."""
    image, labels = SYMBOLS.load("test", "web", 1)["image"][0], ["seven", "four", TOOLS[0]]
    image.save(tmp_path / "image.png")
    scores = label_scores(model.measured, tmp_path / "image.png", "\n".join(labels), "a {}")
    logits = [similarity(model, model.weights(labels), image, f"a {label}") for label in labels]
    np.testing.assert_allclose(list(scores.values()), torch.tensor(logits).softmax(0), rtol=1e-4)


# ---- mixtures


def test_released_routing_takes_the_mean_of_the_prompts_of_each_class(mixture):
    """Against the authors' formula on one class after the other; the paper's routing takes the names alone."""
    folder, encoder, centers = mixture
    classes, sums = list(symbols.KINDS), [0.0, 0.0]
    for name in classes:
        mean = np.mean(encoder.encode(prompts(name)), axis=0)
        distances = [float(np.linalg.norm(mean / np.linalg.norm(mean) - center)) for center in centers]
        nearest = int(np.argmin(distances))
        sums[nearest] += math.exp(-distances[nearest] * 5)
    released, paper = (opened(folder / "mixture", changes={"routing": routing}) for routing in ("released", "paper"))
    weights = np.exp(np.array(sums) / 8) * released.scales
    found = released.weights([classes], TEMPLATES)
    np.testing.assert_allclose(found[0], weights / weights.sum(), atol=1e-6)
    assert not np.allclose(found, released.weights([classes]), atol=1e-4)  # of the names alone
    assert np.array_equal(paper.weights([classes], TEMPLATES), paper.weights([classes]))
    assert not np.allclose(found, paper.weights([classes]), atol=1e-4)


def test_one_mixture_is_measured_with_both_routings(mixture, tmp_path, monkeypatch):
    """By one command, in files of their own, which say it."""
    monkeypatch.setitem(TASKS, "symbols_zero_shot", symbol_tasks(number=40)["symbols_zero_shot"])
    folder, out = mixture[0] / "mixture", tmp_path / "out"
    models = "--models.paper", folder, "--models.released", folder, "--changes.released.routing", "released"
    command("evaluate", out, *models, "--tasks", "symbols_zero_shot")
    paper, released = (json.loads(path.read_text()) for path in sorted(out.glob("*--*.json")))
    assert "changes" not in paper and released["changes"] == {"routing": "released"}
    assert paper["weights"] == released["weights"] and paper["routing_weights"] != released["routing_weights"]
    with pytest.raises(ValueError, match="damaged is not a mixture, so routing cannot be changed"):
        opened(mixture[0] / "damaged", changes={"routing": "paper"})


def test_weights_that_are_not_finite_give_no_score(mixture, tmp_path):
    folder = shutil.copytree(mixture[0] / "mixture", tmp_path / "mixture")
    change_weights(folder / "routing.safetensors", lambda routing: routing["centers"].fill_(math.nan))
    model = opened(folder)
    options, pairs = {"classes": CLASSES, "templates": TEMPLATES}, symbols.load_minimal_pairs("test", 14)
    for task in (
        Task("zero_shot", "", "", lambda: (pictures(4), 0), **options),
        Task("retrieval", "", "", lambda: (SYMBOLS.load("test", "detailed", 4), 0)),
        Task("pairs", "", "", lambda: (pairs, 0)),
    ):
        with pytest.raises(ValueError, match="mixture: the weights of its experts are not finite: its centers, "):
            measure(task, model)


# ---- rows


def test_rows_are_loaded_once_where_they_are_kept():
    loads = []
    task = Task("linear_probe", "", "", lambda: loads.append(None) or (object(), 0))
    task = loaded_once({"a": Task("linear_probe", "", "", task.load, load_train=task.load)})["a"]
    assert task.load() is task.load() and task.load_train() is task.load_train() and len(loads) == 2
    assert loaded_once({"a": Task("pairs", "", "", task.load)})["a"].load_train is None
