"""Programs in processes of their own, which have imported nothing yet."""

import os
import subprocess
import sys

from documents import ROOT

# The first line of a program that loads models by the code beside their weights
WITHOUT_PACKAGE = 'import sys; sys.modules["modeling_clip_moe"] = None\n'


def run_program(folder, *words, **environment) -> str:
    """Runs Python with these arguments in a folder, which also gets the code of models. Returns what was printed."""
    environment = {"HF_MODULES_CACHE": str(folder / "modules"), "PYTHONPATH": str(ROOT)} | environment
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
