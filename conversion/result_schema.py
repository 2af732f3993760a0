"""What is in a result of an evaluation: `evaluation` writes it, model cards read it."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from conversion.files import read_json
from conversion.messages import shortened

Text = Annotated[str, Field(pattern=r"\S")]
Count = Annotated[int, Field(ge=0)]


class TextCounts(BaseModel):
    """What a model's tokenizer makes of the captions or prompts of a task."""

    model_config = ConfigDict(strict=True)

    kind: Literal["captions", "prompts"]
    number: Count
    # The tokenizer's `model_max_length`
    max_length: Count
    # Texts with more tokens than that
    cut: Count
    # Texts with the same token ids, after the cut, as a different text of another image or class, or of the other side
    # of a pair
    alike: Count
    # Texts that are also those of another image or class, or of the other side of a pair
    repeated: Count

    @property
    def sentence(self) -> str:
        """Those that a model does not read whole or cannot tell apart; empty if there are none."""
        parts = {
            f"longer than the {self.max_length} tokens of the tokenizer and cut": self.cut,
            "the same as another": self.repeated,
            "with the same tokens as a different text: the model cannot tell them apart": self.alike,
        }
        found = "; ".join(f"{number} {what}" for what, number in parts.items() if number)
        return found and f"of {self.number} {self.kind}, {found}"


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
    # None: of a linear probe, which reads none
    texts: TextCounts | None = None
    source: str
    dtype: str
    commit: str | None
    versions: dict[str, str]
    # What in it is a path on the machine that measured; see `conversion.local_names.paths_here`.
    local: list[str] = Field(default_factory=list)


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
        wrong = [f"{'.'.join(map(str, part['loc']))} is {shortened(part['input'])} ({part['msg']})" for part in errors]
        raise ValueError(f"{where} is no result of an evaluation: {'; '.join(wrong[:3])}") from error
    return content


def read_result(path: str | Path) -> dict[str, Any]:
    """A result as it was written.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged or a folder, or holds no result.
    """
    if Path(path).is_dir():
        raise ValueError(f"{path} is a folder: name the results in it, as {path}/*.json")
    return require_result(read_json(Path(path)), str(path))
