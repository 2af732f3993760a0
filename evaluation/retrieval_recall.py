"""Recall at k of retrieval between images and texts, as a module of the `evaluate` library.

>>> recall = evaluate.load("evaluation/retrieval_recall.py")
>>> recall.compute(predictions=text_embeds, references=image_of_text, image_embeds=image_embeds)
"""

import datasets
import evaluate
import numpy as np

# Relative: `evaluate` copies the file along.
from .retrieval import TIE, require_unit_length, retrieval_metrics

DESCRIPTION = f"""Recall at k in both directions: the share of queries with a right candidate among the first k. A wrong
candidate as similar as the best right one, to {TIE:g}, counts as before it, so that equal embeddings score nothing."""
INPUTS = """
Args:
    predictions: the texts' embeddings, of length 1.
    references: the image of each text, as its number.
    image_embeds: the images' embeddings, of length 1.
    ks: how many candidates count.

Returns:
    `image_to_text_recall@k` and `text_to_image_recall@k`.
"""


class RetrievalRecall(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        embedding = datasets.List(datasets.Value("float64"))
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": embedding, "references": datasets.Value("int64")}),
        )

    def _compute(self, predictions, references, image_embeds, ks=(1, 5, 10)) -> dict[str, float]:
        images, texts = np.asarray(image_embeds), np.asarray(predictions)
        require_unit_length(predictions=texts, image_embeds=images)
        return retrieval_metrics(images, texts, references, tuple(ks))
