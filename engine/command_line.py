"""Commands: the settings of a stage, or the parameters of a function, as `--NAME VALUE`.

A stage's command is a recipe of that stage alone, whose folder is its first argument. The functions of a room's
`commands.py` import what they call in their bodies, so that `--help` and a mistyped option need no torch.
"""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import Annotated, get_type_hints

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from clip_moe.engine.flags import is_list, read_settings
from clip_moe.engine.kinds import stage_of_kind
from clip_moe.engine.messages import suggestion
from clip_moe.engine.program import end
from clip_moe.engine.recipe import Recipe, RunSettings, require_folder, validated
from clip_moe.engine.setting_help import docstring, function_help, in_lines, stage_help
from clip_moe.engine.settings import STRICT, refuse
from clip_moe.engine.stage import Stage

Function = Callable[..., str | None]
# Column in which an overview says what a command does
PURPOSE_COLUMN = 14
# Samples in the batch of a process in a rehearsal
RehearsedBatch = Annotated[int, Field(gt=0, strict=True)]


@dataclass(config=STRICT, kw_only=True)
class CommandSettings(RunSettings):
    """Settings that the command of every stage has beside those of the stage."""

    # Run two steps on few samples, and print what a run takes.
    rehearse: bool = False
    # Samples per process in a rehearsed batch.
    rehearse_batch: RehearsedBatch | None = None


# A parameter that names a folder
Folder = Annotated[Path, BeforeValidator(require_folder)]


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


def run_program(name: str, about: str, functions: Mapping[str, Function]) -> None:
    """Run the one of several functions that the first argument of this program names."""
    end(lambda: run_one(name, about, functions, sys.argv[1:]), is_all=True)


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
        raise ValueError(f"unknown command {arguments[0]!r}: {suggestion(arguments[0], functions)}")
    return call(functions[arguments[0]], f"{name} {arguments[0]}", arguments[1:])


def call(function: Function, title: str, arguments: Sequence[str]) -> str | None:
    """Call a function with the arguments of a command line, or return its help."""
    parameters, settings_class = inspect.signature(function).parameters.values(), _settings_class(function)
    names = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_ONLY]
    if "--help" in arguments or "-h" in arguments:
        return function_help(title, function, settings_class, names)
    takes_others = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
    number = next((at for at, word in enumerate(arguments) if word.startswith("--")), len(arguments))
    words = list(arguments[:number])
    if names and len(words) >= len(names) and is_list(settings_class.__pydantic_fields__[names[-1]].annotation):
        words[len(names) - 1 :] = [words[len(names) - 1 :]]  # a list takes all that are left
    more = words[len(names) :]  # which `read_flags` refuses
    values, overrides = read_settings([*more, *arguments[number:]], [settings_class], takes_others)
    given = dict(zip(names, words, strict=False))
    refuse(*((name in values, f"--{name} is already given as an argument, {given[name]}") for name in given))
    options = vars(validated(settings_class, given | values, title))
    positional = [options.pop(name) for name in names]
    return function(*positional, *overrides, **options)


def _settings_class(function: Function) -> type:
    """The parameters of a function as a class of settings."""
    hints, fields = get_type_hints(function, include_extras=True), []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is not parameter.VAR_POSITIONAL:
            default = field() if parameter.default is parameter.empty else field(default=parameter.default)
            fields.append((parameter.name, hints[parameter.name], default))
    return dataclass(config=STRICT, kw_only=True)(make_dataclass(function.__name__, fields, kw_only=True))


def run_stage(kind: str, arguments: Sequence[str]) -> str | None:
    """Run the command of a stage, and return what is to be printed."""
    stage = stage_of_kind(kind)
    if not arguments or "--help" in arguments or "-h" in arguments:
        return stage_help(_title(stage), stage, CommandSettings)
    recipe, options = read_stage_command(stage, arguments)
    if options.rehearse or options.rehearse_batch:
        from clip_moe.engine.rehearsal import rehearse

        return rehearse(recipe, recipe.stages, options.rehearse_batch)
    from clip_moe.engine.runner import run_alone, usage_hint

    run_alone(recipe)
    return usage_hint(recipe)


def read_stage_command(stage: type[Stage], arguments: Sequence[str]) -> tuple[Recipe, CommandSettings]:
    """The recipe of a stage's command line, and how to run it."""
    title, output = _title(stage), arguments[0]
    if output.startswith("--") or not Path(output).name:
        raise ValueError(f"{title} OUTPUT --SETTING VALUE: the first argument is the folder to make, got {output!r}")
    settings, _ = read_settings(arguments[1:], [CommandSettings, stage])
    run_settings = {name: settings.pop(name) for name in CommandSettings.__pydantic_fields__ if name in settings}
    for key in {"name", "stage"} & settings.keys():
        raise ValueError(f"{title}: --{key} cannot be set: the folder names the stage, and the command its kind")
    settings |= {"name": Path(output).name, "stage": stage.kind}
    options, alone = validated(CommandSettings, run_settings, title), validated(stage, settings, title)
    run = {name: getattr(options, name) for name in RunSettings.__pydantic_fields__}
    recipe = validated(Recipe, {"output_dir": str(Path(output).parent), "stages": [alone]} | run, title)
    recipe.title = title
    return recipe, options


def _title(stage: type[Stage]) -> str:
    return f"clip-moe {stage.kind.replace('_', '-')}"
