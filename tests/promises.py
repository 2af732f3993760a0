"""Checks the promises of docs/reliability.md and reliability_data.md, as part of `make check`: each names a test that
exists, and none leaves without a line in CHANGELOG.md, "given up: PROMISE, because REASON"."""

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

PAGES, CHANGES = ("docs/reliability.md", "docs/reliability_data.md"), "CHANGELOG.md"
ROW = re.compile(r"^\| (.+?)\.? +\| (.*tests/.*::.*) \|$", re.MULTILINE)
TEST = re.compile(r"(tests/[\w/]+\.py)::(test_\w+)")


def promises(page: str) -> dict[str, set[tuple[str, str]]]:
    """The files and names of the tests of each promise."""
    return {sentence: set(TEST.findall(tests)) for sentence, tests in ROW.findall(page)}


def missing(root: Path, page_name: str, page: str) -> Iterator[str]:
    """Tests that are not there, and rows of tables without a test."""
    for file, name in sorted(set(TEST.findall(page))):
        if not (root / file).is_file() or not re.search(rf"^def {name}\(", (root / file).read_text(), re.MULTILINE):
            yield f"{page_name} names {file}::{name}, which is not there"
    for line in page.splitlines():
        if line.startswith("|") and not ROW.match(line) and line not in ("| promise | test |", "|---|---|"):
            yield f"{page_name} has a promise without a test: {line}"


def left(before: Mapping[str, set], after: Mapping[str, set]) -> Iterator[str]:
    """Promises that an edit took out. One with another sentence and a test of the old one is the same promise."""
    reworded = {sentence: tests for sentence, tests in after.items() if sentence not in before}
    for sentence in sorted(before.keys() - after.keys(), key=lambda sentence: len(before[sentence])):
        match = next((other for other, tests in reworded.items() if tests & before[sentence]), None)
        yield from [sentence] if match is None else []
        reworded.pop(match, None)


def faults(root: Path) -> list[str]:
    """A line for each fault. Without git's history, only tests are looked up, and a line on stderr says so."""
    pages = {name: (root / name).read_text() for name in PAGES if (root / name).is_file()}

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True).stdout

    commits = git("log", "--first-parent", "--reverse", "--format=%H", "--", *PAGES).split()
    if not commits or git("rev-parse", "--is-shallow-repository").strip() != "false":
        print(f"{PAGES[0]}: git has no whole history here, so promises that left were not looked for", file=sys.stderr)
        commits = []
    texts = ["".join(git("show", f"{commit}:./{name}") for name in PAGES) for commit in commits]
    versions = [promises(text) for text in (*texts, "".join(pages.values()))]
    gone = {sentence for before, after in pairwise(versions) for sentence in left(before, after)}
    changes = " ".join((root / CHANGES).read_text().split())
    silent = [promise for promise in sorted(gone - {*versions[-1]}) if f"given up: {promise}, because " not in changes]
    text = f'{PAGES[0]} lost a promise. Restore it, or add to {CHANGES} "given up: {{}}, because ..."'
    absent = [fault for name, page in pages.items() for fault in missing(root, name, page)]
    return [*absent, *map(text.format, silent)]


if __name__ == "__main__":
    sys.exit("\n".join(faults(Path.cwd())) or 0)
