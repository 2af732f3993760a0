"""A recipe: the stages of a run and their settings, read from YAML, overridden from the command line.

Unknown keys, wrong types and contradictions raise a `ValueError` that names the key as it stands in the recipe.
"""

import copy
import functools
import os
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args, get_type_hints

from pydantic import Field, SkipValidation, TypeAdapter, ValidationError, field_validator, model_validator
from pydantic.dataclasses import dataclass

from data.once import opened_once
from data.sources import DataArguments
from data.worlds import WORLDS
from records.messages import most_similar, shortened, what_is_meant
from records.provenance import LOGS, RECIPE
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
    # Of all kinds, or classes of your own: `package.module:Class`.
    stages: list[SkipValidation[Stage]]
    # Of all that is random, unless a stage has its own.
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
            alike = [other for other in names if other != name and other.casefold() == name.casefold()]
            if alike:
                raise ValueError(f"{name!r} and {alike[0]!r} are one folder where file names have no case: rename one")
            problem = _problem_of_name(name)
            if problem:
                raise ValueError(f"{name!r:.60} cannot name a stage: {problem}")
        experts = [number for number in map(expert_number, stages) if number is not None]
        if len(set(experts)) < len(experts):
            raise ValueError(f"two stages train an expert of the same number; the numbers are {experts}")
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


def _problem_of_name(name: str) -> str:
    """Why a stage cannot have this name, which is that of its folder, or nothing."""
    if name in {field.name for field in fields(Recipe)} | {"defaults"}:
        return "it is a key of the recipe"
    if name.casefold() in (RECIPE, LOGS):
        return "a file of the run has that name"
    if not name.strip() or name != name.strip() or name.startswith((".", "-")) or name.endswith(".partial"):
        return "it is empty, begins with a dot, a minus or a space, or ends in .partial or a space"
    if any(character in "/\\" or not character.isprintable() for character in name):
        return "it is no name of a folder"
    return "it is longer than 200 bytes" if len(name.encode()) > 200 else ""


def load_recipe(path: str | Path, overrides: dict[str, Any] | None = None) -> Recipe:
    """Read a recipe.

    Args:
        path: a YAML file with the keys of `Recipe`. Its extra key `defaults` maps a stage type (`train`, ...) to
            settings that all stages of that type share unless they set them themselves. Those of `train` hold for
            all kinds made of it (`train_experts`, `train_router`, ...), and those of any kind for your own classes
            of that kind.
        overrides: dotted key -> value, applied last. A key starts with the name of a stage (`clip_up.max_steps`), or
            is one of the recipe's own (`seed`, `defaults.train.max_steps`).

    Raises:
        FileNotFoundError: there is no such file.
        RecipeError: an unknown key, a value of the wrong type or out of range, a contradiction. Then all other faults
            that can be found are named, too.
        ValueError: it is no recipe.
    """
    path = Path(path)
    if not path.is_file():
        what = "is a folder, not a recipe" if path.is_dir() else "there is no such file"
        raise FileNotFoundError(f"no recipe at {path}: {what}; the project's are in training/recipes")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8, so no recipe: {error}") from error
    raw = read_yaml(text, str(path))
    _require_stages(raw, path)
    for key, value in (overrides or {}).items():
        _override(raw, key, value)
    _require_stages(raw, path)
    defaults = raw.pop("defaults", None) or {}
    for kind, settings in defaults.items() if isinstance(defaults, dict) else [("", defaults)]:
        if not isinstance(settings, dict):
            key = f"defaults.{kind}" if kind else "defaults"
            raise ValueError(f"{path}: {key} needs keys with settings, not {shortened(settings)}")
    problems: list[str] = []
    stages, broken = _read_stages(raw["stages"], defaults, problems)
    problems += reference_faults(stages, broken)
    pushed = raw.get("push_to_hub")
    if isinstance(pushed, dict):
        raw["push_to_hub"] = {name: repository for name, repository in pushed.items() if name not in broken}
    recipe = _validate(Recipe, raw | {"stages": stages}, "", problems) if stages else None
    if problems:
        with opened_once():
            outlook = Outlook(stages, str(raw.get("output_dir")), int(os.environ.get("WORLD_SIZE", 1)), broken)
            problems += find_faults(outlook, set(outlook.stages))
        raise RecipeError(path, problems)
    recipe.title = str(path)
    return recipe


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
        validated = TypeAdapter(kind).validate_python(settings)
        numbers = [*_booleans_as_numbers(settings, validated)]
        problems += [f"{prefix}{key}: a number is needed, not true or false" for key in numbers]
        return None if numbers else validated
    except ValidationError as error:
        for e in error.errors():
            key = prefix + ".".join(map(str, e["loc"]))
            got = "" if e["type"] == "value_error" else f" (got {shortened(e['input'])})"  # our own errors say it
            problems.append(f"{key.rstrip('.') or 'recipe'}: {_message(e, kind)}{got}")


def _booleans_as_numbers(given: Any, read: Any) -> Iterator[str]:
    """The keys of settings whose `true` or `false` was read as a number, as Python and pydantic do."""
    if not isinstance(given, dict | list):
        return
    for key, value in given.items() if isinstance(given, dict) else enumerate(given):
        inner = read[key] if isinstance(read, dict | list) else getattr(read, key)
        if isinstance(value, bool) and type(inner) in (int, float):
            yield str(key)
        yield from (f"{key}.{rest}" for rest in _booleans_as_numbers(value, inner))


def stage_class(stage: str) -> type[Stage]:
    """The class of a kind of stage, or one's own: `package.module:Class`, see `import_stage`.

    Raises:
        ValueError: there is none.
    """
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


def _require_stages(raw: Any, path: Path) -> None:
    """Raises:
    ValueError: what the overrides and the defaults have to find in a recipe is not there.
    """
    if not isinstance(raw, dict) or not isinstance(raw.get("stages"), list):
        raise ValueError(f"{path} has no list of stages")
    if not raw["stages"]:
        raise ValueError(f"{path}: the list of stages is empty")
    for stage in raw["stages"]:
        keys = [stage.get("name"), stage.get("stage")] if isinstance(stage, dict) else []
        if not keys or not all(isinstance(key, str) for key in keys):
            raise ValueError(f"{path}: a stage needs the keys name and stage, both texts, got {shortened(stage)}")


def _override(raw: dict, key: str, value: Any) -> None:
    head, *rest = key.split(".")
    target = raw
    stage = next((stage for stage in raw["stages"] if stage["name"] == head), None)
    if stage is not None:
        if not rest:
            raise ValueError(f"--{key}: a stage is overridden key by key, as in --{key}.KEY VALUE")
        target = stage
    elif head in {f.name for f in fields(Recipe)} | {"defaults"}:
        rest = [head, *rest]
    else:
        names = [stage["name"] for stage in raw["stages"]]
        raise ValueError(
            f"--{key}: {head!r} is neither an option (--config, --output-dir, --stages, --experts), nor a key of the "
            f"recipe, nor one of its stages {names}, whose settings are written --STAGE.KEY"
        )
    if "" in rest:
        raise ValueError(f"--{shortened(key)}: keys are written KEY.KEY")
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
