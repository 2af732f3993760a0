"""Commands: the settings of a stage, or the parameters of a function, as `--NAME VALUE`.

A stage's command is a recipe of that stage alone, whose folder is its first argument. The functions of a room's
`commands.py` import what they call in their bodies, so that `--help` and a mistyped option need no torch.
"""

import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from clip_moe.engine.kinds import stage_of_kind
from clip_moe.engine.messages import suggestion
from clip_moe.engine.program import end
from clip_moe.engine.recipe import Recipe, RunSettings, validated
from clip_moe.engine.setting_help import (
    Setting,
    docstring,
    in_lines,
    is_list,
    parameter_meanings,
    settings_of,
    settings_within,
    spelled,
    takes_text_alone,
)
from clip_moe.engine.settings import STRICT, refuse
from clip_moe.engine.yaml_files import read_yaml

Function = Callable[..., str | None]
# Column in which an overview says what a command does
PURPOSE_COLUMN = 14
# What YAML 1.1 takes for another number: octal and base 60
ODD_NUMBER = re.compile(r"[+-]?0\d+|[+-]?\d+(:\d+)+(\.\d*)?")
# Patterns of files, which YAML takes for an alias and a dictionary
PATTERN = re.compile(r"\*|\{\d+\.\.\d+\}")


# Samples in the batch of a process in a rehearsal
RehearsedBatch = Annotated[int, Field(gt=0, strict=True)]


@dataclass(config=STRICT, kw_only=True)
class CommandSettings(RunSettings):
    """Settings that the command of every stage has beside those of the stage."""

    # Run two steps on few samples, and print what a run takes.
    rehearse: bool = False
    # Rehearse with so many samples in the batch of a process.
    rehearse_batch: RehearsedBatch | None = None


def _require_name(path: Any) -> Any:
    if isinstance(path, str) and not path.strip():
        raise ValueError("a folder needs a name")  # `Path` would make the current folder of it
    return path


# A parameter that names a folder
Folder = Annotated[Path, BeforeValidator(_require_name)]


def command(function: Function) -> Function:
    """Gives a function a command line, `function.main(arguments)`. Parameters before a `/` are arguments, the others
    options, and `*overrides` takes options that the function does not know. A text that it returns is printed."""

    def main(arguments: Sequence[str] | None = None) -> None:
        given = sys.argv[1:] if arguments is None else list(arguments)
        spec = sys.modules["__main__"].__spec__
        module = spec.name.removesuffix(".__main__") if spec else function.__module__
        end(lambda: call(function, f"python -m {module}", given), is_all=arguments is None)

    function.main = main
    return function


def run_program(name: str, about: str, functions: Mapping[str, Function], footer: str = "") -> None:
    """Run the one of several functions that the first argument of this program names."""
    end(lambda: run_one(name, about, functions, sys.argv[1:], footer), is_all=True)


def run_one(
    name: str, about: str, functions: Mapping[str, Function], arguments: Sequence[str], footer: str = ""
) -> str | None:
    """The result of the function that the first argument names, or an overview of all."""
    if not arguments or arguments[0] in ("--help", "-h"):
        rows = [
            in_lines(docstring(function).split("\n\n")[0], PURPOSE_COLUMN, f"  {title}".ljust(PURPOSE_COLUMN))
            for title, function in functions.items()
        ]
        head = [in_lines(f"Usage: {name} COMMAND"), "", in_lines(about), "", "Commands, each with --help:"]
        return "\n".join(head + rows + [footer] * bool(footer))
    if arguments[0] not in functions:
        raise ValueError(f"there is no command {arguments[0]!r}: {suggestion(arguments[0], functions)}")
    return call(functions[arguments[0]], f"{name} {arguments[0]}", arguments[1:])


def call(function: Function, title: str, arguments: Sequence[str]) -> str | None:
    """Call a function with the arguments of a command line, or return its help."""
    if "--help" in arguments or "-h" in arguments:
        return function_help(function, title)
    positional, overrides, options = read_arguments(function, title, arguments)
    return function(*positional, *overrides, **options)


def read_arguments(
    function: Function, title: str, arguments: Sequence[str]
) -> tuple[list[Any], list[str], dict[str, Any]]:
    """The positional arguments of a function, options that it does not know, as they are, and options by name."""
    parameters = inspect.signature(function).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_ONLY]
    takes_others = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
    settings_class = _settings_class(function)
    number = next((at for at, word in enumerate(arguments) if word.startswith("--")), len(arguments))
    words = list(arguments[:number])
    if names and len(words) >= len(names) and is_list(_hint(settings_class, names[-1:])):
        words[len(names) - 1 :] = [words[len(names) - 1 :]]  # a list takes all that are left
    more = words[len(names) :]  # which `read_flags` refuses
    values, others = read_settings([*more, *arguments[number:]], [settings_class], takes_others)
    settings = vars(validated(settings_class, dict(zip(names, words, strict=False)) | values, title))
    return [settings.pop(name) for name in names], others, settings


def read_settings(
    arguments: Sequence[str], classes: Sequence[type], takes_others: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Flags as settings of these classes and those within, and if `takes_others` the flags of no class, as they are."""
    settings: dict[str, Any] = {}
    others: list[str] = []
    for key, texts in read_flags(arguments, lambda key: ".".join(spelled(key.split("."), classes))).items():
        *outer, name = path = key.split(".")
        owner = next((cls for cls in classes if path[0] in cls.__pydantic_fields__), None)
        if takes_others and (owner is None or outer):
            others += [f"--{key}", *texts]
            continue
        target = settings
        for part in outer:
            target = target.setdefault(part, {})
            if not isinstance(target, dict):
                raise ValueError(f"--{key}: {part} has a value already")
        target[name] = read_value(key, texts, owner and _hint(owner, path))
    return settings, others


def _settings_class(function: Function) -> type:
    """The parameters of a function as a class of settings."""
    hints, fields = get_type_hints(function, include_extras=True), []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is not parameter.VAR_POSITIONAL:
            default = field() if parameter.default is parameter.empty else field(default=parameter.default)
            fields.append((parameter.name, hints[parameter.name], default))
    return dataclass(config=STRICT, kw_only=True)(make_dataclass(function.__name__, fields, kw_only=True))


def function_help(function: Function, title: str) -> str:
    """Usage of a function's command, its purpose, and its parameters."""
    positional = {p.name for p in inspect.signature(function).parameters.values() if p.kind is p.POSITIONAL_ONLY}
    settings = settings_of(_settings_class(function), parameter_meanings(function))
    arguments = [setting for setting in settings if setting.name in positional]
    rows = [in_lines(setting.meaning, 6, f"  {setting.name.upper()}  ") for setting in arguments]
    rows += [line for setting in settings if setting.name not in positional for line in _help_lines(setting)]
    return _help(title, [argument.name for argument in arguments], settings, docstring(function), rows)


def run_stage(kind: str, arguments: Sequence[str]) -> str | None:
    """Run the command of a stage, and return what is to be printed."""
    if not arguments or "--help" in arguments or "-h" in arguments:
        return stage_help(kind)
    recipe, options = read_stage_command(kind, arguments)
    if options.rehearse or options.rehearse_batch:
        from clip_moe.engine.rehearsal import rehearse

        return rehearse(recipe, recipe.stages, options.rehearse_batch)
    from clip_moe.engine.runner import run_alone, usage_hint

    run_alone(recipe)
    return usage_hint(recipe)


def read_stage_command(kind: str, arguments: Sequence[str]) -> tuple[Recipe, CommandSettings]:
    """The recipe of a stage's command line, and how to run it."""
    stage, title = stage_of_kind(kind), f"clip-moe {kind.replace('_', '-')}"
    output = arguments[0]
    if output.startswith("--") or not Path(output).name:
        raise ValueError(f"{title} OUTPUT --SETTING VALUE: the first argument is the folder to make, not {output!r}")
    settings, _ = read_settings(arguments[1:], [CommandSettings, stage])
    run_settings = {name: settings.pop(name) for name in CommandSettings.__pydantic_fields__ if name in settings}
    for key in {"name", "stage"} & settings.keys():
        raise ValueError(f"{title}: {key}: there is no such key: the folder names the stage, and the command its kind")
    settings |= {"name": Path(output).name, "stage": kind}
    options, alone = validated(CommandSettings, run_settings, title), validated(stage, settings, title)
    run = {"seed": options.seed, "mixed_precision": options.mixed_precision, "trackers": options.trackers}
    recipe = validated(Recipe, {"output_dir": str(Path(output).parent), "stages": [alone]} | run, title)
    recipe.title = title
    return recipe, options


def stage_help(kind: str) -> str:
    """Usage of a stage's command, its purpose, and its settings."""
    stage = stage_of_kind(kind)
    shared = settings_of(CommandSettings)
    left_out = {"name", "stage", *(setting.name for setting in shared)}
    settings = [setting for setting in settings_of(stage) if setting.name not in left_out]
    rows = [in_lines("Settings, whose values are read as YAML; several values make a list:"), ""]
    rows += [line for setting in settings + shared for line in _help_lines(setting)]
    return _help(f"clip-moe {kind.replace('_', '-')}", ["output"], settings, docstring(stage), rows)


def _help(title: str, arguments: Sequence[str], settings: Sequence[Setting], about: str, rows: Sequence[str]) -> str:
    required = [f"--{s.name} {s.name.upper()}" for s in settings if s.default is None and s.name not in arguments]
    usage = f"{' '.join([title] + [argument.upper() for argument in arguments] + required)} [--SETTING VALUE ...]"
    return "\n\n".join([in_lines(usage, 7, "Usage: "), in_lines(about), "\n".join(rows)])


def _help_lines(setting: Setting, prefix: str = "") -> list[str]:
    name, within = f"{prefix}{setting.name}", settings_within(setting.field.annotation)
    default = "" if setting.default in (None, "null") else f", default {setting.default}"
    lines = [in_lines(setting.type() + ("" if within else default), 10, f"  --{name}  "), in_lines(setting.meaning, 6)]
    if within is None or is_list(setting.field.annotation) or prefix:
        return lines
    return lines + [line for inner in settings_of(within) for line in _help_lines(inner, f"{name}.")]


def read_flags(arguments: Sequence[str], spell: Callable[[str], str] = str) -> dict[str, list[str]]:
    """`--a.b 1 --c=2 3` as {"a.b": ["1"], "c": ["2", "3"]}. One that is repeated has all its values.

    Args:
        spell: the name of a flag as its settings spell it.
    """
    flags: dict[str, list[str]] = {}
    values = None
    for argument in arguments:
        if argument.startswith("--"):
            key, equals, value = argument[2:].partition("=")
            values = flags.setdefault(spell(key), [])
            values += [value] * bool(equals)
        elif values is not None:
            values.append(argument)
        else:
            raise ValueError(f"{argument!r} is no setting: write --SETTING VALUE")
    return flags


def read_value(key: str, values: list[str], hint: Any = None) -> Any:
    """The value of a flag, each of whose values is read as YAML.

    Args:
        hint: the type of its setting, which makes a list of one value, True of no value, and texts of numbers.
    """
    read = [_read(value, f"--{key}", takes_text_alone(hint)) for value in values]
    if not read and (hint is bool or bool in get_args(hint)):
        return True
    is_one = hint not in (None, Any) and not is_list(hint)
    refuse(
        (not read, f"--{key} has no value"),
        (len(read) > 1 and is_one, f"--{key} takes one value, not {' '.join(values)}"),
    )
    return read if len(read) > 1 or (is_list(hint) and not isinstance(read[0], list)) else read[0]


def _read(text: str, flag: str, is_text: bool) -> Any:
    """A value as YAML, but for texts that YAML would cut at a comment (` #`) or not take for a text."""
    if PATTERN.match(text):
        return text
    if ODD_NUMBER.fullmatch(text) and not is_text:
        raise ValueError(
            f"{flag}: YAML takes {text} for another number: write it in plain digits, or in quotes as text"
        )
    value = read_yaml(text, flag)
    if is_text and not isinstance(value, str | list | None):
        return text
    return text if " #" in text and isinstance(value, str | None) and text[0] not in "\"'" else value


def _hint(settings: type, path: Sequence[str]) -> Any:
    """The type of a setting, by its name and the names within; None: it is not known."""
    setting = settings.__pydantic_fields__.get(path[0])
    if setting is None or len(path) == 1:
        return setting and setting.annotation
    within = settings_within(setting.annotation)
    return within and _hint(within, path[1:])
