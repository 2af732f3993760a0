"""Zero-shot classification: an image belongs to the class whose name it is most similar to (CLIP, section 3.1)."""

import numpy as np
from sklearn.metrics import accuracy_score, recall_score, top_k_accuracy_score


def class_embeddings(prompt_embeds: np.ndarray) -> np.ndarray:
    """One embedding a class, from its name in several templates (CLIP, section 3.1.4).

    Args:
        prompt_embeds: (classes, templates, D), normalized.

    Returns:
        (classes, D): the normalized mean over the templates.
    """
    mean = prompt_embeds.mean(axis=1)
    return mean / np.linalg.norm(mean, axis=-1, keepdims=True)


def zero_shot_metrics(image_embeds: np.ndarray, class_embeds: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Shares of images whose class is found.

    Args:
        image_embeds: (images, D), normalized.
        class_embeds: (classes, D), normalized.
        labels: (images,), the right class of each.

    Returns:
        `accuracy`; `accuracy_top5` where there are more than five classes; `mean_per_class_recall`, over the classes
        that occur.

    Raises:
        ValueError: there are not as many labels as images, a label is no class, or an embedding is not finite.
    """
    labels = np.asarray(labels)
    if len(labels) != len(image_embeds):
        raise ValueError(f"{len(labels)} labels for {len(image_embeds)} images")
    classes = np.arange(len(class_embeds))
    if not np.isin(labels, classes).all():
        raise ValueError(f"labels go from {labels.min()} to {labels.max()}, but there are {len(classes)} classes")
    if not (np.isfinite(image_embeds).all() and np.isfinite(class_embeds).all()):
        raise ValueError("image_embeds and class_embeds must be finite")
    similarity = image_embeds @ class_embeds.T
    predicted = similarity.argmax(axis=1)
    metrics = {
        "accuracy": float(accuracy_score(labels, predicted)),
        "mean_per_class_recall": float(recall_score(labels, predicted, labels=np.unique(labels), average="macro")),
    }
    if len(classes) > 5:
        metrics["accuracy_top5"] = float(top_k_accuracy_score(labels, similarity, k=5, labels=classes))
    return metrics
