"""`clip-moe KIND OUTPUT --SETTING VALUE`: a recipe of one stage, whose folder is OUTPUT."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clip_moe.engine.help_text import in_lines
from clip_moe.engine.kinds import stage_of_kind
from clip_moe.engine.recipe import Recipe, validated
from clip_moe.engine.setting_help import Setting, docstring, is_list, settings_of, settings_within, spelled
from clip_moe.engine.stage import Stage
from clip_moe.engine.yaml_files import read_yaml

# Settings of the run, which every command has
OF_RUN = ("seed", "mixed_precision", "trackers")


def run_command(kind: str, arguments: Sequence[str]) -> str | None:
    """Run a stage as a command, and return what is to be printed."""
    if not arguments or "--help" in arguments or "-h" in arguments:
        return help_text(stage_of_kind(kind))
    recipe, rehearsal = read_command(kind, arguments)
    if rehearsal is not None:
        from clip_moe.engine.rehearsal import rehearse

        return rehearse(recipe, recipe.stages, **rehearsal)
    from clip_moe.engine.runner import run_alone, usage_hint

    run_alone(recipe)
    return usage_hint(recipe)


def read_command(kind: str, arguments: Sequence[str]) -> tuple[Recipe, dict[str, Any] | None]:
    """The recipe of a command line; and where it is to be rehearsed, the options of `engine.rehearsal.rehearse`."""
    stage, title = stage_of_kind(kind), f"clip-moe {kind.replace('_', '-')}"
    output, *rest = arguments
    if output.startswith("--") or not Path(output).name:
        raise ValueError(f"{title} OUTPUT --SETTING VALUE: the first argument is the folder to make, not {output!r}")
    settings: dict[str, Any] = {}
    for key, values in read_flags(rest).items():
        first, *within = key.split(".")
        first = first.replace("-", "_")
        settings_class = Recipe if first in OF_RUN else stage
        path = spelled([first, *within], settings_class)
        target = settings
        for part in path[:-1]:
            target = target.setdefault(part, {})
            if not isinstance(target, dict):
                raise ValueError(f"--{key}: {part} has a value already")
        if path[-1] in target:
            raise ValueError(f"--{key} is given twice, with - and with _")
        target[path[-1]] = read_value(key, values, _hint(settings_class, path))
    batch_size = settings.pop("rehearse_batch", None)
    is_rehearsal = settings.pop("rehearse", batch_size is not None)
    if not isinstance(is_rehearsal, bool):
        raise ValueError(f"--rehearse takes true or false, not {is_rehearsal!r}")
    of_run = {name: settings.pop(name) for name in OF_RUN if name in settings}
    made = validated(stage, {"name": Path(output).name, "stage": kind} | settings, title)
    recipe = validated(Recipe, {"output_dir": str(Path(output).parent), "stages": [made]} | of_run, title)
    recipe.title = title
    return recipe, {"batch_size": batch_size} if is_rehearsal else None


def help_text(stage: type[Stage]) -> str:
    """Usage, what it does, and its settings."""
    settings = [one for one in settings_of(stage) if one.name not in ("name", "stage")]
    required = [f"--{one.name} {one.name.upper()}" for one in settings if one.default is None]
    usage = " ".join(["clip-moe", stage.kind.replace("_", "-"), "OUTPUT", *required, "[--SETTING VALUE ...]"])
    rows = [line for setting in settings if setting.name not in OF_RUN for line in _help_lines(setting)]
    of_run = [one for one in settings_of(Recipe) if one.name in OF_RUN]
    return "\n".join(
        [
            in_lines(usage, 7, "Usage: "),
            "",
            in_lines(docstring(stage)),
            "",
            in_lines("Settings, whose values are read as YAML; several values make a list:"),
            "",
            *rows,
            *(line for setting in of_run for line in _help_lines(setting)),
            "  --rehearse [--rehearse_batch N]",
            in_lines("Run two steps on few samples, with N of them a batch, and tell what a run takes.", 6),
        ]
    )


def _help_lines(setting: Setting, prefix: str = "") -> list[str]:
    name, within = f"{prefix}{setting.name}", settings_within(setting.field.annotation)
    default = "" if setting.default is None else f", default {setting.default}"
    lines = [in_lines(setting.type() + ("" if within else default), 10, f"  --{name}  "), in_lines(setting.meaning, 6)]
    if within is None or is_list(setting.field.annotation) or prefix:
        return lines
    return lines + [line for one in settings_of(within) for line in _help_lines(one, f"{name}.")]


def read_flags(arguments: Sequence[str]) -> dict[str, list[str]]:
    """`--a.b 1 --c=2 3` as {"a.b": ["1"], "c": ["2", "3"]}."""
    flags: dict[str, list[str]] = {}
    values = None
    for argument in arguments:
        if argument.startswith("--"):
            key, equals, value = argument[2:].partition("=")
            values = flags.setdefault(key, [])  # one that is repeated has all its values
            values += [value] * bool(equals)
        elif values is not None:
            values.append(argument)
        else:
            raise ValueError(f"{argument!r} is no setting: write --SETTING VALUE")
    return flags


def _hint(settings: type, path: Sequence[str]) -> Any:
    """The type of a setting, by its name and the names within; None: it is not known."""
    field = settings.__pydantic_fields__.get(path[0])
    if field is None or len(path) == 1:
        return field and field.annotation
    within = settings_within(field.annotation)
    return within and _hint(within, path[1:])


# What YAML 1.1 takes for another number: octal and base 60
ODD_NUMBER = re.compile(r"[+-]?0\d+|[+-]?\d+(:\d+)+(\.\d*)?")
# Patterns of files, which YAML takes for an alias and a dictionary
PATTERN = re.compile(r"\*|\{\d+\.\.\d+\}")


def _read(text: str, flag: str) -> Any:
    """A value as YAML, but for texts that YAML would cut at a comment (` #`) or not take for a text."""
    if PATTERN.match(text):
        return text
    if ODD_NUMBER.fullmatch(text):
        raise ValueError(
            f"{flag}: YAML takes {text} for another number: write it in plain digits, or in quotes as text"
        )
    value = read_yaml(text, flag)
    return text if " #" in text and isinstance(value, str | None) and text[0] not in "\"'" else value


def read_value(key: str, values: list[str], hint: Any = None) -> Any:
    """The value of a flag, each of whose values is read as YAML.

    Args:
        hint: the type of its setting, which makes a list of one value, and True of none.
    """
    read = [_read(value, f"--{key}") for value in values]
    if not read and (hint is bool or key == "rehearse"):
        return True
    if not read:
        raise ValueError(f"--{key} has no value")
    return read if len(read) > 1 or (is_list(hint) and not isinstance(read[0], list)) else read[0]
