"""Run a recipe.

accelerate launch training/upcycle.py --config training/recipes/demo.yaml
python -m training.upcycle --config training/recipes/clip_up.yaml --output-dir runs/l14 --clip_up.learning_rate 1e-5
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from conversion.folders import load_config
from evaluation.processes import first_failure_speaks, launch_cpu_processes, silence_other_processes
from records.files import one_line_errors
from records.yaml_files import read_yaml
from training.checks import RecipeError
from training.plan import plan, render
from training.recipe import Recipe, load_recipe
from training.runner import run_recipe, wanted_stages
from training.stages.base import Stage

DEFAULT_RECIPE = Path(__file__).parent / "recipes" / "demo.yaml"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="training/upcycle.py",
        allow_abbrev=False,  # --stage is none of the options, and no stage's name is taken for one
        description=(
            "Run the stages of a recipe. A stage that is done is skipped, one that was interrupted goes on where it "
            "stopped."
        ),
        epilog=(
            "Any other --KEY VALUE overrides a key of the recipe: its own (--seed 1) or a stage's, by the stage's name "
            "(--clip_up.max_steps 100, --clip_up.data.num_samples 1000). Values are read as YAML."
        ),
    )
    parser.add_argument("--config", default=DEFAULT_RECIPE, help="recipe, a YAML file (default: the demo)")
    parser.add_argument("--output-dir", help="folder for the stages' outputs (default: the recipe's)")
    parser.add_argument("--stages", help="run only these stages, e.g. upcycled,clip_up (default: all)")
    parser.add_argument(
        "--experts", help="train only these experts, e.g. 1,2, and the stages that they need (default: everything)"
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="print what the run would do and take, without computing or writing anything; your own stages "
        "(module:Class) are imported",
    )
    known, rest = parser.parse_known_args(argv)
    silence_other_processes()
    interrupted = "run the same command again to go on from the last checkpoint"
    with one_line_errors(interrupted), _faults_in_lines(), first_failure_speaks():
        overrides = _overrides(rest)
        if known.output_dir is not None:
            overrides["output_dir"] = known.output_dir
        recipe = load_recipe(known.config, overrides)
        only = None if known.stages is None else _names(known.stages)
        experts = None if known.experts is None else _numbers(known.experts)
        if known.plan:
            _print_plan(recipe, wanted_stages(recipe, only, experts))
            return
        output_dir = run_recipe(recipe, only, experts)
    models = [stage for stage in recipe.stages if stage.makes_model]
    asked = {stage.name for stage in models} if only is None else set(only)
    finished = [stage for stage in models if stage.name in asked and (output_dir / stage.name).is_dir()]
    if finished and int(os.environ.get("RANK", 0)) == 0:
        folder = output_dir / finished[-1].name
        auto = "AutoModelForImageTextToText" if load_config(folder).model_type == "llava" else "AutoModel"
        print(
            "\nLoad the model with\n\n"
            "    import modeling_clip_moe\n"
            f"    from transformers import {auto}\n"
            f'    model = {auto}.from_pretrained("{folder}")\n'
        )


@contextlib.contextmanager
def _faults_in_lines() -> Iterator[None]:
    """The faults of a recipe end the program as other errors do, but each has a line of its own."""
    try:
        yield
    except RecipeError as error:
        sys.exit(f"error: {error}")


def _print_plan(recipe: Recipe, stages: list[Stage]) -> None:
    """Raises RecipeError after the plan where the run could not begin."""
    num_processes = int(os.environ.get("WORLD_SIZE", 1))
    rows, faults = plan(recipe, stages, num_processes)
    if int(os.environ.get("RANK", 0)) == 0:
        print(render(recipe.title, rows, num_processes), flush=True)
    if faults:
        raise RecipeError(recipe.title, faults)


def _parts(argument: str) -> list[str]:
    return [part.strip() for part in argument.split(",")]


def _names(argument: str) -> list[str]:
    if not all(_parts(argument)):
        raise ValueError(f"--stages takes names of stages, such as upcycled,clip_up, not {argument!r}")
    return _parts(argument)


def _numbers(argument: str) -> list[int]:
    if not all(number.isdecimal() for number in _parts(argument)):
        raise ValueError(f"--experts takes numbers, such as 1,2, not {argument!r}")
    return [int(number) for number in _parts(argument)]


def _overrides(arguments: list[str]) -> dict[str, object]:
    """`--a.b 1 --c=2` as {"a.b": 1, "c": 2}."""
    overrides = {}
    remaining = list(arguments)
    while remaining:
        key = remaining.pop(0)
        if not key.startswith("--"):
            raise ValueError(f"{key!r} is not an option: overrides are written --KEY VALUE")
        key, equals, value = key[2:].partition("=")
        if not equals:
            if not remaining:
                raise ValueError(f"--{key} has no value")
            value = remaining.pop(0)
        overrides[key] = read_yaml(value, f"--{key}")
    return overrides


if __name__ == "__main__":
    launch_cpu_processes("upcycle.py", sys.argv)
    main()
