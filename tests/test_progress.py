"""Logs of commands without a terminal."""

from clip_moe.evaluation import progress as module
from clip_moe.evaluation.progress import progress


def test_a_log_has_a_line_now_and_then(capsys, monkeypatch):
    assert list(progress("embedding", 5, range(5))) == list(range(5))
    assert capsys.readouterr().err == ""  # it took no time
    with progress("tuned", total=3, initial=1, leave=True) as counted:
        for loss in ("2.000", "1.000"):
            counted.set_postfix_str(f"loss {loss}", refresh=False)
            counted.update()
    assert capsys.readouterr().err == "tuned: 1 of 3, ? left\ntuned: 3 of 3, loss 1.000, 00:00 left\n"
    monkeypatch.setattr(module, "SECONDS", 0)
    list(progress("embedding", 3, range(3)))
    assert capsys.readouterr().err.splitlines()[1] == "embedding: 1 of 3, 00:00 left"
    list(progress("embedding", 3, range(3), shown=False))
    assert capsys.readouterr().err == ""
