"""The contents of a wheel, used without a checkout. `make wheel` does the same with pip, in a clean environment."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from documents import ROOT
from programs import run_program


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """Contents of site-packages after the installation of a wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    egg, parts = ["egg_info", "--egg-base", folder], ["build", "--build-base", folder, "--build-lib", folder / "lib"]
    subprocess.run([sys.executable, "setup.py", "-q", *egg, *parts], cwd=ROOT, check=True, capture_output=True)
    return folder / "lib"


def test_each_file_that_code_reads_is_in_it_and_no_package_is_called_training(installed):
    assert {path.name for path in installed.iterdir()} == {"clip_moe", "modeling_clip_moe"}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    rooms = {path.name for path in (installed / "clip_moe").iterdir() if path.is_dir()}
    rooms -= {"model_cards", "__pycache__"}
    assert rooms == {path.name for path in (ROOT / "clip_moe").iterdir() if path.is_symlink()}
    expected = {path for path in listed.stdout.splitlines() if path.split("/")[0] in rooms}
    assert {path for path in expected if not (installed / "clip_moe" / path).is_file()} == set()


def own_names(folder):
    """A user's modules, with names of our rooms."""
    for room in ("data", "training", "evaluation", "engine", "app"):
        (folder / f"{room}.py").write_text("OWN = True\n")
    (folder / "conversion").mkdir()
    (folder / "conversion" / "__init__.py").write_text("OWN = True\n")


IMPORTS = ["import app, conversion, data, engine, evaluation, training", "from clip_moe import load_recipe, upcycle"]
# Each case is a copy of a process that has imported what takes seconds
CASES = f"""
import os, sys
import transformers.models.clip.modeling_clip

for place in sys.argv[1:]:
    for imports in {IMPORTS}, {IMPORTS[::-1]}:
        if os.fork():
            assert os.wait()[1] == 0, (place, imports)
            continue
        sys.path[1:1] = [place] if place else []
        before = sys.path[1:]
        exec("\\n".join(imports))
        assert all(module.OWN for module in (app, conversion, data, engine, evaluation, training))
        assert upcycle.__module__ == "clip_moe.conversion.upcycle"
        assert load_recipe.__module__ == "clip_moe.engine.recipe"
        assert not {{"app", "data"}} & set(vars(sys.modules["clip_moe.engine.recipe"])) and sys.path[1:] == before
        assert sys.modules["clip_moe"].__file__.startswith(place)
        os._exit(0)
"""


@pytest.mark.slow
def test_own_modules_and_ours_have_their_names(installed, tmp_path):
    """A script in a folder with its own `data.py`, `training.py`, ..., imported before ours and after, in a checkout,
    an editable installation (as tests run in) and a wheel; no import changes `sys.path`."""
    own_names(tmp_path)
    (tmp_path / "script.py").write_text(CASES)
    run_program(tmp_path, "script.py", ROOT, "", installed, PYTHONPATH="")


def test_the_script_of_recipes_runs_in_a_checkout_that_is_not_installed(tmp_path):
    own_names(tmp_path)
    packages, script = Path(torch.__file__).parents[1], ROOT / "training" / "upcycle.py"
    assert "--config" in run_program(tmp_path, "-S", "-c", NOT_INSTALLED, packages, script, "--help", PYTHONPATH="")


# Site-packages without what an editable installation puts there
NOT_INSTALLED = """
import runpy, sys
packages, *sys.argv = sys.argv[1:]
sys.path[0] = sys.argv[0].rpartition("/")[0]
sys.path.append(packages)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_commands_run_where_no_checkout_is(installed, tmp_path):
    """In the folder of a user, whose own modules have names of our rooms."""
    own_names(tmp_path)
    upcycle = ["upcycle", "sparse", "--model", "training/symbol_clip/quarter", "--preset", "clip_up"]
    commands = [["recipes"], upcycle, ["publish", "sparse", "user/sparse", "--dry_run", "published"]]
    program = f"import clip_moe\nfor words in {commands}:\n    clip_moe.main(words)\n"
    run_program(tmp_path, "-c", program, PYTHONPATH=str(installed))
    assert (tmp_path / "published" / "LICENSE-CODE").is_file()
