"""Prints the lines of Python in each room beside its budget, the table `[tool.room_lines]` of pyproject.toml. As a part
of `make check`, it fails where a room is over it: whoever raises a budget says why in the commit."""

import sys
import tomllib
from pathlib import Path


def main() -> None:
    root = Path(__file__).resolve().parents[1]
    budgets = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["room_lines"]
    over = []
    for room, budget in budgets.items():
        others = [other for other in budgets if other.startswith(f"{room}/")]
        files = [file for file in (root / room).rglob("*.py") if file.resolve() == file]
        own = [file for file in files if not any(file.is_relative_to(root / other) for other in others)]
        lines = sum(len(file.read_bytes().splitlines()) for file in own)
        print(f"{room:<18}{lines:>7,} of {budget:>7,}")
        over += [room] * (lines > budget)
    if over:
        sys.exit(f"over its budget in pyproject.toml: {', '.join(over)}")


if __name__ == "__main__":
    main()
