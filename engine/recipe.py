"""A recipe: the stages of a run and their settings, read from YAML, overridden from the command line.

Unknown keys, wrong types and contradictions raise a `RecipeError` that names the key as it stands in the recipe.
"""

import copy
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    SkipValidation,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.dataclasses import dataclass
from typing_extensions import TypedDict

from clip_moe.engine.files import read_text
from clip_moe.engine.flags import find_setting, settings_within
from clip_moe.engine.kinds import FORMER, KINDS, stage_of_kind
from clip_moe.engine.messages import Faults, did_you_mean, fault_text, one_line, suggestion
from clip_moe.engine.own_modules import import_stage
from clip_moe.engine.provenance import LOGS
from clip_moe.engine.settings import GENERAL_KINDS, STRICT, Settings, refuse
from clip_moe.engine.stage import Stage, each_setting, kinds
from clip_moe.engine.yaml_files import read_yaml


class RecipeError(Faults):
    """The faults of a recipe, with their settings: a first line that counts them, then a line for each.

    One alone stands in the first line.

    Args:
        faults: `stage.setting: message`. The same message about several stages, as by defaults, is one fault.
    """

    @classmethod
    def of(cls, recipe: str | Path, faults: Iterable[str]) -> "RecipeError":
        settings: dict[str, list[str]] = {}
        for fault in dict.fromkeys(faults):
            setting, _, message = one_line(fault).partition(": ")
            settings.setdefault(message, []).append(setting)
        lines = [f"{', '.join(alike)}: {message}" for message, alike in settings.items()]
        several = "\n  ".join([f"{recipe} has {len(lines)} faults:", *lines])
        return cls(several if len(lines) > 1 else f"{recipe} has a fault: {lines[0]}")


def stage_class(stage: str) -> type[Stage]:
    """The class of a kind of stage, or one's own: `package.module:Class`, see `import_stage`."""
    if ":" in stage:
        return import_stage(stage)
    if stage not in KINDS:
        hint = f"did you mean {FORMER[stage]!r}?" if stage in FORMER else suggestion(stage, KINDS)
        raise ValueError(f"unknown kind of stage {stage!r}: {hint}")
    return stage_of_kind(stage)


def read_stage(settings: Any) -> Stage:
    """A stage as an object of its class."""
    if isinstance(settings, Stage):
        return settings
    return TypeAdapter(stage_class(settings["stage"])).validate_python(settings)


# Where "no" is what YAML reads as false
MixedPrecision = Annotated[
    Literal["no", "fp16", "bf16"] | None, BeforeValidator(lambda value: "no" if value is False else value)
]


def require_folder(name: Any) -> Any:
    """Refuses an empty name, which `Path` reads as the current folder, and one that begins with ~."""
    refuse(
        (not str(name).strip(), "the folder's name is empty"),
        (str(name).startswith("~"), f"{name}: only a shell expands ~: write the full path"),
    )
    return name


@dataclass(config=STRICT, kw_only=True)
class RunSettings:
    """Settings of a run, of a recipe or of one stage."""

    # Seed of all that is random, unless a stage has its own.
    seed: int = Field(default=0, ge=0, lt=2**32)
    # "no" is float32. None: the setting of `accelerate launch` or its configuration; if that is "no", bf16 on GPUs that
    # support it.
    mixed_precision: MixedPrecision = None
    # Any of Accelerate's trackers: tensorboard, wandb, ...
    trackers: list[str] = Field(default_factory=list)


@dataclass(config=STRICT, kw_only=True)
class Recipe(RunSettings):
    """A run: its stages, in order."""

    # Folder for the stages' folders.
    output_dir: Annotated[str, AfterValidator(require_folder)]
    # Stages of any kind, or classes of your own: `package.module:Class`.
    stages: list[Annotated[SkipValidation[Stage], BeforeValidator(read_stage)]]
    # Stage -> Hub repository to upload its model to, once all stages are done.
    push_to_hub: dict[str, str] = Field(default_factory=dict)
    # Name in errors: the file it was read from
    title: ClassVar[str] = "the recipe"

    @property
    def stage_names(self) -> frozenset[str]:
        """Names by which settings refer to stages. A stage alone can only refer to folders, also to one of its name."""
        return frozenset(stage.name for stage in self.stages if len(self.stages) > 1)

    @field_validator("stages")
    @classmethod
    def _check_stages(cls, stages):
        names = [stage.name for stage in stages]
        for name in names:
            refuse(
                (names.count(name) > 1, f"the stage name {name!r} is used twice"),
                (
                    name.endswith(".partial"),
                    f"{name!r} cannot name a stage: .partial marks an unfinished one",
                ),
                (name in [*RECIPE_KEYS, LOGS], f"{name!r} cannot name a stage: recipes use it as a key or a folder"),
            )
        return stages

    @model_validator(mode="after")
    def _hand_on_seed(self):
        for stage in self.stages:
            for _, value in each_setting(stage):
                if isinstance(value, Settings):
                    value.take_seed(self.seed)
        return self

    @model_validator(mode="after")
    def _check_push(self):
        models = {stage.name for stage in self.stages if "model" in kinds(type(stage))}
        unknown = sorted(set(self.push_to_hub) - models)
        if unknown:
            raise ValueError(f"push_to_hub: {', '.join(unknown)}: no stage of this name makes a model")
        return self


RECIPE_KEYS = [*(field.name for field in fields(Recipe)), "defaults"]


class NamedStage(TypedDict):
    """A stage before its own class reads it."""

    __pydantic_config__ = ConfigDict(extra="allow")
    name: Annotated[str, Field(pattern=r"^\w[\w -]*$", max_length=200)]
    stage: str


class RecipeFile(TypedDict):
    """The part of a recipe that overrides and defaults need."""

    __pydantic_config__ = ConfigDict(extra="allow")
    stages: Annotated[list[NamedStage], Field(min_length=1)]
    defaults: NotRequired[dict[str, dict[str, Any]] | None]
    inputs: NotRequired[dict[str, Any] | None]


def load_recipe(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Read a recipe.

    Args:
        path: a YAML file with the keys of `Recipe`. Its extra key `defaults` maps a stage type (`train`, ...) to
            settings that all stages of that type share unless they set them themselves. Those of `train` hold for
            all kinds made of it (`train_experts`, `train_router`, ...), and those of any kind for your own classes
            of that kind. Its extra key `inputs` maps names to values that an alias puts where they are used.
        overrides: dotted key -> value, applied last. A key starts with the name of a stage (`clip_up.max_steps`), or
            is one of the recipe's own (`seed`, `defaults.train.max_steps`) or one of its inputs.
    """
    path = Path(path)
    if not path.is_file():
        place = next(Path().glob(f"*/recipes/{path.name}"), "training/recipes, where `clip-moe recipes` puts them")
        raise FileNotFoundError(f"no recipe at {path}; see {place}")
    text, changes = read_text(path), {}
    written = validated(RecipeFile, read_yaml(text, str(path)), path)
    for key, value in (overrides or {}).items():
        name = _spelled(written, key)
        refuse(
            (name in changes, f"--{key} is given twice, once with - and once with _"),
            (
                any(other.startswith(f"{name}.") for other in changes),
                f"--{key}: given both whole and in parts",
            ),
        )
        changes[name] = value
    raw = read_yaml(text, str(path), changes)
    inputs = raw.pop("inputs", None) or {}
    if names := sorted({*inputs} & {*RECIPE_KEYS, *(stage["name"] for stage in raw["stages"])}):
        raise ValueError(f"{path}: the input {names[0]} has the name of a recipe key or a stage: rename it")
    for key, value in changes.items():
        if key not in inputs:
            _override(raw, key, value)
    validated(RecipeFile, raw, path)
    defaults, used = raw.pop("defaults", None) or {}, set()
    for number, settings in enumerate(raw["stages"]):
        try:
            cls = stage_class(settings["stage"])
        except ValueError as error:
            raise RecipeError.of(path, [f"{settings['name']}.stage: {error}"]) from error
        keys = dict.fromkeys([*(kind for kind in kinds(cls) if kind not in GENERAL_KINDS), settings["stage"]])
        used |= set(keys)
        parts = [defaults.get(key, {}) for key in keys] + [settings]
        raw["stages"][number] = functools.reduce(_merge, parts, {})
    if unused := sorted(set(defaults) - used):
        faults = [f"defaults.{key}: no stage uses it: {suggestion(key, used)}" for key in unused]
        raise RecipeError.of(path, faults)
    recipe = validated(Recipe, raw, path)
    recipe.title = str(path)
    return recipe


def validated(kind: type, settings: Any, path: str | Path) -> Any:
    """Settings as an object of their class. Raises RecipeError with a line for each that is wrong."""
    try:
        made = TypeAdapter(kind).validate_python(settings)
    except ValidationError as error:
        raise RecipeError.of(path, (_fault(wrong, kind, settings) for wrong in error.errors())) from error
    if faults := list(_truth_values(settings, made)):
        raise RecipeError.of(path, faults)
    return made


def _truth_values(given: Any, made: Any, place: str = "") -> Iterator[str]:
    """Faults of settings that are True or False where a number belongs: pydantic makes 1 or 0 of them."""
    if isinstance(given, bool) and type(made) in (int, float):
        words = "yes, on and true" if given else "no, off and false"
        yield f"{place.removeprefix('stages.')}: takes a number, but YAML reads {words} as {given}: write a number"
    if isinstance(given, list) and isinstance(made, list):
        names = [str(part.get("name", at)) if isinstance(part, dict) else str(at) for at, part in enumerate(given)]
        given, made = dict(zip(names, given, strict=True)), dict(zip(names, made, strict=False))
    parts = made if isinstance(made, dict) else getattr(made, "__dict__", {})
    for key, value in given.items() if isinstance(given, dict) else ():
        yield from _truth_values(value, parts.get(key), f"{place}.{key}" if place else f"{key}")


def _fault(error: dict[str, Any], kind: type, settings: Any) -> str:
    """A fault of a setting, with the choice or the name that may be meant instead."""
    place, message = list(error["loc"]), fault_text(error)
    if kind is Recipe and place[:1] == ["stages"] and len(place) > 1:
        stage = settings["stages"][place[1]]
        if isinstance(stage, dict):
            kind, place = stage_class(stage["stage"]), [stage["name"], *place[2:]]
    if error["type"] == "missing":
        is_flag = kind is not RecipeFile and all(isinstance(key, str) for key in place)
        message = "is required: set it" + (f", as by --{'.'.join(place)}" if is_flag else "")
    elif error["type"] == "literal_error":
        choices = re.findall(r"'([^']+)'", error["ctx"]["expected"])
        message += did_you_mean(str(error["input"]), choices)
    elif error["type"] == "unexpected_keyword_argument":
        for part in place[:-1]:
            if part in kind.__pydantic_fields__:
                kind = settings_within(kind.__pydantic_fields__[part].annotation)
        message = f"unknown key: {suggestion(place[-1], kind.__pydantic_fields__)}"
    place = [key for key in place if key != "[key]"]  # of a dictionary
    return f"{'.'.join(map(str, place)) or 'recipe'}: {message}"


def _spelled(raw: dict[str, Any], key: str) -> str:
    """A key on the command line as the recipe and its stages spell it: `-` and `_` read alike."""
    head, *rest = key.split(".")
    kind_of = {stage["name"]: stage["stage"] for stage in raw["stages"]}
    head = _same_name(head, [*kind_of, *RECIPE_KEYS, *(raw.get("inputs") or {})])
    names, kind = [head], kind_of.get(head)
    if head == "defaults" and rest:
        kind = _same_name(rest[0], KINDS)
        names, rest = [head, kind], rest[1:]
    classes = []
    with suppress(ValueError):  # `load_recipe` reports an unknown kind
        classes += [stage_class(kind)] if kind else []
    return ".".join(names + (find_setting(rest, classes)[0] if rest else []))


def _same_name(name: str, known: Iterable[str]) -> str:
    """The known name, or else the first that differs in `-` and `_` alone, or else this one."""
    known = list(known)
    alike = [other for other in known if other.replace("-", "_") == name.replace("-", "_")]
    return name if name in known or not alike else alike[0]


def _override(raw: dict, key: str, value: Any) -> None:
    head, *rest = key.split(".")
    stages = [stage for stage in raw["stages"] if isinstance(stage, dict)]  # a list of them may have been given
    target = next((stage for stage in stages if stage.get("name") == head), None)
    if target is None and head in RECIPE_KEYS and (key != "stages" or isinstance(value, list)):
        target, rest = raw, [head, *rest]
    if target is None or not rest:
        names = [stage.get("name") for stage in stages]
        raise ValueError(
            f"--{key}: {head!r} is not an option (see --help), a key or an input of the recipe, or one of its stages "
            f"{names}, whose settings are written --STAGE.KEY"
        )
    for part in rest[:-1]:
        if target.get(part) is None:
            target[part] = {}
        target = target[part]
        if not isinstance(target, dict):
            fault = "is a list: give all of it, as '[...]'" if isinstance(target, list) else "has no keys"
            raise ValueError(f"--{key}: {part!r} {fault}")
    target[rest[-1]] = value


def _merge(defaults: dict, settings: dict) -> dict:
    merged = copy.deepcopy(defaults)
    for key, value in settings.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged
