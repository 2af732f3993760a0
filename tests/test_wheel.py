"""What a wheel carries, used where no checkout is. `make wheel` does the same with pip, in a clean environment."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """What lies in site-packages after the installation of a wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    egg, parts = ["egg_info", "--egg-base", folder], ["build", "--build-base", folder, "--build-lib", folder / "lib"]
    subprocess.run([sys.executable, "setup.py", "-q", *egg, *parts], cwd=ROOT, check=True, capture_output=True)
    return folder / "lib"


def test_each_file_that_code_reads_is_in_it_and_no_package_is_called_training(installed):
    assert {path.name for path in installed.iterdir()} == {"clip_moe", "modeling_clip_moe"}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    rooms = {path.name for path in (installed / "clip_moe").iterdir() if path.is_dir()} - {"model_cards"}
    assert rooms == {"records", "data", "conversion", "evaluation", "training", "examples"}
    expected = {path for path in listed.stdout.splitlines() if path.split("/")[0] in rooms}
    assert {path for path in expected if not (installed / "clip_moe" / path).is_file()} == set()


@pytest.mark.slow
def test_commands_run_where_no_checkout_is(installed, tmp_path):
    """In the folder of a user, whose own modules have names of our rooms."""
    for room in ("data", "records", "training"):
        (tmp_path / f"{room}.py").write_text("raise SystemExit('this is the user\\'s own module')")
    upcycle = ["upcycle", "sparse", "--model", "training/symbol_clip/quarter", "--preset", "clip_up"]
    commands = [["recipes"], upcycle, ["publish", "sparse", "user/sparse", "--dry-run", "published"]]
    program = f"import clip_moe\nfor words in {commands}:\n    clip_moe.main(words)\n"
    program += "import training\nprint(training.__file__)"
    environment = os.environ | {"PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(installed / "clip_moe" / "training" / "__init__.py")
    assert (tmp_path / "published" / "LICENSE-CODE").is_file()
