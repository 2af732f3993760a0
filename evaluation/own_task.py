"""Settings of a task on own data. Importing them imports nothing heavy."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from clip_moe.data.arguments import DataArguments
from clip_moe.data.worlds import WORLDS, is_world
from clip_moe.engine.messages import in_one_line

OwnKind = Literal["retrieval", "zero_shot", "linear_probe", "pairs"]


@dataclass(config=ConfigDict(extra="forbid", defer_build=True), kw_only=True)
class OwnTask:
    """A task on any dataset: which of its columns hold what."""

    # The measure.
    task: OwnKind
    # The dataset, as `source` of [data](#data).
    dataset: str
    # Name in scores, reports and files. None: the measure, the data, the column and a hash of all that was chosen.
    name: str | None = Field(default=None, pattern=r"^\w[\w. -]*$", max_length=200)
    # Title in tables. None: its name, else the measure, the data, and the split and column if not the default ones.
    title: str | None = Field(default=None, pattern=r"\S")
    # Split to evaluate.
    split: str = "test"
    # Split to fit a linear probe to.
    train_split: str = "train"
    # Number of rows, from the first; None: all.
    num_samples: int | None = Field(default=None, gt=0)
    # Images or their paths; for pairs, the columns IMAGE_COLUMN_0 and _1.
    image_column: str = "image"
    # Folder that relative paths of images start from.
    image_root: str | None = None
    # As `pixel_range` of [data](#data).
    pixel_range: list[float] | None = None
    # Texts or lists of texts, for retrieval; for pairs, the columns CAPTION_COLUMN_0 and _1.
    caption_column: str = "caption"
    # Each line of a text is a caption, as in the retrieval shards of CLIP_benchmark.
    captions_per_line: bool = False
    # The classes, for zero_shot and linear_probe; for pairs, the attribute that differs, if there is such a column.
    label_column: str = "label"
    # File with the names of the classes, one a line, for zero_shot and linear_probe. Where the data call classes by
    # numbers or WordNet ids, the names in the order of these, or each after its id (n01440764 tench).
    classes: str | None = Field(default=None, min_length=1)
    # For zero_shot, texts with a {} for the name of the class; or one file of them, one a line. None: each model's own,
    # the `hypothesis_template` of its tokenizer_config.json, else `a photo of a {}.`
    templates: list[str] | None = None

    @model_validator(mode="after")
    def _check(self):
        if is_world(self.dataset) and self.task != "retrieval":
            built_in = f"the built-in task {self.dataset}_{self.task}" if self.dataset in WORLDS else "retrieval"
            raise ValueError(f"{self.dataset} has no task {self.task}: use {built_in}")
        self.arguments()
        return self

    def arguments(self) -> DataArguments:
        """Settings of the rows that are measured."""
        has_captions = self.task in ("retrieval", "pairs")
        try:
            return DataArguments(
                source=self.dataset,
                split=self.split,
                num_samples=self.num_samples,
                image_column=self.image_column,
                image_root=self.image_root,
                pixel_range=self.pixel_range,
                caption_column=self.caption_column if has_captions else self.label_column,
                captions_per_line=self.captions_per_line and self.task == "retrieval",
                seed=0,  # of a world: all models are measured on the same pictures
            )
        except ValidationError as error:
            raise ValueError(in_one_line(error.errors())) from None


# Items of a list of tasks: names, and tasks on own data
Wanted = Annotated[
    Annotated[str, Tag("name")] | Annotated[OwnTask, Tag("own")],
    Discriminator(lambda value: "name" if isinstance(value, str) else "own"),
]
