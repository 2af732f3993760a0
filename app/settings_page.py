"""Writes docs/settings.md: the settings of all stages, from the fields of their classes and the comments above these.

python -m clip_moe.app.settings_page
"""

import inspect
import re
from pathlib import Path

from clip_moe.data.arguments import Augmentation, CaptionPolicy, DataArguments
from clip_moe.engine.kinds import KINDS, stage_of_kind
from clip_moe.engine.recipe import Recipe
from clip_moe.engine.setting_help import docstring, settings_of
from clip_moe.evaluation.own_task import OwnTask
from clip_moe.training.train_settings import Evaluation, LoraSettings

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"
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

INTRODUCTION = """# Settings

<!-- Written by `make docs`. Edit the comments and docstrings of the classes instead. -->

A recipe is a YAML file. [recipes.md](recipes.md) shows how to write one.

Its key `stages` is a list of stages. Every stage has a `name` of letters, digits, spaces, `_` and `-`, which also
names its folder; a `stage`, one of the kinds in this table; and the settings of its kind. The key `defaults` maps a
kind to settings for all stages of that kind. [The recipe](#the-recipe) has the other keys. "None" means `null` in YAML.

Each kind is also a command: `clip-moe KIND OUTPUT --SETTING VALUE` makes the folder OUTPUT. Values are read as YAML,
lists are written as several values, and nested settings have a dot: `--data.source my/photos`."""


def settings_page() -> str:
    """The page in markdown."""
    stages = {stage_of_kind(kind): kind for kind in KINDS}
    contents = ["| stage | what it is |", "|---|---|"]
    for stage in stages:
        summary = re.match(r".+?(?=[:;] |\.$|\. [A-Z])", docstring(stage).split("\n\n")[0])[0]
        contents.append(f"| {_link(stage.kind)} | {summary} |")
    titles = stages | OTHERS
    return "\n\n".join([INTRODUCTION, "\n".join(contents), *(_section(cls, titles) for cls in titles)]) + "\n"


def _section(cls: type, titles: dict[type, str]) -> str:
    paragraphs = docstring(cls).split("\n\n")
    parts = [f"## {titles[cls]}", *(f"```bash\n{inspect.cleandoc(p)}\n```" if p[0] == " " else p for p in paragraphs)]
    parents = [parent for parent in cls.__mro__[1:] if parent in titles]
    if parents:
        parts.append(f"It has all settings of {_link(titles[parents[0]])}, and these:")
    elsewhere = {name for parent in parents for name in parent.__pydantic_fields__} - set(inspect.get_annotations(cls))
    left_out = elsewhere | (set() if cls in OTHERS and cls is not Recipe else {"name", "stage", "stages"})
    rows = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    for setting in settings_of(cls):
        if setting.name not in left_out:
            default = "required" if setting.default is None else f"`{setting.default}`"
            cells = (f"`{setting.name}`", setting.type(_link, titles), default, setting.meaning)
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n\n".join([*parts, "\n".join(rows)])


def _link(title: str) -> str:
    return f"[{title}](#{title.lower().replace(' ', '-')})"


if __name__ == "__main__":
    PAGE.write_text(settings_page(), encoding="utf-8")
