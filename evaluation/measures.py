"""One function for each kind of task: what it embeds, and what metrics it makes of the embeddings."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset

from clip_moe.conversion.processors import own_template
from clip_moe.data.overview import ceilings
from clip_moe.data.texts import present_captions
from clip_moe.data.tokenizer import ReadTexts, read_texts
from clip_moe.engine.provenance import trainings
from clip_moe.evaluation.embedder import Embedder
from clip_moe.evaluation.ensemble import Ensemble
from clip_moe.evaluation.linear_probe import linear_probe_metrics
from clip_moe.evaluation.pairs import pair_metrics
from clip_moe.evaluation.retrieval import batch_loss, retrieval_metrics
from clip_moe.evaluation.task import Task
from clip_moe.evaluation.texts import count_texts, require_told_apart
from clip_moe.evaluation.zero_shot import class_embeddings, zero_shot_metrics

Embeds = Embedder | Ensemble


# The `metrics` of a task; `weights` of an ensemble's experts, by what they weigh; `texts`, the `TextCounts` if it has
# texts; `chance`, what guessing scores in primary metrics; `train_skipped`, the training images that could not be read;
# and what else a result has
Measured = dict[str, Any]


def measure(task: Task, model: Embeds) -> dict[str, Any]:
    """The metrics of a task, its number of samples and of those that could not be read, what the tokenizer made of its
    texts, of retrieval the number of captions and the contrastive loss of a model whose training is recorded, and of an
    ensemble the mean weights that the metadata gave its experts. Raises as `require_told_apart`."""
    own = {}
    if task.kind == "zero_shot" and not task.templates:
        own["template"] = own_template(model.tokenizers[0])
        task = replace(task, templates=[own["template"]])
    rows, num_skipped = task.load()
    measured = MEASURES[task.kind](task, model, rows)
    result = {"metrics": measured.pop("metrics"), "num_samples": len(rows), **own}
    if task.group_of_class:
        groups = Counter(task.group_of_class[task.classes[label]] for label in _labels(task, rows))
        result["group_samples"] = dict(groups)
    num_skipped += measured.pop("train_skipped", 0)
    weights, counts = measured.pop("weights", {}), measured.pop("texts", None)
    result |= {**measured, "num_skipped": num_skipped}
    if counts is not None:
        result["texts"] = counts.model_dump()
    if isinstance(model, Ensemble):
        image_weights = weights.pop("images", None)
        if image_weights is not None:  # texts then have no weights but the experts' temperatures
            weights = {"images": image_weights.reshape(-1, image_weights.shape[-1])}
        result["routing_weights"] = {name: array.mean(axis=0).tolist() for name, array in weights.items()}
    return result


def embed_both(model: Embeds, rows: Dataset, texts: Sequence[str]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The images (rows, D) and the texts (texts, D), by each expert."""
    embeds = model.map(lambda expert: (expert.images(rows), expert.texts(texts)))
    return [images for images, _ in embeds], [text_embeds for _, text_embeds in embeds]


def measure_zero_shot(task: Task, model: Embeds, rows: Dataset) -> Measured:
    """Each image against the names of all classes, or of its own group of them, for which an ensemble is routed. With
    groups, `accuracy` is the mean over those that have images."""
    prompts = [template.format(name) for name in task.classes for template in task.templates]
    tokenized = _read_texts(model, prompts)
    if "label" not in rows.column_names:  # ImageNet's authors call two classes "sunglasses"
        require_told_apart(task, tokenized)
    owners = np.repeat(np.arange(len(task.classes)), len(task.templates)).tolist()
    groups = [task.group_of_class.get(name) for name in task.classes for _ in task.templates]
    counts = count_texts(task, "prompts", tokenized, owners, groups)
    images, texts = embed_both(model, rows, prompts)
    shape = (len(task.classes), len(task.templates), -1)
    classes = [class_embeddings(part.reshape(shape)) for part in texts]
    labels, group_of_class = _labels(task, rows), np.array([task.group_of_class.get(name, "") for name in task.classes])
    image_weights, weights, metrics, chances = model.image_weights(rows), [], {}, []
    for group in dict.fromkeys(group_of_class[labels].tolist()):
        members = np.flatnonzero(group_of_class == group)
        chosen = np.isin(labels, members)
        most = np.bincount(labels[chosen]).max() / chosen.sum()  # a model may name the largest class of all
        chances.append(max(1 / len(members), most))
        weights.append(model.weights([[task.classes[member] for member in members]], task.templates)[0])
        chosen_weights = None if image_weights is None else image_weights[chosen]
        metrics[group] = zero_shot_metrics(
            model.image_side([part[chosen] for part in images], chosen_weights),
            model.text_side([part[members] for part in classes], weights[-1][None]),
            np.searchsorted(members, labels[chosen]),
            task.metrics,
        )
    if task.group_of_class:
        accuracies = {f"accuracy/{group}": of_group["accuracy"] for group, of_group in metrics.items()}
        metrics = {"": {"accuracy": float(np.mean(list(accuracies.values()))), **accuracies}}
    routed = {"classes": np.array(weights), "images": image_weights}
    chance = {"accuracy": float(np.mean(chances))}
    return {"metrics": metrics[""], "chance": chance, "weights": routed, "texts": counts}


def _read_texts(model: Embeds, texts: list[str]) -> ReadTexts:
    """The tokens of texts. Experts with tokenizers of their own tell apart what any of them does, and cut likewise."""
    first, *others = [read_texts(tokenizer, texts) for tokenizer in model.tokenizers]
    for other in others:
        first.digests[:] = [mine + its for mine, its in zip(first.digests, other.digests, strict=True)]
        first.is_cut[:] = [mine or its for mine, its in zip(first.is_cut, other.is_cut, strict=True)]
    return replace(first, max_length=min(tokens.max_length for tokens in (first, *others)))


def measure_retrieval(task: Task, model: Embeds, rows: Dataset) -> Measured:
    """Each image against all captions, and each caption against all images."""
    captions = [present_captions(caption) for caption in rows["caption"]]
    image_of_text = np.repeat(np.arange(len(captions)), [len(texts) for texts in captions])
    corpus, text_of_pair, owners = [text for texts in captions for text in texts], None, image_of_text.tolist()
    if task.equal_captions_are_right:
        number_of = {text: number for number, text in enumerate(dict.fromkeys(corpus))}
        pairs = dict.fromkeys(zip(owners, map(number_of.get, corpus), strict=True))  # an image may repeat a caption
        image_of_text, text_of_pair = [image for image, _ in pairs], [text for _, text in pairs]
        corpus, owners = list(number_of), list(number_of.values())
    tokenized = _read_texts(model, corpus)
    counts = count_texts(task, "captions", tokenized, owners)
    if task.equal_captions_are_right:
        counts.best = ceilings(captions, dict(zip(corpus, tokenized.digests, strict=True)))
    images, texts = embed_both(model, rows, corpus)
    # A query is routed by itself, candidates are routed together (MoDE eq. 7)
    weights = {"corpus": model.weights([corpus]), "queries": model.weights([[text] for text in corpus])}
    weights["images"] = model.image_weights(rows)
    metrics = retrieval_metrics(
        model.image_side(images, weights["images"]),
        model.text_side(texts, weights["corpus"]),
        image_of_text,
        query_embeds=model.text_side(texts, weights["queries"]),
        wanted=task.metrics,
        text_of_pair=text_of_pair,
    )
    share = len(image_of_text) / (len(rows) * counts.number)  # of pairs of an image and a text that are right
    chance = {"image_to_text_recall@1": share, "text_to_image_recall@1": share}
    measured = {"metrics": metrics, "chance": chance, "weights": weights, "texts": counts}
    measured["num_captions"] = counts.number
    if isinstance(model, Embedder) and (training := trainings(Path(model.source)).get(Path(model.source))):
        row_of = {text: row for row, text in enumerate(corpus)}
        first = [row_of[image_captions[0]] for image_captions in captions]
        measured["batch_loss"] = batch_loss(images[0], texts[0][first], first, training.batch_size)
    return measured


def measure_pairs(task: Task, model: Embeds, rows: Dataset) -> Measured:
    """The two images of a pair against its two captions."""
    captions = [list(rows[f"caption_{side}"]) for side in range(2)]
    sides_of_texts, pairs_of_texts = np.divmod(np.arange(2 * len(rows)), len(rows))
    tokenized = _read_texts(model, [*captions[0], *captions[1]])
    counts = count_texts(task, "captions", tokenized, sides_of_texts.tolist(), pairs_of_texts.tolist())
    embeds = model.map(
        lambda expert: (
            np.stack([expert.images(rows, f"image_{side}") for side in range(2)], axis=1),
            np.stack([expert.texts(part) for part in captions], axis=1),
        )
    )
    weights = model.weights(list(zip(captions[0], captions[1], strict=True)))
    sides = [model.image_weights(rows, f"image_{side}") for side in range(2)]
    image_weights = None if sides[0] is None else np.stack(sides, axis=1)
    metrics = pair_metrics(
        model.image_side([images for images, _ in embeds], image_weights),
        model.text_side([texts for _, texts in embeds], weights[:, None]),
        list(rows["attribute"]) if "attribute" in rows.column_names else None,
        score=next(iter(task.primary)),
    )
    chance = {"text": 1 / 4, "image": 1 / 4, "group": 1 / 6}
    routed = {"pairs": weights, "images": image_weights}
    return {"metrics": metrics, "chance": chance, "weights": routed, "texts": counts}


def measure_linear_probe(task: Task, model: Embeds, rows: Dataset) -> Measured:
    """A classifier that is fitted to the embeddings of training images."""
    train_rows, num_skipped = task.load_train()
    embeds = model.map(lambda expert: (expert.images(train_rows), expert.images(rows)))
    metrics = linear_probe_metrics(
        model.features([train_images for train_images, _ in embeds]),
        _labels(task, train_rows),
        model.features([images for _, images in embeds]),
        _labels(task, rows),
        device=model.device,
    )
    return {"metrics": metrics, "train_skipped": num_skipped}


MEASURES = {
    "zero_shot": measure_zero_shot,
    "zero_shot_groups": measure_zero_shot,
    "retrieval": measure_retrieval,
    "pairs": measure_pairs,
    "linear_probe": measure_linear_probe,
}


def _labels(task: Task, rows: Dataset) -> np.ndarray:
    """(rows,) the number of each row's class."""
    if "label" in rows.column_names:
        return np.array(rows["label"])
    number_of_class = {name: number for number, name in enumerate(task.classes)}
    return np.array([number_of_class[name] for name in rows["caption"]])
