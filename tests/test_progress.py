"""Logs of commands without a terminal."""

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
