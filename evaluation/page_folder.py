"""Folders with one page: its text, its numbers as JSON, and its pictures."""

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from records.files import locked, new_file, output_folder, read_record


def write_page(
    output_dir: Path,
    name: str,
    page: str,
    result: Mapping[str, Any],
    settings: Mapping[str, Any],
    pictures: Mapping[str, Callable[[Path], None] | None] | None = None,
) -> None:
    """Writes `NAME.md`, `NAME.json` and the pictures: all of them, or none.

    Args:
        result: what the JSON holds, beside the settings.
        settings: see `require_free_page`.
        pictures: name of a file -> what draws it; an older file of a name with None goes.

    Raises:
        ValueError: another process writes there; else as `require_free_page`.
    """
    pictures = pictures or {}
    texts = {f"{name}.md": page, f"{name}.json": json.dumps({**settings, **result}, indent=2, ensure_ascii=False)}
    with locked(output_dir), output_folder(output_dir):
        require_free_page(output_dir, name, settings)
        with ExitStack() as files:
            for picture, draw in pictures.items():
                if draw is not None:
                    draw(files.enter_context(new_file(output_dir / picture)))
            for file, text in texts.items():
                files.enter_context(new_file(output_dir / file)).write_text(f"{text}\n", encoding="utf-8")
        for picture, draw in pictures.items():
            if draw is None:
                (output_dir / picture).unlink(missing_ok=True)


def require_free_page(output_dir: Path, name: str, settings: Mapping[str, Any]) -> None:
    """Raises a ValueError if there is a page of this name that was made with other settings, or is damaged."""
    path = output_dir / f"{name}.json"
    if not path.exists():
        return
    before = read_record(path, dict)
    for key, new in settings.items():
        old, new = before.get(key) or None, new or None  # earlier versions had none of what is empty
        if isinstance(old, dict) and isinstance(new, dict):  # of these, what differs
            old, new = (
                {of: value for of, value in these.items() if (of, value) not in others.items()}
                for these, others in ((old, new), (new, old))
            )
        if old != new:
            raise ValueError(
                f"{path} holds another result, whose {key} is {old!r} and not {new!r}: choose another --output-dir, or "
                "delete it"
            )
