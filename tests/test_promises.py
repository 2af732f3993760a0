"""The check of docs/reliability.md: a test that is missing, a promise that left, one given up in the open."""

import shutil
import subprocess
from pathlib import Path

import pytest
from promises import faults

TESTS = "def test_kept():\n    pass\n\n\ndef test_other():\n    pass\n"
KEPT, OTHER = "| Nothing is lost. | `tests/test_a.py::test_kept` |", "| Names count. | `tests/test_a.py::test_other` |"
SHARED = "| Names count twice. | `tests/test_a.py::test_other` |"


@pytest.fixture
def edit(tmp_path):
    """Writes the page with these rows, and the changelog, and commits both."""
    run(tmp_path, "init", "--quiet")
    (tmp_path / "docs").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(TESTS)

    def edit(*rows, changes="# Changes\n", commit=True):
        page = "# Reliability\n\n| promise | test |\n|---|---|\n" + "".join(f"{row}\n" for row in rows)
        (tmp_path / "docs" / "reliability.md").write_text(page)
        (tmp_path / "CHANGELOG.md").write_text(changes)
        if commit:
            run(tmp_path, "add", ".")
            run(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "x")
        return faults(tmp_path)

    return edit


def run(folder, *arguments):
    subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True)


def test_a_promise_needs_a_test(edit, tmp_path):
    assert edit(KEPT, OTHER) == []
    (tmp_path / "tests" / "test_a.py").write_text(TESTS.replace("test_other", "test_others"))
    assert edit(KEPT, OTHER, "| All is well. | `test_a.py` |") == [
        "docs/reliability.md names tests/test_a.py::test_other, which is not there",
        "docs/reliability.md has a promise without a test: | All is well. | `test_a.py` |",
    ]


@pytest.mark.parametrize(("before", "commit"), [((KEPT, OTHER), False), ((KEPT, OTHER, SHARED), True)])
def test_a_promise_leaves_only_in_the_open(before, commit, edit):
    """Also where another one has its test, and in all later commits."""
    edit(*before)
    text = 'docs/reliability.md lost a promise. Restore it, or add to CHANGELOG.md "given up: Names count, because ..."'
    left = [row for row in before if row != OTHER]
    assert edit(*left, commit=commit) == [text]
    assert edit(*left, changes="given up: Names count.", commit=commit) == [text]
    assert edit(*left, changes="- given up: Names\n  count, because nobody asks.\n", commit=commit) == []
    assert edit(*left, commit=commit) == [text]
    assert edit(*before, commit=commit) == []


def test_other_words_another_test_or_the_other_page_keep_a_promise(edit, tmp_path):
    edit(KEPT, OTHER)
    assert edit(KEPT.replace("test_kept", "test_other"), OTHER) == []
    assert edit("| No work is lost. | `tests/test_a.py::test_other`, `tests/test_a.py::test_kept` |", OTHER) == []
    other_page = tmp_path / "docs" / "reliability_data.md"
    other_page.write_text(f"| promise | test |\n|---|---|\n{OTHER}\n")
    another = "| Another promise. | `tests/test_a.py::test_kept` |"
    assert edit(another) == []
    other_page.unlink()
    assert len(edit(another)) == 1


@pytest.mark.parametrize("history", ["none", "shallow"])
def test_without_history_only_tests_are_looked_up(history, edit, tmp_path, capsys):
    edit(KEPT, OTHER)
    edit(KEPT)
    folder = tmp_path / "copy"
    if history == "shallow":
        run(tmp_path, "clone", "--quiet", "--depth", "1", f"file://{tmp_path}", str(folder))
    else:
        shutil.copytree(tmp_path, folder, ignore=shutil.ignore_patterns(".git"))
        run(folder, "init", "--quiet")  # not the repository around it
    assert faults(folder) == []
    assert "git has no whole history here" in capsys.readouterr().err
    (folder / "tests" / "test_a.py").unlink()
    assert len(faults(folder)) == 1


def test_this_repository_keeps_its_promises():
    assert faults(Path(__file__).parents[1]) == []
