"""Commands that are started in a user's own folder, which may have modules of the names of ours."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("command", ["training.upcycle", "evaluation.evaluate"])
def test_a_module_called_data_is_not_taken_for_ours(tmp_path, command):
    for name in ("data", "records"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not ours')\n")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-m", command, "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "Usage" in done.stdout, done.stderr
