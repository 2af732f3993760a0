"""Results of evaluations: what is in one, where it lies, and which of them may stand side by side."""

import argparse
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from conversion.files import read_json, write_text

# A name that does not fit into the name of a file is cut to so many characters.
LONGEST_SLUG = 60

Text = Annotated[str, Field(pattern=r"\S")]
Count = Annotated[int, Field(ge=0)]


class Result(BaseModel):
    """What every result has, of one model on one task; see `evaluation.evaluate.evaluate_model` for the rest."""

    model_config = ConfigDict(strict=True)

    model: Text
    task: Text
    title: Text
    protocol: str
    metrics: dict[str, float]
    # The metrics that stand for the task in a table -> their titles.
    primary: dict[str, str] = Field(min_length=1)
    num_samples: Count
    num_skipped: Count
    source: str
    dtype: str
    commit: str | None
    versions: dict[str, str]


def require_result(content: Any, where: str) -> dict[str, Any]:
    """The content, if it is that of a result.

    Raises:
        ValueError: it is not; says what is missing or wrong in it.
    """
    if not isinstance(content, dict):
        raise ValueError(f"{where} is no result of an evaluation: it holds no JSON object")
    try:
        Result.model_validate(content)
    except ValidationError as error:
        errors = error.errors()
        missing = [str(part["loc"][0]) for part in errors if part["type"] == "missing"]
        if missing:
            raise ValueError(f"{where} is no result of an evaluation: it lacks {', '.join(missing)}") from error
        wrong = [f"{'.'.join(map(str, part['loc']))} is {_short(part['input'])} ({part['msg']})" for part in errors]
        raise ValueError(f"{where} is no result of an evaluation: {'; '.join(wrong[:3])}") from error
    return content


def read_result(path: str | Path) -> dict[str, Any]:
    """A result as it was written.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged, or holds no result.
    """
    return require_result(read_json(Path(path)), str(path))


def write_result(result: dict[str, Any], output_dir: Path) -> None:
    """Keep a result as `TASK--MODEL.json`. Raises as `require_free`."""
    require_free(result, output_dir)
    write_text(result_file(result, output_dir), json.dumps(result, indent=2, ensure_ascii=False))


def require_free(result: dict[str, Any], output_dir: Path) -> None:
    """Whether a result of this `model`, `task`, `weights`, `dtype` and `protocol` may be written.

    Raises:
        ValueError: there is one of another model of this name, of another dtype or protocol, or the file is damaged.
    """
    path = result_file(result, output_dir)
    if not path.exists():
        return
    before = read_result(path)
    # Results of earlier versions know their weights by another hash, and gave several names one file.
    key = "weights" if "weights" in before else "fingerprint"
    found = ""
    if before["model"] != result["model"] or before.get(key) != result.get(key):
        found = f"the result of another model, {before['model']!r} from {before['source']}"
    for what in ("dtype", "protocol"):
        if not found and before[what] != result[what]:
            found = f"a result of {before['model']!r} with another {what}, {before[what]!r} and not {result[what]!r}"
    if found:
        raise ValueError(f"{path} holds {found}: choose another name (--name) or another --output-dir, or delete it")


def result_file(result: dict[str, Any], output_dir: Path) -> Path:
    return output_dir / f"{slug(result['task'])}--{slug(result['model'])}.json"


def task_name(task: str, data: dict[str, Any]) -> str:
    """The name of a task on data given by columns: that of the task, what a reader knows the data by, and a hash of all
    that was chosen. Of other tasks, whose data their name tells, the name itself."""
    if not data:
        return task
    words = [task, Path(data["source"]).name, data["split"], data["caption_column"]]
    return f"{_plain('-'.join(words))}-{content_hash(data)}"


def slug(text: str) -> str:
    """A text as part of a file's name. If that changes it, a hash keeps it apart from others that become the same."""
    plain = _plain(text, 2 * LONGEST_SLUG)
    return plain if plain == text else f"{plain[:LONGEST_SLUG]}-{content_hash(text)}"


def _plain(text: str, length: int = LONGEST_SLUG) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text)[:length]


def content_hash(content: dict[str, Any] | Sequence[str] | str) -> str:
    """Eight letters that tell plain values apart."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]


def named_folder(text: str) -> Path:
    """The type of an argument that names a folder: of an empty one, `Path` would make the current folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError("a folder needs a name")
    return Path(text)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
