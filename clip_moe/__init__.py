"""The command line of this project, `clip-moe COMMAND` or `python -m clip_moe COMMAND`, the functions behind it and the
models: `from clip_moe import CLIPMoEModel, upcycle`. The models make transformers' Auto classes know them.

Its rooms are `clip_moe.training`, `clip_moe.data` and so on. In a checkout they are links to the folders of these names
beside this one.
"""

import importlib
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors. At run time each is imported when it is asked for: commands begin with this file
    from clip_moe.conversion.presets import PRESETS
    from clip_moe.conversion.upcycle import upcycle
    from clip_moe.engine.recipe import load_recipe
    from clip_moe.engine.runner import run_recipe
    from clip_moe.evaluation.evaluate import evaluate_model
    from clip_moe.evaluation.tasks import find_tasks
    from modeling_clip_moe import CLIPMoDEModel, CLIPMoEConfig, CLIPMoEModel, register_model

# Threads that wait do not spin: on shared cores, spinning costs several times the time. Read when torch is imported
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__all__ = ["PRESETS", "upcycle", "load_recipe", "run_recipe", "find_tasks", "evaluate_model"]
__all__ += ["CLIPMoDEModel", "CLIPMoEConfig", "CLIPMoEModel", "register_model"]
MODULES = dict.fromkeys(__all__, "modeling_clip_moe") | {
    "PRESETS": "clip_moe.conversion.presets",
    "upcycle": "clip_moe.conversion.upcycle",
    "load_recipe": "clip_moe.engine.recipe",
    "run_recipe": "clip_moe.engine.runner",
    "find_tasks": "clip_moe.evaluation.tasks",
    "evaluate_model": "clip_moe.evaluation.evaluate",
}


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__


def main(arguments: list[str] | None = None) -> None:
    """The command `clip-moe`.

    Args:
        arguments: default: those of this program.
    """
    given = sys.argv[1:] if arguments is None else arguments
    try:
        given = with_own_classes(given)
        if arguments is None:
            sys.argv[1:] = given
        from clip_moe.engine.command_line import run_one, run_stage
        from clip_moe.engine.kinds import KINDS
        from clip_moe.engine.program import end

        kind = given[0].replace("-", "_") if given else ""
        if kind in KINDS:  # whose help needs its own file alone
            return end(lambda: run_stage(kind, given[1:]), is_all=arguments is None)
        commands = _commands()
    except ModuleNotFoundError as error:
        sys.exit(
            f"error: {error}: the commands need more than the models: in a checkout, pip install -c constraints.txt -e "
            '".[training]"; elsewhere, pip install "clip-moe[training] @ git+https://github.com/OWNER/clip-moe"'
        )
    about = "Turns a dense CLIP into a sparse Mixture-of-Experts CLIP, trains, measures and publishes it. "
    about += "--import MODULE makes any command know models of your own."
    end(lambda: run_one("clip-moe", about, commands, given, _kinds()), is_all=arguments is None)


def with_own_classes(arguments: list[str]) -> list[str]:
    """The arguments of a command without `--import MODULE`, whose models are known from then on."""
    if not any(argument.partition("=")[0] == "--import" for argument in arguments):
        return arguments
    from clip_moe.conversion.own_classes import import_own_classes
    from clip_moe.engine.program import one_line_errors

    with one_line_errors():
        return import_own_classes(arguments)


def _commands() -> dict[str, Callable[..., str | None]]:
    """The commands of an overview, in the order of a user's day."""
    from clip_moe.app.commands import app
    from clip_moe.conversion.commands import publish
    from clip_moe.evaluation.commands import efficiency, report
    from clip_moe.evaluation.stages.evaluate import EvaluateStage
    from clip_moe.training.commands import finetune, recipes, run

    # `evaluate` is a stage, which `main` runs before it asks for these. It is listed beside `report`
    return dict(
        finetune=finetune,
        run=run,
        app=app,
        evaluate=EvaluateStage,
        report=report,
        efficiency=efficiency,
        publish=publish,
        recipes=recipes,
    )


def _kinds() -> str:
    """The kinds of stages, for an overview."""
    from clip_moe.engine.kinds import KINDS_OF_ROOM
    from clip_moe.engine.setting_help import in_lines

    kinds_of_rooms = {room: ", ".join(kinds.split()).replace("_", "-") for room, kinds in KINDS_OF_ROOM.items()}
    lines = [in_lines(f"{room}: {kinds}", 6, "  ") for room, kinds in kinds_of_rooms.items()]
    return "\n".join(["", "Kinds of stages, each a command, clip-moe KIND OUTPUT:", *lines])
