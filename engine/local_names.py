"""Names that hold on this machine alone, which are not published, and names on the Hub."""

import glob
import os
import re
from collections.abc import Collection
from pathlib import Path, PureWindowsPath
from typing import Any

from clip_moe.engine.messages import most_similar

NAMELESS = "a local folder"
# How like a file here a name is that may be one on the Hub, but is a slip
SLIP = 0.85
# Separators of the words of a text
SEPARATORS = re.compile(r"""([\s,;()'"`=<>|]+)""")
# Parts of a path, or patterns of them
SLASHED = re.compile(r"[\w.*?@:+%\[\]{}-]+(/[\w.*?@:+%\[\]{}-]*)+")


def is_hub_name(name: str) -> bool:
    """Whether a name can be one on the Hub, and is no file, folder or link here, be it a broken one."""
    return _is_valid(name) and not os.path.lexists(name)


def similar_path(name: str) -> str | None:
    """A file or folder that is here and that a misspelt name probably means; None: there is none."""
    folder, last = os.path.split(name)
    similar = most_similar(last, os.listdir(folder) if os.path.isdir(folder) else [], SLIP)
    return similar and os.path.join(folder, similar)


def output_inside(output: Path, folder: str) -> str | None:
    """The error text if `output` is inside `folder`, which is read; None if it is not."""
    if not os.path.isdir(folder) or not output.resolve().is_relative_to(Path(folder).resolve()):
        return None
    return f"{output} is inside {folder}, whose files are all read: choose another output"


def is_url(text: str) -> bool:
    """Whether a text begins as a URL, of a file on this machine not counted."""
    return re.match(r"(?!file:)[a-z][a-z0-9+.-]+://", text) is not None


def paths_here(value: Any) -> list[str]:
    """The texts in what JSON or YAML hold that are paths on this machine, or patterns of some.

    Elsewhere `without_paths` would take one of two parts, such as `clinic/patients`, for a name on the Hub.
    """
    if isinstance(value, dict | list):
        parts = value.values() if isinstance(value, dict) else value
        return sorted({path for part in parts for path in paths_here(part)})
    is_path = isinstance(value, str) and "/" in value and not is_url(value) and "\0" not in value
    return [value] if is_path and (os.path.exists(value) or any(glob.iglob(value, recursive=True))) else []


def without_paths(value: Any, known: Collection[str] = ()) -> Any:
    """Content of JSON or YAML, with the last part alone of every local path, also within a text.

    A path is what is there, what begins as a path does, and one with slashes that is no name on the Hub.

    Args:
        known: other paths, which look like names on the Hub; see `paths_here`.
    """
    if isinstance(value, dict):
        return {key: without_paths(part, known) for key, part in value.items()}
    if isinstance(value, list):
        return [without_paths(part, known) for part in value]
    if not isinstance(value, str):
        return value
    if value in known:
        return _last_part(value)
    strange = SLASHED.fullmatch(value) and not is_url(value) and not _is_valid(value)
    return _last_part(value) if strange or _is_path(value) else _without_paths_in_prose(value)


def _without_paths_in_prose(text: str) -> str:
    words, parts = SEPARATORS.split(text), []
    while words:
        # A path may hold spaces: the longest one that is there
        ends = range(len(words), 1, -1) if "/" in words[0] or "\\" in words[0] else ()
        length = next((end for end in ends if os.path.exists("".join(words[:end]))), 1)
        name = "".join(words[:length])
        parts.append(_last_part(name) if length > 1 or _is_path(name) else name)
        words = words[length:]
    return "".join(parts)


def _is_path(text: str) -> bool:
    windows = PureWindowsPath(text)  # which knows both kinds of slashes
    begins = bool(windows.drive and windows.root) or text.startswith(("~/", "./", "../", "file://"))
    absolute = text.startswith("/") and len(windows.parts) > 2
    return not is_url(text) and (begins or absolute or ("/" in text and windows.name != "" and os.path.exists(text)))


def _is_valid(name: str) -> bool:
    from huggingface_hub.errors import HFValidationError  # takes a while
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _last_part(path: str) -> str:
    name = PureWindowsPath(path).name
    return NAMELESS if name in ("", ".", "..", "~") else name
