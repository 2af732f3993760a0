"""The commands of this room: `clip-moe train`, `curves` and `recipes`.

Of several processes: `accelerate launch -m clip_moe train`, or `accelerate launch training/upcycle.py` in a checkout.
"""

import shutil
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from records.command_line import Folder, command
from records.files import new_folder
from records.yaml_files import read_yaml

DEMO = Path(__file__).parent / "recipes" / "demo.yaml"


@command
def train(
    *overrides: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
    config: Annotated[Path, Parameter(show_default=False)] = DEMO,
    output_dir: Folder | None = None,
    stages: str | None = None,
    experts: str | None = None,
    plan: Annotated[bool, Parameter(negative=())] = False,
) -> str | None:
    """Run the stages of a recipe. A stage that is done is skipped, one that was interrupted goes on where it stopped.

    Any other --KEY VALUE overrides a key of the recipe: its own (--seed 1) or a stage's, by the stage's name
    (--clip_up.max_steps 100, --clip_up.data.num_samples 1000). Values are read as YAML.

        clip-moe train --config training/recipes/clip_up.yaml --output-dir runs/l14 --clip_up.learning_rate 1e-5
        accelerate launch -m clip_moe train --config training/recipes/demo.yaml

    Args:
        config: recipe, a YAML file (default: the demo)
        output_dir: folder for the stages' outputs (default: the recipe's)
        stages: run only these, e.g. upcycled,clip_up (default: all)
        experts: train only these, e.g. 1,2, and the stages that they need (default: everything)
        plan: print what the run would do and take, without computing or writing anything; your own stages
            (module:Class) are imported
    """
    changed = _overrides(overrides)
    if output_dir is not None:
        changed["output_dir"] = str(output_dir)
    only = None if stages is None else _parts(stages)
    numbers = None if experts is None else _numbers(experts)
    from training.recipe_file import read_recipe

    settings = read_recipe(config, changed)  # refuses names that do not exist before torch is imported
    from training.plan import print_plan
    from training.recipe import make_recipe
    from training.runner import loading_hint, run_recipe

    recipe = make_recipe(settings, config)
    if plan:
        return print_plan(recipe, only, numbers)
    run_recipe(recipe, only, numbers)
    return loading_hint(recipe, only)


def _parts(argument: str) -> list[str]:
    return [part.strip() for part in argument.split(",")]


def _numbers(argument: str) -> list[int]:
    if not all(number.isdecimal() for number in _parts(argument)):
        raise ValueError(f"--experts takes numbers, such as 1,2, not {argument!r}")
    return [int(number) for number in _parts(argument)]


def _overrides(arguments: tuple[str, ...]) -> dict[str, object]:
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


@command
def curves(*runs: Path, output_dir: Folder, only: list[str] = ()) -> str:
    """What runs logged, as curves and as a table: losses, balance, dropped tokens, temperature and scores over steps.

        clip-moe curves runs/demo runs/clip_up --output-dir curves --only contrastive_loss

    Prints the last values of every stage that trained.

    Args:
        runs: folders of runs or of their stages
        output_dir: gets curves.png and curves.csv
        only: these quantities, as the columns of curves.csv
    """
    from training.curves import write_curves

    return write_curves(runs, output_dir, only)


@command
def recipes(output: Folder = Path(), /) -> str:
    """Copy the recipes, and the small models that they start from, to OUTPUT/training, where an installed package shows
    them.

    Recipes name these models by their place, so they run in OUTPUT. In a checkout, all is there.

        clip-moe recipes
        clip-moe train --config training/recipes/clip_moe_demo.yaml

    Args:
        output: a folder that has no folder `training` yet
    """
    with new_folder(output / "training") as folder:
        for name in ("recipes", "accelerate", "symbol_clip", "name_clip_moe"):
            shutil.copytree(Path(__file__).with_name(name), folder / name)
    return f"wrote {output / 'training'}"
