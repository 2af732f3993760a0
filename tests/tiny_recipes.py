"""The papers' recipes on models of a few thousand parameters: `recipes/NAME.yaml`."""

import shutil
from pathlib import Path

from training.recipe import load_recipe
from training.runner import run_recipe


def tiny_run(name, tmp_path_factory):
    """A function that runs a tiny recipe into a folder: `run(output, overrides, only=..., experts=...)`."""
    folder = tmp_path_factory.mktemp(name)
    shutil.copy(Path(__file__).parent / "recipes" / f"{name}.yaml", folder / "recipe.yaml")

    def run(output="out", overrides=None, **parts):
        loaded = load_recipe(folder / "recipe.yaml", {"output_dir": str(folder / output), **(overrides or {})})
        return run_recipe(loaded, **parts)

    run.folder = folder
    return run
