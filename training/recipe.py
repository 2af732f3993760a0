"""A recipe: the stages of a run and their settings, read from YAML, overridden from the command line.

Unknown keys, wrong types and contradictions raise a `RecipeError` that names the key as it stands in the recipe.
"""

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, SkipValidation, TypeAdapter, field_validator, model_validator
from pydantic.dataclasses import dataclass

from data.sources import DataArguments
from data.worlds import WORLDS
from records.provenance import LOGS
from training.measured_tasks import MeasuredTasks
from training.recipe_file import read_recipe, validated
from training.settings import STRICT
from training.stages import STAGES
from training.stages.base import Stage, each_value
from training.stages.custom import import_stage


def read_stage(settings: Any) -> Stage:
    """A stage as an object of its class."""
    if isinstance(settings, Stage):
        return settings
    return TypeAdapter(stage_class(settings["stage"])).validate_python(settings)


def stage_class(stage: str) -> type[Stage]:
    """The class of a kind of stage, or one's own: `package.module:Class`, see `import_stage`."""
    return import_stage(stage) if ":" in stage else STAGES[stage]


@dataclass(config=STRICT, kw_only=True)
class Recipe:
    """A run: its stages, in order."""

    # The folder in which each stage has a folder.
    output_dir: str = Field(min_length=1)
    # Stages of any kind, or classes of your own: `package.module:Class`.
    stages: list[Annotated[SkipValidation[Stage], BeforeValidator(read_stage)]]
    # Seed of all that is random, unless a stage has its own.
    seed: int = Field(default=0, ge=0, lt=2**32)
    # "no" is float32. None: what `accelerate launch` or its configuration says; where that is "no", bf16 on GPUs that
    # compute in it.
    mixed_precision: Literal["no", "fp16", "bf16"] | None = None
    # Any of Accelerate's trackers: tensorboard, wandb, ...
    trackers: list[str] = Field(default_factory=list)
    # Stage -> hub repository that its model is uploaded to once all stages are done.
    push_to_hub: dict[str, str] = Field(default_factory=dict)
    # What errors call it: the file that it was read from
    title: ClassVar[str] = "the recipe"

    @field_validator("mixed_precision", mode="before")
    @classmethod
    def _read_no(cls, value):
        return "no" if value is False else value  # YAML's no

    @field_validator("stages")
    @classmethod
    def _check_stages(cls, stages):
        names = [stage.name for stage in stages]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"the stage name {name!r} is used twice")
            if name in {field.name for field in fields(Recipe)} | {"defaults", LOGS}:
                raise ValueError(f"{name!r} cannot name a stage: it is a key of the recipe, or a folder of the run")
        return stages

    @model_validator(mode="after")
    def _hand_on_seed(self):
        for stage in self.stages:
            settings = [("", stage)]
            for field in fields(stage):
                settings += each_value(field.name, getattr(stage, field.name))
            for _, value in settings:
                if isinstance(value, DataArguments) and value.source in WORLDS and value.seed is None:
                    value.seed = self.seed
                if isinstance(value, MeasuredTasks) and value.test_seed is None:
                    value.test_seed = self.seed
        return self

    @model_validator(mode="after")
    def _check_push(self):
        unknown = sorted(set(self.push_to_hub) - {stage.name for stage in self.stages})
        if unknown:
            raise ValueError(f"push_to_hub names stages that the recipe does not have: {', '.join(unknown)}")
        return self


def load_recipe(path: str | Path, overrides: dict[str, Any] | None = None) -> Recipe:
    """Read a recipe.

    Args:
        path: a YAML file with the keys of `Recipe`. Its extra key `defaults` maps a stage type (`train`, ...) to
            settings that all stages of that type share unless they set them themselves. Those of `train` hold for
            all kinds made of it (`train_experts`, `train_router`, ...), and those of any kind for your own classes
            of that kind.
        overrides: dotted key -> value, applied last. A key starts with the name of a stage (`clip_up.max_steps`), or
            is one of the recipe's own (`seed`, `defaults.train.max_steps`).
    """
    return make_recipe(read_recipe(Path(path), overrides or {}), path)


def make_recipe(settings: dict[str, Any], path: str | Path) -> Recipe:
    """A recipe as `training.recipe_file.read_recipe` read it from a file, as an object."""
    recipe = validated(Recipe, settings, path, [stage["name"] for stage in settings["stages"]])
    recipe.title = str(path)
    return recipe
