"""Zero-shot classification: an image belongs to the class whose name it is most similar to (CLIP, section 3.1)."""

from collections.abc import Sequence

import numpy as np


def class_embeddings(prompt_embeds: np.ndarray) -> np.ndarray:
    """(classes, D), the normalized means over the templates of prompts (classes, templates, D), normalized (CLIP,
    section 3.1.4). Raises a ValueError if a mean is zero."""
    mean = prompt_embeds.mean(axis=1)
    lengths = np.linalg.norm(mean, axis=-1, keepdims=True)
    if not lengths.all():
        raise ValueError("the embeddings of a class's prompts sum to zero: choose other templates")
    return mean / lengths


def class_metrics(labels: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    """`accuracy`, and `mean_per_class_recall` over the classes that occur."""
    from sklearn.metrics import accuracy_score, recall_score

    recall = recall_score(labels, predicted, labels=np.unique(labels), average="macro")
    return {"accuracy": float(accuracy_score(labels, predicted)), "mean_per_class_recall": float(recall)}


def zero_shot_metrics(
    image_embeds: np.ndarray, class_embeds: np.ndarray, labels: np.ndarray, wanted: Sequence[str] = ()
) -> dict[str, float]:
    """Shares of images whose class is found. Of equally similar classes, the first is the most similar, as in NumPy's
    argmax; among the five most similar, the last ones are, as in scikit-learn.

    Args:
        image_embeds: (images, D), normalized.
        class_embeds: (classes, D), normalized.
        labels: (images,), the right class of each.
        wanted: `mean_of_top1_and_top5`, of more than five classes (Kinetics-700), and `roc_auc` of two, whose score is
            the similarity to the second less that to the first (Hateful Memes).

    Returns:
        `class_metrics`; `accuracy_top5` where there are more than five classes; and what is wanted.

    Raises:
        ValueError: `roc_auc` of labels of one class alone.
    """
    from sklearn.metrics import roc_auc_score, top_k_accuracy_score

    labels, classes = np.asarray(labels), np.arange(len(class_embeds))
    similarity = image_embeds @ class_embeds.T
    metrics = class_metrics(labels, similarity.argmax(axis=1))
    if len(classes) > 5:
        metrics["accuracy_top5"] = float(top_k_accuracy_score(labels, similarity, k=5, labels=classes))
    if "mean_of_top1_and_top5" in wanted:
        metrics["mean_of_top1_and_top5"] = (metrics["accuracy"] + metrics["accuracy_top5"]) / 2
    if "roc_auc" in wanted:
        if len(np.unique(labels)) < 2:
            raise ValueError(f"roc_auc needs images of both classes, but all have class {labels[0]}: use more images")
        metrics["roc_auc"] = float(roc_auc_score(labels, similarity[:, 1] - similarity[:, 0]))
    return metrics
