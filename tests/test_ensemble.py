"""A mixture is measured as its experts' similarities summed with the weights that each task's metadata give (MoDE eq. 4
to 7), against plain loops over one image, one text and one expert at a time."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from small_evaluation import damage, plain_embedding, swapped, with_captions
from transformers import AutoProcessor, CLIPModel

from conversion import assemble
from data import symbols
from evaluation import evaluate
from evaluation.ensemble import Ensemble, open_model
from evaluation.linear_probe import linear_probe_metrics
from evaluation.measures import measure
from evaluation.sentence_encoders import TfidfEncoder
from evaluation.tasks import Task
from evaluation.try_out import label_scores

BASE, TEMPERATURE = "training/symbol_clip", 0.2
TEMPLATES = ["{}", "a picture of a {}"]
DIGITS, ARROWS = symbols.KIND_SETS["digit"], symbols.KIND_SETS["arrow"]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """The symbol CLIP for digits and a damaged copy of another temperature for arrows; its encoder and centers."""
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
    captions = [list(symbols.load("train", "detailed", 60, kinds)["caption"]) for kinds in (DIGITS, ARROWS)]
    encoder = TfidfEncoder.fit([text for texts in captions for text in texts], 20, seed=0)
    (folder / "encoder").mkdir()
    encoder.save(folder / "encoder")
    centers = np.stack([encoder.encode(texts).mean(axis=0) for texts in captions])
    assemble.convert(
        [BASE, folder / "damaged"],
        folder / "mixture",
        torch.as_tensor(centers),
        torch.tensor([0, 1]),
        encoder.name,
        folder / "encoder",
        routing="paper",
        routing_temperature=TEMPERATURE,
    )
    return folder, encoder, centers


@pytest.fixture(scope="module")
def ensemble(mixture):
    return open_model(mixture[0] / "mixture", None, 64, torch.device("cpu"))


@pytest.fixture(scope="module")
def experts(mixture):
    """The function that embeds with each expert, and each expert's temperature."""
    places = [BASE, mixture[0] / "damaged"]
    scales = [CLIPModel.from_pretrained(place, dtype=torch.float32).logit_scale.exp().item() for place in places]
    return list(zip(map(plain_embedding, places), scales, strict=True))


@pytest.fixture(scope="module")
def weights_of(mixture):
    """A function of the metadata of one task: the weight of each expert."""
    _, encoder, centers = mixture

    def weights(texts):
        temperature = TEMPERATURE / math.log(len(texts)) if len(texts) > 200 else TEMPERATURE
        similarity = [0.0, 0.0]
        for embed in encoder.encode(list(texts)):
            distances = [float(((embed - center) ** 2).sum()) for center in centers]
            nearest = int(np.argmin(distances))
            similarity[nearest] += math.exp(-distances[nearest] / temperature)
        if len(texts) < 10:
            similarity = [value * math.exp(0.5 - math.sqrt(len(texts))) for value in similarity]
        return [math.exp(value) / sum(map(math.exp, similarity)) for value in similarity]

    return weights


def similarity(experts, weights, image, text):
    """Of an image and a text, by hand."""
    return sum(w * scale * (embed(image) @ embed(text)) for w, (embed, scale) in zip(weights, experts, strict=True))


def mean_weights(experts, weights):
    """What a result tells of the weights of several tasks: those of the cosine similarities, in the mean."""
    scaled = np.array(weights) * [scale for _, scale in experts]
    return pytest.approx(list((scaled / scaled.sum(axis=1, keepdims=True)).mean(axis=0)), abs=1e-6)


def pictures(split, number):
    rows = symbols.load(split, "detailed", number, DIGITS + ARROWS, two=False)
    return rows.remove_columns("caption").rename_column("kind", "caption")


def test_zero_shot(ensemble, experts, weights_of):
    rows, classes = pictures("test", 40), [*ARROWS[::-1], *DIGITS[::-1]]
    weights = weights_of(classes)
    prototypes = []  # (expert, class)
    for embed, _ in experts:
        means = [np.mean([embed(template.format(name)) for template in TEMPLATES], axis=0) for name in classes]
        prototypes.append([mean / np.linalg.norm(mean) for mean in means])
    right = []
    for row in rows:
        scores = np.zeros(len(classes))
        for weight, (embed, scale), of_expert in zip(weights, experts, prototypes, strict=True):
            image = embed(row["image"])
            scores += [weight * scale * (image @ prototype) for prototype in of_expert]
        right.append(classes[scores.argmax()] == row["caption"])
    task = Task("zero_shot", "", "", lambda: (rows, 0), classes=classes, templates=TEMPLATES)
    result = measure(task, ensemble)
    assert result["metrics"]["accuracy"] == np.mean(right) and 0.4 < np.mean(right) < 1
    assert result["routing_weights"] == {"classes": mean_weights(experts, [weights])}
    next_class = dict(zip(classes, swapped(classes), strict=True))
    wrong = with_captions(rows, [next_class[name] for name in rows["caption"]])
    task = Task("zero_shot", "", "", lambda: (wrong, 0), classes=classes, templates=TEMPLATES)
    assert measure(task, ensemble)["metrics"]["accuracy"] < np.mean(right) - 0.3


def test_scores_of_a_typed_list(ensemble, experts, weights_of, tmp_path):
    """On the page of `evaluation.app`: the softmax of the summed logits, with the experts' own temperatures."""
    image, labels = symbols.load("test", "web", 1)["image"][0], ["seven", "four", ARROWS[0]]
    image.save(tmp_path / "image.png")
    scores = label_scores(ensemble, tmp_path / "image.png", "\n".join(labels), "a {}")
    logits = [similarity(experts, weights_of(labels), image, f"a {label}") for label in labels]
    np.testing.assert_allclose(list(scores.values()), torch.tensor(logits).softmax(0), rtol=1e-4)


def test_zero_shot_groups(ensemble, experts, weights_of):
    """Each group is routed by its own class names."""
    rows = pictures("test", 60)
    groups = {"arrow": ARROWS[::-1], "digit": DIGITS}
    classes = [name for pair in zip(DIGITS, ARROWS, strict=True) for name in pair]
    weights = {group: weights_of(names) for group, names in groups.items()}
    assert weights["digit"][0] > 0.5 > weights["arrow"][0]
    right = {}
    for group, names in groups.items():
        prototypes = [
            [sum(embed(template.format(name)) for template in TEMPLATES) for name in names] for embed, _ in experts
        ]
        right[group] = []
        for row in rows:
            if row["caption"] in names:
                scores = np.zeros(len(names))
                for weight, (embed, scale), of_expert in zip(weights[group], experts, prototypes, strict=True):
                    image = embed(row["image"])
                    scores += [weight * scale * (image @ p) / np.linalg.norm(p) for p in of_expert]
                right[group].append(names[scores.argmax()] == row["caption"])
    group_of_class = {name: group for group, names in groups.items() for name in names}
    options = {"classes": classes, "templates": TEMPLATES, "group_of_class": group_of_class}
    result = measure(Task("zero_shot_groups", "", "", lambda: (rows, 0), **options), ensemble)
    accuracies = {group: np.mean(of_group) for group, of_group in right.items()}
    expected = {"accuracy": np.mean(list(accuracies.values()))}
    assert result["metrics"] == expected | {f"accuracy/{group}": value for group, value in accuracies.items()}
    assert 0.3 < accuracies["digit"] < 1
    assert result["routing_weights"] == {"classes": mean_weights(experts, list(weights.values()))}


def test_released_routing_takes_the_mean_of_the_prompts_of_each_class(mixture, experts):
    """Against the authors' formula on one class after the other; the paper's routing takes the names alone."""
    folder, encoder, centers = mixture
    classes = list(symbols.KINDS)
    sums = [0.0, 0.0]
    for name in classes:
        mean = np.mean(encoder.encode([template.format(name) for template in TEMPLATES]), axis=0)
        distances = [float(np.linalg.norm(mean / np.linalg.norm(mean) - center)) for center in centers]
        nearest = int(np.argmin(distances))
        sums[nearest] += math.exp(-distances[nearest] * 5)
    weights = [math.exp(value / 8) / sum(math.exp(value / 8) for value in sums) for value in sums]
    released = open_model(folder / "mixture", None, 64, torch.device("cpu"), changes={"routing": "released"})
    found = released.weights([classes], TEMPLATES)
    assert found.mean(axis=0).tolist() == mean_weights(experts, [weights])
    assert not np.allclose(found, released.weights([classes]), atol=1e-4)  # of the names alone
    paper = open_model(folder / "mixture", None, 64, torch.device("cpu"))
    assert np.array_equal(paper.weights([classes], TEMPLATES), paper.weights([classes]))
    assert not np.allclose(found, paper.weights([classes]), atol=1e-4)


def test_what_cannot_be_changed_is_refused(mixture):
    for model, changes, message in (
        ("mixture", {"experts": []}, "another routing, .*, not experts"),
        ("mixture", {"routing": "other"}, "routing must be paper or released, got 'other'"),
        ("mixture", {"routing_temperature": "hot"}, "routing_temperature"),
        ("damaged", {"routing": "paper"}, "damaged is no mixture, whose routing could be changed"),
    ):
        with pytest.raises(ValueError, match=message):
            open_model(mixture[0] / model, None, 64, torch.device("cpu"), changes=changes)


def test_one_mixture_is_measured_with_both_routings(mixture, tmp_path):
    """By the command, in files of their own, which say it."""
    options = ["--model", str(mixture[0] / "mixture"), "--tasks", "symbols_zero_shot", "--output-dir", str(tmp_path)]
    evaluate.main([*options, "--name", "paper"])
    evaluate.main([*options, "--name", "released", "--change", "routing=released"])
    paper, released = (json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json")))
    assert "changes" not in paper and released["changes"] == {"routing": "released"}
    assert paper["weights"] == released["weights"] and paper["routing_weights"] != released["routing_weights"]
    with pytest.raises(SystemExit, match="another changes, {'routing': 'released'} and not None"):
        evaluate.main([*options, "--name", "released"])


def test_retrieval(ensemble, experts, weights_of):
    """Captions are found with the weights of all of them, images with those of the caption that asks."""
    rows = symbols.load("test", "detailed", 40)
    captions = list(rows["caption"])
    of_corpus, of_query = weights_of(captions), [weights_of([caption]) for caption in captions]
    scores = np.zeros((2, 40, 40))  # (weights, image, caption)
    for number, (embed, scale) in enumerate(experts):
        images, texts = np.stack([embed(i) for i in rows["image"]]), np.stack([embed(text) for text in captions])
        for text in range(40):
            for image in range(40):
                cosine = images[image] @ texts[text]
                scores[0, image, text] += of_corpus[number] * scale * cosine
                scores[1, image, text] += of_query[text][number] * scale * cosine
    to_text = np.mean(scores[0].argmax(axis=1) == np.arange(40))
    to_image = np.mean(scores[1].argmax(axis=0) == np.arange(40))
    result = measure(Task("retrieval", "", "", lambda: (rows, 0)), ensemble)
    assert result["metrics"]["image_to_text_recall@1"] == to_text > 0.2
    assert result["metrics"]["text_to_image_recall@1"] == to_image > 0.2
    assert result["texts"]["number"] == 40  # once for all experts
    expected = {"corpus": mean_weights(experts, [of_corpus]), "queries": mean_weights(experts, of_query)}
    assert result["routing_weights"] == expected
    wrong = with_captions(rows, swapped(captions))
    of_wrong = measure(Task("retrieval", "", "", lambda: (wrong, 0)), ensemble)["metrics"]
    assert of_wrong["image_to_text_recall@1"] < to_text - 0.1
    assert of_wrong["text_to_image_recall@1"] < to_image - 0.1


def test_pairs(ensemble, experts, weights_of):
    rows = symbols.load_minimal_pairs("test", 30)
    scores, all_weights = {name: [] for name in ("text", "image", "group")}, []
    for row in rows:
        images, captions = ([row[f"{column}_{side}"] for side in range(2)] for column in ("image", "caption"))
        weights = weights_of(captions)
        all_weights.append(weights)
        (a0, a1), (b0, b1) = ([similarity(experts, weights, image, text) for text in captions] for image in images)
        scores["text"].append(a0 > a1 and b1 > b0)
        scores["image"].append(a0 > b0 and b1 > a1)
        scores["group"].append(scores["text"][-1] and scores["image"][-1])
    result = measure(Task("pairs", "", "", lambda: (rows, 0)), ensemble)
    assert result["routing_weights"] == {"pairs": mean_weights(experts, all_weights)}
    names = {"caption_0": "caption_1", "caption_1": "caption_0"}
    of_swapped = measure(Task("pairs", "", "", lambda: (rows.rename_columns(names), 0)), ensemble)["metrics"]
    for name, right in scores.items():
        assert result["metrics"][name] == np.mean(right) > 0.5
        assert of_swapped[name] <= 1 - np.mean(right)


def test_linear_probe(ensemble, experts):
    """On the features of all experts, side by side."""
    parts = [pictures("train", 120), pictures("test", 60)]

    def score(test):
        features = [
            np.stack([np.concatenate([e(i) for e, _ in experts]) for i in p["image"]]) for p in (parts[0], test)
        ]
        labels = [[(DIGITS + ARROWS).index(name) for name in part["caption"]] for part in (parts[0], test)]
        return linear_probe_metrics(features[0], labels[0], features[1], labels[1])

    def measured(test):
        load_train = lambda: (parts[0], 0)  # noqa: E731
        task = Task("linear_probe", "", "", lambda: (test, 0), classes=DIGITS + ARROWS, load_train=load_train)
        return measure(task, ensemble)["metrics"]

    expected = score(parts[1])
    assert measured(parts[1]) == expected and expected["accuracy"] > 0.2
    wrong = with_captions(parts[1], swapped(list(parts[1]["caption"])))
    assert measured(wrong)["accuracy"] < expected["accuracy"] - 0.1


def test_experts_that_change_between_two_tasks_are_an_error(mixture, tmp_path):
    folder = shutil.copytree(mixture[0] / "mixture", tmp_path / "mixture")
    opened = open_model(folder, None, 64, torch.device("cpu"))
    opened.map(lambda e: e.texts(["a star"]))
    damage(folder / "expert_1", lambda weights: weights["text_projection.weight"].mul_(-1))
    with pytest.raises(ValueError, match="expert_1 was changed while it was measured"):
        opened.map(lambda e: e.texts(["a star"]))


def test_what_a_folder_is_opened_as(ensemble, mixture):
    assert isinstance(ensemble, Ensemble)
    assert not isinstance(open_model(mixture[0] / "damaged", None, 64, torch.device("cpu")), Ensemble)
