"""The command line of this project: `clip-moe COMMAND`, or `python -m clip_moe COMMAND`.

Importing it makes the rooms importable that lie beside this file: in a wheel, as in a checkout.
"""

import sys
from pathlib import Path

# First, since the user's own folder, where commands are started, may have a module `data` or `training`, too.
sys.path.insert(0, str(Path(__file__).parent))


def main(arguments: list[str] | None = None) -> None:
    """What `clip-moe` runs.

    Args:
        arguments: default: those of this program.
    """
    try:
        from conversion import commands as conversion
        from evaluation import commands as evaluation
        from records.command_line import command_line, run
        from training import commands as training
        from training.stages import KINDS
    except ModuleNotFoundError as error:
        sys.exit(
            f"error: {error}: the commands need more than the models: in a checkout, pip install -c constraints.txt -e "
            '".[training]"; elsewhere, pip install "clip-moe[training] @ git+https://github.com/OWNER/clip-moe"'
        )
    line = command_line(
        "clip-moe", help="Turns a dense CLIP into a sparse Mixture-of-Experts CLIP, trains, measures and publishes it."
    )
    for function in (training.run, evaluation.report, evaluation.efficiency, training.curves, conversion.publish):
        line.command(function)
    line.command(training.recipes)
    line.command("examples.app:app", name="app", help="A page in the browser to try a model.")
    given = sys.argv[1:] if arguments is None else arguments
    asked = [kind for kind in KINDS if kind.replace("_", "-") in given[:1]]
    for kind in asked or KINDS:  # of one that is asked for, no other file is imported
        line.command(training.stage_command(kind), name=kind.replace("_", "-"), help_flags=())
    run(line, arguments)


if __name__ == "__main__":
    main()
