"""What one measure on one dataset is."""

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


@dataclass(frozen=True)
class Task:
    """One kind of measure on one dataset.

    `load` returns the rows and how many more could not be read, `load_train` those that a linear probe is fitted to.
    Rows have the columns `image` and `caption` (zero-shot: the class name; retrieval: a text or a list of texts),
    or for pairs those of `data.glyphs.load_minimal_pairs`.
    `group_of_class` parts the classes of one that is the mean of several zero-shot tasks, each among its own classes.
    `data` is all that was chosen of a dataset given by columns: results in which it differs are of different tasks.
    """

    kind: Kind
    title: str
    protocol: str
    load: Callable[[], tuple[Dataset, int]]
    classes: Sequence[str] = ()
    templates: Sequence[str] = ()
    group_of_class: Mapping[str, str] = field(default_factory=dict)
    load_train: Callable[[], tuple[Dataset, int]] | None = None
    data: dict[str, Any] = field(default_factory=dict)
