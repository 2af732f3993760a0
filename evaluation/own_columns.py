"""Own data as tasks see them: the options of commands and the settings of recipes, in one place."""

from dataclasses import dataclass, field
from typing import Annotated

from cyclopts import Parameter
from pydantic import Field


@dataclass(kw_only=True)
class OwnColumns:
    """A task's name, its data, and which of their columns hold what.

    Args:
        name: what scores, reports and files call the task (default: the measure, the data, the column and a hash of all
            that was chosen). Of several tasks that a command measures on one dataset, this and the measure
        title: what tables call it (default: its name, else the measure, the data, and which split and column if others
            than the default ones)
        dataset: your own data, for the tasks zero_shot, linear_probe, retrieval and pairs: whatever a recipe's
            data.source may be
        split: what is measured of the dataset
        train_split: what a linear probe is fitted to
        num_samples: of the dataset, the first ones (default: all)
        image_column: images or their paths; for pairs, the columns IMAGE_COLUMN_0 and _1
        image_root: what relative paths of images start from
        caption_column: texts or lists of texts, for retrieval; for pairs, the columns CAPTION_COLUMN_0 and _1
        captions_per_line: each line of a text is a caption, as in the retrieval shards of CLIP_benchmark
        label_column: the classes, for zero_shot and linear_probe; for pairs, what differs in each, if there is such a
            column
        classes: file with the names of the classes, one a line, for zero_shot and linear_probe. Where the data call
            classes by numbers or WordNet ids, the names in the order of these, or each after its id (n01440764 tench)
        templates: for zero_shot, texts with a {} for the name of the class; or one file of them, one a line
    """

    name: Annotated[str | None, Parameter(name="--task-name"), Field(pattern=r"^\w[\w. -]*$", max_length=200)] = None
    title: Annotated[str | None, Parameter(name="--task-title"), Field(pattern=r"\S")] = None
    dataset: str | None = None
    split: str = "test"
    train_split: str = "train"
    num_samples: Annotated[int | None, Field(gt=0)] = None
    image_column: str = "image"
    image_root: str | None = None
    caption_column: str = "caption"
    captions_per_line: Annotated[bool, Parameter(negative=())] = False
    label_column: str = "label"
    classes: Annotated[str | None, Field(min_length=1)] = None
    templates: list[str] = field(default_factory=lambda: ["a photo of a {}."])
