"""`measure` of every kind of task, on the symbol CLIP, against plain loops over one image and one text at a time, which
give other scores where captions or classes are swapped."""

import datasets
import numpy as np
import pytest
import torch
from small_evaluation import plain_embedding, swapped, with_captions

from data import symbols
from evaluation.benchmarks.specs import BENCHMARKS
from evaluation.embedder import Embedder
from evaluation.linear_probe import linear_probe_metrics
from evaluation.measures import METRICS, measure
from evaluation.tasks import TASKS, Task, loaded_once

MODEL = "training/symbol_clip"
DIGITS, TOOLS = symbols.KIND_SETS["digit"], symbols.KIND_SETS["tool"]
# Not in the order of `symbols.KINDS`, and as many templates as there are not classes
CLASSES, TEMPLATES = [*TOOLS[::-1], *DIGITS[::-1]], ["{}", "a picture of a {}", "{} on white"]


@pytest.fixture(scope="module")
def embedder():
    return Embedder(MODEL, None, 7, torch.device("cpu"))


@pytest.fixture(scope="module")
def embed():
    return plain_embedding(MODEL)


def pictures(number, split="test"):
    rows = symbols.load(split, "detailed", number, CLASSES, two=False)
    return rows.remove_columns("caption").rename_column("kind", "caption")


def measured(embedder, rows, kind, **more):
    metrics = measure(Task(kind, "", "", lambda: (rows, 0), **more), embedder)["metrics"]
    assert {metric.partition("/")[0] for metric in metrics} <= set(METRICS[kind])
    return metrics


def test_metrics_of_benchmarks_are_those_of_their_kinds():
    assert all(set(benchmark.metrics) <= set(METRICS[benchmark.kind]) for benchmark in BENCHMARKS.values())


def test_zero_shot(embedder, embed):
    rows = pictures(120)
    task = Task("zero_shot", "", "", lambda: (rows, 3), classes=CLASSES, templates=TEMPLATES)
    means = [np.mean([embed(template.format(name)) for template in TEMPLATES], axis=0) for name in CLASSES]
    found = []
    for row in rows:
        image = embed(row["image"])
        scores = [image @ mean / np.linalg.norm(mean) for mean in means]
        found.append([CLASSES[place] for place in np.argsort(scores)[::-1]])
    result = measure(task, embedder)
    right = [kinds[0] == row["caption"] for kinds, row in zip(found, rows, strict=True)]
    assert result["metrics"]["accuracy"] == np.mean(right) and 0.6 < np.mean(right) < 1
    in_five = np.mean([row["caption"] in kinds[:5] for kinds, row in zip(found, rows, strict=True)])
    assert result["metrics"]["accuracy_top5"] == in_five
    assert (result["num_samples"], result["num_skipped"]) == (120, 3)
    other = measured(embedder, rows, "zero_shot", classes=swapped(CLASSES), templates=TEMPLATES)
    assert other == result["metrics"]  # classes of another order
    next_class = dict(zip(CLASSES, swapped(CLASSES), strict=True))
    wrong = with_captions(rows, [next_class[name] for name in rows["caption"]])
    of_wrong = measured(embedder, wrong, "zero_shot", classes=CLASSES, templates=TEMPLATES)
    for name, value in of_wrong.items():
        assert value < result["metrics"][name] - 0.3, name


def test_zero_shot_groups(embedder, embed):
    """Images meet the kinds of their own group alone, however many these have, and every group counts the same."""
    rows = pictures(120)
    group_of = {kind: "seen" if kind in DIGITS else "unseen" for kind in CLASSES} | {TOOLS[0]: "alone"}
    options = {"classes": CLASSES, "templates": TEMPLATES, "group_of_class": group_of}
    means = {name: np.mean([embed(template.format(name)) for template in TEMPLATES], axis=0) for name in CLASSES}
    right = {"seen": [], "unseen": [], "alone": []}
    for row in rows:
        group, image = group_of[row["caption"]], embed(row["image"])
        scores = {name: image @ mean / np.linalg.norm(mean) for name, mean in means.items() if group_of[name] == group}
        right[group].append(max(scores, key=scores.get) == row["caption"])
    accuracies = {name: np.mean(of_group) for name, of_group in right.items()}
    result = measure(Task("zero_shot_groups", "", "", lambda: (rows, 3), **options), embedder)
    expected = {f"accuracy/{name}": value for name, value in accuracies.items()}
    assert result["metrics"] == {"accuracy": pytest.approx(np.mean(list(accuracies.values()))), **expected}
    assert accuracies["alone"] == 1 and 0.6 < accuracies["unseen"] < 1 and len(set(map(len, right.values()))) == 3
    assert (result["num_samples"], result["num_skipped"]) == (120, 3)
    whole = measured(embedder, rows, "zero_shot", classes=CLASSES, templates=TEMPLATES)
    assert np.mean(sum(right.values(), [])) > whole["accuracy"]  # for candidates are fewer
    other = measured(embedder, rows, "zero_shot_groups", **options | {"classes": swapped(CLASSES)})
    assert other == result["metrics"]  # classes of another order
    seen = rows.filter(lambda row: group_of[row["caption"]] == "seen")
    of_seen = measured(embedder, seen, "zero_shot_groups", **options)  # groups without images do not count
    assert of_seen == {name: accuracies["seen"] for name in ("accuracy", "accuracy/seen")}


def test_retrieval(embedder, embed):
    """Images with one to three captions."""
    rows = symbols.load("test", "detailed", 60, captions_per_image=3)
    captions = [of_image[: 1 + number % 3] for number, of_image in enumerate(rows["caption"])]
    rows = with_captions(rows, captions)
    images = [embed(image) for image in rows["image"]]
    texts = [(number, embed(text)) for number, of_image in enumerate(captions) for text in of_image]
    to_text = [texts[np.argmax([image @ text for _, text in texts])][0] == i for i, image in enumerate(images)]
    to_image = [np.argmax([image @ text for image in images]) == number for number, text in texts]
    result = measure(Task("retrieval", "", "", lambda: (rows, 0)), embedder)
    assert result["metrics"]["image_to_text_recall@1"] == np.mean(to_text) and 0.1 < np.mean(to_text)
    assert result["metrics"]["text_to_image_recall@1"] == np.mean(to_image) and 0.1 < np.mean(to_image) < 1
    assert (result["num_samples"], result["num_captions"]) == (60, 120)
    of_swapped = measured(embedder, with_captions(rows, swapped(captions)), "retrieval")
    for direction, right in (("image_to_text", to_text), ("text_to_image", to_image)):
        assert of_swapped[f"{direction}_recall@1"] < 0.1 < np.mean(right)


def test_captions_of_two_images_swapped(embedder, embed):
    """Recall in one direction is not that in the other, and both fall by what the two lose."""
    rows = symbols.load("test", "detailed", 60)
    images, texts = [embed(image) for image in rows["image"]], [embed(text) for text in rows["caption"]]
    similarity = np.array([[image @ text for text in texts] for image in images])
    order = np.arange(60)
    found = {"image_to_text": similarity.argmax(axis=1) == order, "text_to_image": similarity.argmax(axis=0) == order}
    whole = measured(embedder, rows, "retrieval")
    one, other = np.flatnonzero(found["image_to_text"] & found["text_to_image"])[:2]
    captions = list(rows["caption"])
    captions[one], captions[other] = captions[other], captions[one]
    less = measured(embedder, with_captions(rows, captions), "retrieval")
    for direction, right in found.items():
        assert whole[f"{direction}_recall@1"] == np.mean(right)
        assert less[f"{direction}_recall@1"] == pytest.approx(np.mean(right) - 2 / 60)
    assert whole["image_to_text_recall@1"] != whole["text_to_image_recall@1"]


def test_a_blank_caption_is_no_caption(embedder):
    rows = symbols.load("test", "detailed", 12, captions_per_image=2)
    blank = [[*of_image[:1], " "] for of_image in rows["caption"]]
    alone = with_captions(rows, [of_image[0] for of_image in rows["caption"]])
    rows = with_captions(rows, blank)
    results = [measure(Task("retrieval", "", "", lambda part=part: (part, 0)), embedder) for part in (rows, alone)]
    assert results[0] == results[1] and results[0]["num_captions"] == 12


def test_pairs(embedder, embed):
    rows = symbols.load_minimal_pairs("test", 60)
    scores = {name: [] for name in ("text", "image", "group")}
    for row in rows:
        (a0, a1), (b0, b1) = (
            [embed(row[f"image_{side}"]) @ embed(row[f"caption_{other}"]) for other in range(2)] for side in range(2)
        )
        scores["text"].append(a0 > a1 and b1 > b0)
        scores["image"].append(a0 > b0 and b1 > a1)
        scores["group"].append(scores["text"][-1] and scores["image"][-1])
    result = measure(Task("pairs", "", "", lambda: (rows, 0)), embedder)
    for name, right in scores.items():
        assert result["metrics"][name] == np.mean(right) and 0.55 < np.mean(right) < 1
    for attribute in symbols.DIFFERENCES:
        of = [right for right, row in zip(scores["group"], rows, strict=True) if row["attribute"] == attribute]
        assert result["metrics"][f"group/{attribute}"] == np.mean(of)
    names = {"caption_0": "caption_1", "caption_1": "caption_0"}
    of_swapped = measured(embedder, rows.rename_columns(names), "pairs")
    for name, right in scores.items():
        assert of_swapped[name] <= 1 - np.mean(right) < result["metrics"][name]


def test_linear_probe(embedder, embed):
    parts = [pictures(number, split) for split, number in (("train", 200), ("test", 90))]
    task = Task("linear_probe", "", "", lambda: (parts[1], 2), classes=CLASSES, load_train=lambda: (parts[0], 3))
    features = [np.stack([embed(image) for image in part["image"]]) for part in parts]
    labels = [[CLASSES.index(name) for name in part["caption"]] for part in parts]
    expected = linear_probe_metrics(features[0], labels[0], features[1], labels[1])
    result = measure(task, embedder)
    assert result["metrics"] == expected and 0.5 < expected["accuracy"] < 1
    assert (result["num_samples"], result["num_skipped"]) == (90, 5)
    wrong = with_captions(parts[1], swapped(list(parts[1]["caption"])))
    of_wrong = measured(embedder, wrong, "linear_probe", classes=CLASSES, load_train=lambda: (parts[0], 0))
    assert of_wrong["accuracy"] < expected["accuracy"] - 0.3


def test_no_rows_outlive_the_call_that_loaded_them(monkeypatch):
    """A module that keeps them would give a test what another one made."""
    for number in (3, 5):
        columns = {"image": None, "kind": "star", "caption": "a star"}
        rows = datasets.Dataset.from_list([columns] * number)
        with monkeypatch.context() as patch:
            patch.setattr(symbols, "load", lambda *_, rows=rows, **options: rows)
            patch.setattr(symbols, "load_minimal_pairs", lambda *_, rows=rows, **options: rows)
            for task in (task for name, task in TASKS.items() if name.startswith("symbols")):
                assert len(task.load()[0]) == number
                assert task.load_train is None or len(task.load_train()[0]) == number


def test_kept_rows_are_loaded_once():
    loads = []

    def load():
        loads.append(None)
        return datasets.Dataset.from_dict({"caption": ["a"]}), 0

    task = Task("linear_probe", "", "", load, load_train=load)
    here = loaded_once({"a": task})["a"]
    assert here.load() is here.load() and here.load_train() is here.load_train() and len(loads) == 2
    assert loaded_once({"a": task})["a"].load() is not here.load() and len(loads) == 3
    assert loaded_once({"a": Task("pairs", "", "", load)})["a"].load_train is None
