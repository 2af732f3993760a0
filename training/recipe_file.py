"""A recipe as it stands in its file, before classes read its settings.

Imports nothing heavy: a misspelt name is refused as fast as `--help` answers.
"""

import copy
import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from records.files import read_text
from records.messages import (
    Faults,
    did_you_mean,
    fault_text,
    fault_value,
    most_similar,
    one_line,
    shortened,
    suggestion,
)
from records.yaml_files import read_yaml

# Kind of stage -> what `training.stages.base.outline` tells of its class, and "recipe" -> the keys of a recipe. Written
# by `python -m training.settings_page`
OUTLINES: dict[str, Any] = json.loads(Path(__file__).with_name("outlines.json").read_text(encoding="utf-8"))


class RecipeError(Faults):
    """The faults of a recipe, with their settings: a first line that counts them, then a line for each.

    One alone stands in the first line.

    Args:
        faults: `stage.setting: what is wrong`. What is wrong in several stages alike, as by defaults, is one fault.
    """

    def __init__(self, recipe: str | Path, faults: Iterable[str]):
        settings: dict[str, list[str]] = {}
        for fault in dict.fromkeys(faults):
            setting, _, what = one_line(fault).partition(": ")
            settings.setdefault(what, []).append(setting)
        lines = [f"{', '.join(alike)}: {what}" for what, alike in settings.items()]
        several = "\n  ".join([f"{recipe} has {len(lines)} faults:", *lines])
        super().__init__(several if len(lines) > 1 else f"{recipe} has a fault: {lines[0]}")


class NamedStage(TypedDict):
    """A stage before its own class reads it."""

    __pydantic_config__ = ConfigDict(extra="allow")
    name: str
    stage: str


class RecipeFile(TypedDict):
    """What overrides and defaults have to find in a recipe."""

    __pydantic_config__ = ConfigDict(extra="allow")
    stages: Annotated[list[NamedStage], Field(min_length=1)]
    defaults: NotRequired[dict[str, dict[str, Any]] | None]


def read_recipe(path: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a recipe, with defaults merged into its stages. All names of kinds and of settings exist.

    Args:
        path, overrides: see `training.recipe.load_recipe`.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"no recipe at {path}; the project's are in training/recipes, where `clip-moe recipes` puts them"
        )
    raw = read_yaml(read_text(path), str(path))
    validated(RecipeFile, raw, path)
    for key, value in overrides.items():
        _override(raw, key, value)
    validated(RecipeFile, raw, path)
    defaults, used = raw.pop("defaults", None) or {}, set()
    faults = [*unknown_names(raw, OUTLINES["recipe"]["settings"])]
    for number, settings in enumerate(raw["stages"]):
        try:
            outline = _outline(settings["stage"])
        except ValueError as error:
            faults.append(f"{settings['name']}.stage: {error}")
            used |= set(defaults)  # which may be meant for it
            continue
        keys = dict.fromkeys([*outline["kinds"], settings["stage"]])
        used |= set(keys)
        shared = functools.reduce(_merge, (defaults.get(key, {}) for key in keys), {})
        raw["stages"][number] = _merge(shared, settings)
        faults += unknown_names(raw["stages"][number], outline["settings"], f"{settings['name']}.")
    unused = sorted(set(defaults) - used)
    faults += [f"defaults.{key}: no stage uses them: {suggestion(key, used)}" for key in unused]
    if faults:
        raise RecipeError(path, faults)
    return raw


def _outline(stage: str) -> dict[str, Any]:
    """See `training.stages.base.outline`, by the name of a kind or of one's own class."""
    if ":" in stage:
        from training.stages.base import outline
        from training.stages.custom import import_stage

        return outline(import_stage(stage))
    if stage not in OUTLINES or stage == "recipe":
        raise ValueError(f"there is no kind of stage {stage!r}: {suggestion(stage, {*OUTLINES} - {'recipe'})}")
    return OUTLINES[stage]


def unknown_names(settings: Any, outline: dict[str, dict], where: str = "") -> Iterator[str]:
    """A line for each key that no setting has.

    Args:
        outline: name of a setting -> the same of what it holds; empty: any keys.
    """
    for number, item in enumerate(settings if isinstance(settings, list) else ()):
        yield from unknown_names(item, outline, f"{where}{number}.")
    for key, value in settings.items() if outline and isinstance(settings, dict) else ():
        if key in outline:
            yield from unknown_names(value, outline[key], f"{where}{key}.")
        else:
            what = "there is no such key" + (", here or in the defaults of this stage" if where else "")
            yield f"{where}{key}: {what}: {_meant_key(key, outline)} (got {shortened(value)})"


def _meant_key(key: str, outline: dict[str, dict]) -> str:
    """The most similar setting; else the same name within another one; else all settings."""
    within = [name for name, inner in outline.items() if key in inner]
    if within and not most_similar(key, outline):
        return f"did you mean '{within[0]}.{key}'?"
    return suggestion(key, outline)


def validated(kind: type, settings: Any, path: str | Path, stages: Sequence[str] = ()) -> Any:
    """Settings as an object of their class. Raises RecipeError with a line for each that is wrong.

    Args:
        stages: names of the stages that the settings hold.
    """
    try:
        return TypeAdapter(kind).validate_python(settings)
    except ValidationError as error:
        raise RecipeError(path, (_fault(wrong, stages) for wrong in error.errors())) from error


def _fault(error: dict[str, Any], stages: Sequence[str]) -> str:
    """What is wrong with a setting, with the choice that may be meant instead."""
    place, message = [*error["loc"]], fault_text(error)
    if stages and place[:1] == ["stages"] and len(place) > 1:
        place[:2] = [stages[place[1]]]
    if error["type"] == "literal_error":
        choices = re.findall(r"'([^']+)'", error["ctx"]["expected"])
        message += did_you_mean(str(error["input"]), choices)
    return f"{'.'.join(map(str, place)) or 'recipe'}: {message}{fault_value(error)}"


def _override(raw: dict, key: str, value: Any) -> None:
    head, *rest = key.split(".")
    target = next((stage for stage in raw["stages"] if stage["name"] == head), None)
    if target is None and head in {*OUTLINES["recipe"]["settings"], "defaults"}:
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
            what = "is a list, which is given whole, as '[...]'" if isinstance(target, list) else "has no keys"
            raise ValueError(f"--{key}: {part!r} {what}")
    target[rest[-1]] = value


def _merge(defaults: dict, settings: dict) -> dict:
    merged = copy.deepcopy(defaults)
    for key, value in settings.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged
