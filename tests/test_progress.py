"""Commands without a terminal: what they log, and that they run in any folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tiny_runs import recipe

from evaluation import progress as module
from evaluation.progress import Progress, progress


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


@pytest.mark.slow
def test_a_run_without_a_terminal_draws_no_bars_and_warns_of_nothing(tmp_path):
    stages = recipe(gradient_checkpointing=True) | {"output_dir": str(tmp_path / "out")}
    stages["stages"][0]["text_config"]["max_position_embeddings"] = 64
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(stages))
    command = [sys.executable, "-m", "training.upcycle", "--config", str(tmp_path / "recipe.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    assert "\r" not in done.stderr and len(lines) == 1, done.stderr
    assert lines[0].startswith("tuned: 6 of 6, loss ") and lines[0].endswith(" images/s")
    for name in ("dense", "sparse", "tuned"):
        begins, *_, ends = (line for line in done.stdout.splitlines() if line.startswith(f"{name}: "))
        assert re.fullmatch(rf"{name}: begins, \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d", begins)
        assert re.fullmatch(rf"{name}: done in [\d.]+ s", ends)
    assert done.stdout.count(f"its log is {tmp_path}/out/tuned.partial/log.jsonl") == 1


@pytest.mark.parametrize("command", [["training.upcycle"], ["clip_moe", "evaluate"]])
def test_a_module_called_data_is_not_taken_for_ours(tmp_path, command):
    """A user's own folder may have modules of the names of ours."""
    for name in ("data", "records"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not ours')\n")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-m", *command, "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "Usage" in done.stdout, done.stderr
