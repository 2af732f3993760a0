"""Winoground's scores of pairs of captioned images, with MMVP-VLM's, as a module of the `evaluate` library.

>>> score = evaluate.load("evaluation/pair_score.py")
>>> score.compute(predictions=image_embeds, references=text_embeds, attributes=patterns, score="image")
"""

import datasets
import evaluate
import numpy as np

# Relative, and here also what pairs.py imports: `evaluate` copies the files that this one names.
from .pairs import pair_metrics
from .retrieval import TIE, require_unit_length

DESCRIPTION = f"""Of a pair, `text` asks that each image is closer to its own caption than to the other, `image` that
each caption is closer to its own image than to the other, `group` both. Ties, to {TIE:g}, count as wrong."""
INPUTS = """
Args:
    predictions: the embeddings of each pair's two images, of length 1.
    references: those of its two captions, in the same order.
    attributes: what differs in each pair.
    score: that is also told for each attribute: text, image or group.

Returns:
    `text`, `image` and `group`, and `SCORE/ATTRIBUTE`.
"""


class PairScore(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        two = datasets.List(datasets.List(datasets.Value("float64")))
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": two, "references": two}),
        )

    def _compute(self, predictions, references, attributes=None, score="group") -> dict[str, float]:
        images, texts = np.asarray(predictions), np.asarray(references)
        require_unit_length(predictions=images, references=texts)
        return pair_metrics(images, texts, attributes, score)
