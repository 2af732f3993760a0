"""Writes docs/settings.md: the settings of all stages, from the fields of their classes and the comments above these;
and their names into training/outlines.json, by which a recipe is checked before the classes are imported.

python -m training.settings_page
"""

import inspect
import json
import re
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from docstring_parser import parse
from pydantic.fields import FieldInfo

from data.augmentation import Augmentation
from data.captions import CaptionPolicy
from data.sources import DataArguments
from evaluation.own_data import OwnTask
from training.lora import LoraSettings
from training.recipe import Recipe
from training.scores import Evaluation
from training.settings import Reads
from training.stages import STAGES
from training.stages.base import outline, setting_names

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
OUTLINES = Path(__file__).with_name("outlines.json")
# Classes that are no stages, and the titles of their sections
OTHERS = {
    DataArguments: "data",
    Augmentation: "Augmentation",
    CaptionPolicy: "Caption policies",
    OwnTask: "Tasks on own data",
    Evaluation: "Evaluation while training",
    LoraSettings: "LoRA",
    Recipe: "The recipe",
}
BASIC = {str: "text", int: "whole number", float: "number", bool: "true or false", Any: "any"}
BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}

INTRODUCTION = """# Settings

<!-- Written by `python -m training.settings_page`. Edit the comments and docstrings of the classes instead. -->

A recipe is a YAML file. [recipes.md](recipes.md) shows how to write one.

Its key `stages` is a list of stages. Every stage has a `name` of letters, digits, spaces, `_` and `-`, which is also
the name of its folder, a `stage`, which is one of the kinds in this table, and the settings of its kind. The key
`defaults` maps a kind to settings for all stages of that kind. The other keys are those of
[the recipe](#the-recipe). "None" means `null` in YAML."""


def settings_page() -> str:
    """The page in markdown."""
    contents = ["| stage | what it is |", "|---|---|", *(_row_of_contents(stage) for stage in STAGES.values())]
    titles = {stage: kind for kind, stage in STAGES.items()} | OTHERS
    return "\n\n".join([INTRODUCTION, "\n".join(contents), *(_section(cls, titles) for cls in titles)]) + "\n"


def outlines() -> str:
    """The outlines of all classes as JSON, a line each."""
    recipe = {"settings": setting_names(Recipe) | {"stages": {}}}  # each has those of its kind
    every = {"recipe": recipe} | {kind: outline(stage) for kind, stage in STAGES.items()}
    lines = (f"{json.dumps(kind)}: {json.dumps(what, sort_keys=True)}" for kind, what in every.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def comments_above(cls: type) -> dict[str, str]:
    """Field of a class -> the comment lines above it, as one text."""
    meanings, comment = {}, []
    for line in inspect.getsource(cls).splitlines():
        field = re.match(r"    (\w+): ", line)
        if line.startswith("    # "):
            comment.append(line[6:])
        elif field:
            meanings[field[1]] = " ".join(comment)
            comment = []
        else:
            comment = []
    return meanings


def _row_of_contents(stage: type) -> str:
    summary = re.match(r".+?(?=[:;] |\.$|\. [A-Z])", _docstring(stage).split("\n\n")[0])[0]
    return f"| {_link(stage.kind)} | {summary} |"


def _docstring(cls: type) -> str:
    """Its paragraphs, each on one line."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in inspect.getdoc(cls).split("\n\n"))


def _section(cls: type, titles: dict[type, str]) -> str:
    parts = [f"## {titles[cls]}", _docstring(cls)]
    parents = [parent for parent in cls.__mro__[1:] if parent in titles]
    if parents:
        parts.append(f"It has all settings of {_link(titles[parents[0]])}, and these:")
    elsewhere = {name for parent in parents for name in parent.__pydantic_fields__} - set(inspect.get_annotations(cls))
    meanings = {}
    for base in reversed(cls.__mro__[:-1]):
        options = {option.arg_name: option.description for option in parse(base.__doc__ or "").params}
        options = {name: f"{text[0].upper()}{' '.join(text[1:].split())}." for name, text in options.items()}
        meanings |= options | {name: text for name, text in comments_above(base).items() if text}
    described = set() if cls in OTHERS and cls is not Recipe else {"name", "stage", "stages"}
    rows = [
        _row(name, field, meanings.get(name, ""))
        for name, field in sorted(cls.__pydantic_fields__.items(), key=lambda item: not item[1].is_required())
        if name not in described | elsewhere
    ]
    table = ["| setting | type | default | meaning |", "|---|---|---|---|", *rows]
    return "\n\n".join([*parts, "\n".join(table)])


def _row(name: str, field: FieldInfo, meaning: str) -> str:
    default = "required" if field.is_required() else f"`{_yaml(field.get_default(call_default_factory=True))}`"
    cells = (f"`{name}`", _type(field.annotation, field.metadata), default, meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type(kind: Any, metadata: Iterable[Any] = ()) -> str:
    """A type in words, with the bounds of a number."""
    arguments = [argument for argument in get_args(kind) if argument is not types.NoneType]
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        words = " or ".join(_type(argument) for argument in arguments)
    elif origin is Literal:
        words = ", ".join(f"`{_yaml(argument)}`" for argument in arguments)
    elif origin is Annotated:
        words = _type(arguments[0], arguments[1:])
    elif origin is list:
        words = f"list ({_type(arguments[0])})"
    elif origin is dict:
        words = "keys and values"
    elif kind in OTHERS:
        words = _link(OTHERS[kind])
    else:
        words = next((_readable(fact) for fact in metadata if isinstance(fact, Reads)), BASIC[kind])
    # A Field(...) within Annotated holds several facts
    facts = [part for fact in metadata for part in getattr(fact, "metadata", [fact])]
    bounds = [f"{sign} {getattr(fact, key):,}" for fact in facts for key, sign in BOUNDS.items() if hasattr(fact, key)]
    return " ".join([words, ", ".join(bounds)]).strip()


def _readable(reads: Reads) -> str:
    kinds = " or ".join(kind if kind == "model" else _link(kind) for kind in reads.kinds)
    return "a model" if kinds == "model" else f"{kinds} stage"


def _link(title: str) -> str:
    return f"[{title}](#{title.lower().replace(' ', '-')})"


def _yaml(value: Any) -> str:
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value).replace("'", "")


def main() -> None:
    PAGE.write_text(settings_page(), encoding="utf-8")
    OUTLINES.write_text(outlines(), encoding="utf-8")


if __name__ == "__main__":
    main()
