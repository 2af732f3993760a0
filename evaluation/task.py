"""A task: one measure on one dataset."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from datasets import Dataset

Kind = Literal["zero_shot", "zero_shot_groups", "retrieval", "pairs", "linear_probe"]

# Kind -> the metrics that a table shows -> the titles of their columns
PRIMARY_METRICS = {
    "zero_shot": {"accuracy": "accuracy"},
    "zero_shot_groups": {"accuracy": "mean accuracy"},
    "retrieval": {"image_to_text_recall@1": "R@1 image→text", "text_to_image_recall@1": "R@1 text→image"},
    "pairs": {"group": "group score"},
    "linear_probe": {"accuracy": "accuracy"},
}
RECALL_5 = tuple(f"{way}_recall@{k}" for k in (1, 5) for way in ("image_to_text", "text_to_image"))
# How much a model knows in retrieval: `clip_moe.evaluation.retrieval.information`
INFORMATION = ("image_to_text_information", "text_to_image_information")
# Metrics that stand for benchmarks whose protocols ask for them -> the titles of their columns
METRIC_TITLES = {
    "accuracy": "accuracy",
    "accuracy_top5": "top-5 accuracy",
    "mean_per_class_recall": "mean per class",
    "mean_of_top1_and_top5": "mean of top-1 and top-5",
    "roc_auc": "ROC AUC",
    "image": "image score",
    "text": "text score",
    "group": "group score",
    **{f"image_to_text_recall@{k}": f"R@{k} image→text" for k in (1, 5, 10)},
    **{f"text_to_image_recall@{k}": f"R@{k} text→image" for k in (1, 5, 10)},
    **dict(zip(INFORMATION, ("information image→text", "information text→image"), strict=True)),
}


@dataclass(frozen=True)
class Task:
    """One kind of measure on one dataset.

    `load` returns the rows and how many more could not be read, `load_train` those that a linear probe is fitted to.
    Rows have the columns `image` and `caption`, or for pairs those of `clip_moe.data.symbols.load_minimal_pairs`. The
    caption of retrieval is a text or a list of texts.
    `group_of_class` parts the classes of a mean of several zero-shot tasks, each among its own classes.
    The caption of a zero-shot row is the name of its class; a column `label` has the class's number, for classes of one
    name.
    `data` is all that was chosen of the data: results in which it differs are of different tasks.
    `equal_captions_are_right`, for retrieval: an image is right for every caption that is one of its own, word by word,
    and each different caption is one query; else for those of its row alone, as in benchmarks.
    `metrics` stand for the task in a table, if others than those of its kind do.
    """

    kind: Kind
    title: str
    protocol: str
    load: Callable[..., tuple[Dataset, int]]
    classes: Sequence[str] = ()
    templates: Sequence[str] = ()
    group_of_class: Mapping[str, str] = field(default_factory=dict)
    load_train: Callable[..., tuple[Dataset, int]] | None = None
    data: dict[str, Any] = field(default_factory=dict)
    metrics: Sequence[str] = ()
    equal_captions_are_right: bool = False

    @property
    def primary(self) -> dict[str, str]:
        """The metrics that stand for it in a table -> the titles of their columns."""
        return {metric: METRIC_TITLES[metric] for metric in self.metrics} or PRIMARY_METRICS[self.kind]
