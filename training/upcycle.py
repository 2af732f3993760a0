"""Run a recipe.

accelerate launch training/upcycle.py --config training/recipes/demo.yaml
python -m training.upcycle --config training/recipes/clip_up.yaml --output-dir runs/l14 --clip_up.learning_rate 1e-5
"""

if __name__ == "__main__":
    import sys

    from records.processes import launch_cpu_processes
    from training.commands import train

    launch_cpu_processes("upcycle.py", sys.argv)
    train.main()

from collections.abc import Sequence

from conversion.folders import load_config
from records.processes import is_first_process, num_processes
from training.plan import plan, render
from training.recipe import Recipe
from training.recipe_file import RecipeError
from training.runner import run_recipe, wanted_stages


def run(recipe: Recipe, only: Sequence[str] | None = None, experts: Sequence[int] | None = None) -> str | None:
    """Run the stages of a recipe. Returns how to load its last model, if it makes one."""
    output_dir = run_recipe(recipe, only, experts)
    models = [stage for stage in recipe.stages if stage.makes_model]
    asked = {stage.name for stage in models} if only is None else set(only)
    finished = [stage for stage in models if stage.name in asked and (output_dir / stage.name).is_dir()]
    if not finished:
        return None
    folder = output_dir / finished[-1].name
    auto = "AutoModelForImageTextToText" if load_config(folder).model_type == "llava" else "AutoModel"
    return (
        "\nLoad the model with\n\n"
        "    import modeling_clip_moe\n"
        f"    from transformers import {auto}\n"
        f'    model = {auto}.from_pretrained("{folder}")\n'
    )


def print_plan(recipe: Recipe, only: Sequence[str] | None = None, experts: Sequence[int] | None = None) -> None:
    """Print what a run would do."""
    rows, faults = plan(recipe, wanted_stages(recipe, only, experts), num_processes())
    if is_first_process():
        print(render(recipe.title, rows, num_processes()), flush=True)
    if faults:
        raise RecipeError(recipe.title, faults)
