"""The command line of this project: `clip-moe COMMAND`, or `python -m clip_moe COMMAND`."""

import sys


def main() -> None:
    """What `clip-moe` runs."""
    try:
        from conversion import commands as conversion
        from evaluation import commands as evaluation
        from records.command_line import command_line, run
        from training import commands as training
    except ModuleNotFoundError as error:
        sys.exit(
            f"error: {error}: `pip install clip-moe` brings the models alone; the commands need a checkout and "
            'pip install -c constraints.txt -e ".[training]"'
        )
    line = command_line(
        "clip-moe", help="Turns a dense CLIP into a sparse Mixture-of-Experts CLIP, trains, measures and publishes it."
    )
    convert = command_line("convert", help="Weights of other forms, and models made of models.")
    for command in (
        conversion.openai,
        conversion.released_clip_moe,
        conversion.unify,
        conversion.assemble,
        conversion.average,
        conversion.dense,
        conversion.long_context,
        conversion.llava,
    ):
        convert.command(command)
    line.command(conversion.upcycle)
    line.command(convert)
    for command in (
        training.train,
        training.curves,
        evaluation.evaluate,
        evaluation.experts,
        evaluation.report,
        evaluation.efficiency,
        conversion.publish,
    ):
        line.command(command)
    run(line)


if __name__ == "__main__":
    main()
