"""Pairs of captioned images that differ in one attribute: does the model see it?"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from clip_moe.evaluation.retrieval import TIE


def pair_metrics(
    image_embeds: np.ndarray,
    text_embeds: np.ndarray,
    attributes: Sequence[str] | None,
    score: Literal["text", "image", "group"] = "group",
) -> dict[str, float]:
    """Winoground's three scores (Thrush et al. 2022, equations 1 to 3); `image` is MMVP-VLM's (Tong et al. 2024).

    Of a pair, `text` asks that each image is closer to its own caption than to the other, `image` that each caption is
    closer to its own image than to the other, `group` both. Ties, to 1e-6, count as wrong. Chance is 1/4, 1/4 and 1/6.

    Args:
        image_embeds, text_embeds: (pairs, 2, D), normalized.
        attributes: (pairs,), what differs in each; `SCORE/ATTRIBUTE` is then the share of those that differ in it.
        score: that is also told for each attribute.
    """
    similarity = np.einsum("pid,ptd->pit", image_embeds, text_embeds)  # (pairs, image, text)
    own = np.diagonal(similarity, axis1=1, axis2=2)
    other_text = similarity[:, [0, 1], [1, 0]]  # of each image
    other_image = similarity[:, [1, 0], [0, 1]]  # of each text
    text, image = (own > other_text + TIE).all(axis=1), (own > other_image + TIE).all(axis=1)
    scores = {"text": text, "image": image, "group": text & image}
    metrics = {name: float(right.mean()) for name, right in scores.items()}
    for attribute in sorted(set(() if attributes is None else attributes)):
        metrics[f"{score}/{attribute}"] = float(scores[score][np.array(attributes) == attribute].mean())
    return metrics
