"""Commands without a terminal: what they log, and that they run in any folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from clip_moe.evaluation import progress as module
from clip_moe.evaluation.progress import Progress, progress


def test_a_log_has_a_line_now_and_then(capsys, monkeypatch):
    assert list(progress(range(5), "embedding", 5)) == list(range(5))
    assert capsys.readouterr().err == ""  # it took no time
    counted = Progress("tuned", total=3, initial=1)
    counted.update("loss 2.000")
    counted.update("loss 1.000")
    assert capsys.readouterr().err == "tuned: 3 of 3, loss 1.000\n"
    monkeypatch.setattr(module, "SECONDS", 0)
    counted = Progress("tuned", total=9)
    for summary in ("", "loss 2.000", ""):
        counted.update(summary)
    first, logged, unlogged = capsys.readouterr().err.splitlines()
    assert "loss" not in first and ", loss 2.000, " in logged
    assert unlogged.startswith("tuned: 3 of 9, loss 2.000, ")
    list(progress(range(3), "embedding", 3))
    assert capsys.readouterr().err.splitlines()[0] == "embedding: 1 of 3, 00:00 left"
    list(progress(range(3), "embedding", 3, shown=False))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", [["clip_moe", "run"], ["clip_moe", "evaluate"]])
def test_a_module_called_data_is_not_taken_for_ours(tmp_path, command):
    """A user's own folder may have modules of the names of ours."""
    for name in ("data", "engine"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not ours')\n")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-m", *command, "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "Usage" in done.stdout, done.stderr
