"""A recipe: the stages of a run and their settings, read from YAML, overridden from the command line.

Unknown keys, wrong types and contradictions raise a `ValueError` that names the key as it stands in the recipe.
"""

import copy
import functools
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NotRequired, get_args, get_type_hints

from pydantic import ConfigDict, Field, SkipValidation, TypeAdapter, ValidationError, field_validator, model_validator
from pydantic.dataclasses import dataclass
from typing_extensions import TypedDict

from data.once import opened_once
from data.sources import DataArguments
from data.worlds import WORLDS
from records.messages import most_similar, shortened, what_is_meant
from records.processes import num_processes
from records.provenance import LOGS
from records.yaml_files import read_yaml
from training.checks import Outlook, RecipeError, find_faults, reference_faults
from training.measured_tasks import MeasuredTasks
from training.settings import STRICT, dump
from training.stages import STAGES
from training.stages.base import Stage, each_value, kinds
from training.stages.custom import import_stage


@dataclass(config=STRICT, kw_only=True)
class Recipe:
    """A run: its stages, in order."""

    # The folder in which each stage has a folder.
    output_dir: str = Field(min_length=1)
    # Stages of any kind, or classes of your own: `package.module:Class`.
    stages: list[SkipValidation[Stage]]
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


class NamedStage(TypedDict):
    """A stage as it stands in a file, before its own class reads it."""

    __pydantic_config__ = ConfigDict(extra="allow")
    name: str
    stage: str


class RecipeFile(TypedDict):
    """A recipe as it stands in a file: what overrides and defaults have to find in it."""

    __pydantic_config__ = ConfigDict(extra="allow")
    stages: Annotated[list[NamedStage], Field(min_length=1)]
    defaults: NotRequired[dict[str, dict[str, Any]] | None]


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
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no recipe at {path}; the project's are in training/recipes")
    raw = read_yaml(path.read_text(encoding="utf-8"), str(path))
    _require_stages(raw, path)
    for key, value in (overrides or {}).items():
        _override(raw, key, value)
    _require_stages(raw, path)
    problems: list[str] = []
    stages, broken = _read_stages(raw["stages"], raw.pop("defaults", None) or {}, problems)
    problems += reference_faults(stages, broken)
    pushed = raw.get("push_to_hub")
    if isinstance(pushed, dict):
        raw["push_to_hub"] = {name: repository for name, repository in pushed.items() if name not in broken}
    recipe = _validate(Recipe, raw | {"stages": stages}, "", problems) if stages else None
    if problems:
        with opened_once():
            outlook = Outlook(stages, str(raw.get("output_dir")), num_processes(), broken)
            problems += find_faults(outlook, set(outlook.stages))
        raise RecipeError(path, problems)
    recipe.title = str(path)
    return recipe


def _require_stages(raw: Any, path: Path) -> None:
    problems: list[str] = []
    _validate(RecipeFile, raw, "", problems)
    if problems:
        raise RecipeError(path, problems)


def _read_stages(
    of_recipe: list[dict[str, Any]], defaults: dict[str, Any], problems: list[str]
) -> tuple[list[Stage], set[str]]:
    """The stages of a recipe and the names of those that cannot be read, with lines for all their problems."""
    stages, broken, used, all_known = [], set(), set(), True
    for settings in of_recipe:
        name, stage = settings["name"], None
        try:
            kind = stage_class(settings["stage"])
        except ValueError as error:
            problems.append(f"{name}.stage: {error}")
            all_known = False
        else:
            keys = _default_keys(kind, settings["stage"])
            used |= set(keys)
            shared = functools.reduce(_merge, (defaults.get(key, {}) for key in keys), {})
            stage = _validate(kind, _merge(shared, settings), f"{name}.", problems)
        if stage is None:
            broken.add(name)
        else:
            stages.append(stage)
    if all_known:  # else those may be meant by unused ones
        problems += [
            f"defaults.{key}: no stage uses them: {what_is_meant(key, used)}" for key in sorted({*defaults} - used)
        ]
    return stages, broken


def _validate(kind: type, settings: dict[str, Any], prefix: str, problems: list[str]) -> Any:
    """The settings as an object; or None, with a line for each of their problems."""
    try:
        return TypeAdapter(kind).validate_python(settings)
    except ValidationError as error:
        for e in error.errors():
            key = prefix + ".".join(map(str, e["loc"]))
            got = "" if e["type"] == "value_error" else f" (got {shortened(e['input'])})"  # our own errors say it
            problems.append(f"{key.rstrip('.') or 'recipe'}: {_message(e, kind)}{got}")


def stage_class(stage: str) -> type[Stage]:
    """The class of a kind of stage, or one's own: `package.module:Class`, see `import_stage`."""
    if ":" not in stage:
        if stage not in STAGES:
            raise ValueError(f"there is no kind of stage {stage!r}: {what_is_meant(stage, STAGES)}")
        return STAGES[stage]
    return import_stage(stage)


def expert_number(stage: Stage) -> int | None:
    """The number of the expert that a stage trains, its setting `expert`, by which --experts chooses it."""
    number = getattr(stage, "expert", None)
    return number if isinstance(number, int) else None


def dump_recipe(recipe: Recipe) -> dict[str, Any]:
    """The plain dictionary of a recipe, from which it can be read again."""
    own = {field.name: getattr(recipe, field.name) for field in fields(recipe)}
    return own | {"stages": [dump(stage) for stage in recipe.stages]}


def _override(raw: dict, key: str, value: Any) -> None:
    head, *rest = key.split(".")
    target = next((stage for stage in raw["stages"] if stage["name"] == head), None)
    if target is None and head in {f.name for f in fields(Recipe)} | {"defaults"}:
        target, rest = raw, [head, *rest]
    if target is None or not rest:
        names = [stage["name"] for stage in raw["stages"]]
        raise ValueError(
            f"--{key}: {head!r} is neither an option (--config, --output-dir, --stages, --experts), nor a key of the "
            f"recipe, nor a setting of one of its stages {names}, which is written --STAGE.KEY"
        )
    for part in rest[:-1]:
        if target.get(part) is None:
            target[part] = {}
        target = target[part]
        if not isinstance(target, dict):
            raise ValueError(f"--{key}: {part!r} has no keys")
    target[rest[-1]] = value


def _default_keys(stage: type[Stage], name: str) -> list[str]:
    """The keys of `defaults` that hold for a class that a recipe calls `name`, the most special one last."""
    return list(dict.fromkeys([*(kind for kind in kinds(stage) if kind != "model"), name]))


def _merge(defaults: dict, settings: dict) -> dict:
    merged = copy.deepcopy(defaults)
    for key, value in settings.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _message(error: dict, kind: type) -> str:
    """What is wrong with a setting, with the name that may be meant instead."""
    if error["type"] == "literal_error":
        choices = re.findall(r"'([^']+)'", error["ctx"]["expected"])
        similar = most_similar(str(error["input"]), choices)
        return error["msg"] + (f": did you mean {similar!r}?" if similar else "")
    if error["type"] != "unexpected_keyword_argument":
        return error["msg"].removeprefix("Value error, ")
    *parents, key = error["loc"]
    for parent in parents:
        kind = kind if isinstance(parent, int) else _settings_in(get_type_hints(kind).get(parent))
    hint = f": {_meant_key(str(key), kind)}" if kind else ""
    return f"there is no such key, here or in the defaults of this stage{hint}"


def _meant_key(key: str, kind: type) -> str:
    """The most similar key of a class of settings; else the same key within one of its settings; else all keys."""
    known = [field.name for field in fields(kind)]
    settings = {name: _settings_in(hint) for name, hint in get_type_hints(kind).items()}
    within = [name for name, inner in settings.items() if inner and key in {field.name for field in fields(inner)}]
    if within and not most_similar(key, known):
        return f"did you mean '{within[0]}.{key}'?"
    return what_is_meant(key, known)


def _settings_in(hint: Any) -> type | None:
    """The class of settings in an annotation such as `list[CaptionPolicy] | None`."""
    if isinstance(hint, type) and is_dataclass(hint):
        return hint
    return next(filter(None, map(_settings_in, get_args(hint))), None)
