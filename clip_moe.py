"""The command line of this project, `clip-moe COMMAND` or `python -m clip_moe COMMAND`, and the functions behind it:
`from clip_moe import upcycle`.

Importing it makes the rooms importable that lie beside this file: in a wheel, as in a checkout.
"""

import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cyclopts import App

# Threads that wait do not spin: on shared cores, spinning costs several times the time. Read when torch is imported
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# First, since the user's own folder, where commands are started, may have a module `data` or `training`, too.
sys.path.insert(0, str(Path(__file__).parent))


# What is imported from here -> where it is. Imported when it is asked for: the command line begins with this file
FUNCTIONS = {
    "PRESETS": "conversion.presets",
    "upcycle": "conversion.upcycle",
    "load_recipe": "training.recipe",
    "run_recipe": "training.runner",
    "find_tasks": "evaluation.tasks",
    "evaluate_model": "evaluation.evaluate",
}


def __getattr__(name: str) -> Any:
    if name not in FUNCTIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(FUNCTIONS[name]), name)


def main(arguments: list[str] | None = None) -> None:
    """What `clip-moe` runs.

    Args:
        arguments: default: those of this program.
    """
    given = sys.argv[1:] if arguments is None else arguments
    try:
        given = with_own_classes(given)
        if arguments is None:
            sys.argv[1:] = given
        from training.stages import KINDS

        kind = given[0].replace("-", "_") if given else ""
        if kind in KINDS:  # whose help needs its own file alone
            from records.program import end
            from training.stage_command import run_command

            return end(lambda: run_command(kind, given[1:]), is_all=arguments is None)
        line = _command_line()
    except ModuleNotFoundError as error:
        sys.exit(
            f"error: {error}: the commands need more than the models: in a checkout, pip install -c constraints.txt -e "
            '".[training]"; elsewhere, pip install "clip-moe[training] @ git+https://github.com/OWNER/clip-moe"'
        )
    from records.command_line import run

    run(line, None if arguments is None else given)


def with_own_classes(arguments: list[str]) -> list[str]:
    """The arguments of a command without `--import MODULE`, whose models are known from then on."""
    if not any(argument.partition("=")[0] == "--import" for argument in arguments):
        return arguments
    from conversion.own_classes import import_own_classes
    from records.program import one_line_errors

    with one_line_errors():
        return import_own_classes(arguments)


def _command_line() -> "App":
    """All commands."""
    from conversion import commands as conversion
    from evaluation import commands as evaluation
    from examples import commands as examples
    from records.command_line import command_line
    from records.help_text import in_lines
    from training import commands as training
    from training.stages import PURPOSES

    kinds = (in_lines(f"{what}: {', '.join(of).replace('_', '-')}", 6, "  ") for what, of in PURPOSES.items())
    line = command_line(
        "clip-moe",
        help="Turns a dense CLIP into a sparse Mixture-of-Experts CLIP, trains, measures and publishes it. "
        "clip-moe COMMAND --help says more; --import MODULE makes any command know models of your own.",
        help_epilogue="\n".join(["Kinds of stages, each a command, clip-moe KIND OUTPUT:", *kinds]),
    )
    commands = (  # in the order of a user's day
        *(training.finetune, training.run, examples.app, evaluation.report, evaluation.efficiency),
        *(training.curves, conversion.publish, training.recipes),
    )
    for number, function in enumerate(commands):
        line.command(function, sort_key=number, help_epilogue="")
    # Beside `report`; `main` runs it, as all kinds
    evaluate = "training.stages.evaluate:EvaluateStage"
    line.command(evaluate, name="evaluate", help="Models side by side on evaluation tasks, with a report.", sort_key=2)
    return line


if __name__ == "__main__":
    main()
