"""Files of results, and the names of these and of tasks; `clip_moe.engine.result_schema` says what is in one."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clip_moe.data.sources import named_split
from clip_moe.engine.digests import short_digest
from clip_moe.engine.files import write_text

# Characters of a longer text that the name of a file keeps
LONGEST_SLUG = 60


def write_result(result: dict[str, Any], output_dir: Path) -> None:
    """Keep a result as `TASK--MODEL.json`."""
    name = f"{slug(result['task'])}--{slug(result['model'])}.json"
    write_text(output_dir / name, json.dumps(result, indent=2, ensure_ascii=False))


def computed_with(result: Mapping[str, Any]) -> str:
    """The commit and the versions of a result."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return f"commit {result['commit']}, {versions}"


def same_data(data: dict[str, Any]) -> dict[str, Any]:
    """The keys by which the data of two results are compared: not their place, if their contents are known."""
    return {key: value for key, value in data.items() if key not in ("source", "image_root") or "identity" not in data}


def task_name(kind: str, data: dict[str, Any]) -> str:
    """The name of a task on own data that has none: its kind, the data, and a hash of all that was chosen."""
    source = _plain(Path(data["source"]).stem).strip("_.-")
    words = [kind, source, named_split(data["source"], data["split"]), data["caption_column"]]
    return f"{_plain('-'.join(filter(None, words)))}-{short_digest(same_data(data))}"


def slug(text: str) -> str:
    """A text as part of a file's name. If that changes it, a hash keeps it apart from others that become the same."""
    plain = _plain(text, 2 * LONGEST_SLUG)
    return plain if plain == text else f"{plain[:LONGEST_SLUG]}-{short_digest(text)}"


def _plain(text: str, length: int = LONGEST_SLUG) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text)[:length]
