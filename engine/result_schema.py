"""The schema of results of an evaluation, and of the summary of an analysis: `evaluation` writes, model cards read."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from clip_moe.engine.digests import value_digest
from clip_moe.engine.files import read_json
from clip_moe.engine.messages import in_one_line

Text = Annotated[str, Field(pattern=r"\S")]
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
# Metrics that are no mean over samples
NO_MEANS = """
mean_per_class_recall mean_of_top1_and_top5 roc_auc image_to_text_information text_to_image_information
""".split()


class TextCounts(BaseModel):
    """Counts of the captions or prompts of a task, as a model's tokenizer reads them."""

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
    # The greatest recall at 1 that the captions of retrieval allow, as `image_to_text` and `text_to_image`; empty where
    # only an image's own captions are right
    best: dict[str, Share] = Field(default_factory=dict)

    @property
    def sentence(self) -> str:
        """The texts that a model does not read whole or cannot tell apart; empty if there are none."""
        parts = {
            f"longer than the {self.max_length} tokens of the tokenizer and cut": self.cut,
            "the same as another": self.repeated,
            "with the same tokens as a different text: the model cannot tell them apart": self.alike,
        }
        counts = "; ".join(f"{number} {fault}" for fault, number in parts.items() if number)
        return counts and f"of {self.number} {self.kind}, {counts}"


class Result(BaseModel):
    """The fields of every result of one model on one task; see `clip_moe.evaluation.evaluate` for the rest."""

    model_config = ConfigDict(strict=True)

    model: Text
    task: Text
    title: Text
    protocol: str
    metrics: dict[str, float]
    # The metrics that stand for the task in a table -> their titles.
    primary: dict[str, str] = Field(min_length=1)
    num_samples: Annotated[int, Field(gt=0)]
    num_skipped: Count
    # Number of samples of each group of classes, where groups have accuracies of their own
    group_samples: dict[str, Annotated[int, Field(gt=0)]] = Field(default_factory=dict)
    # None: of a linear probe, which reads none
    texts: TextCounts | None = None
    source: str
    dtype: str
    commit: str | None
    versions: dict[str, str]
    # Paths on the machine that measured; see `clip_moe.engine.local_names.paths_here`.
    local: list[str] = Field(default_factory=list)


class Spread(BaseModel):
    """The mean of some values, and the ends of their range."""

    model_config = ConfigDict(strict=True)

    mean: FiniteFloat
    lowest: FiniteFloat
    highest: FiniteFloat

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        values = sorted(values)
        return cls(mean=sum(values) / len(values), lowest=values[0], highest=values[-1])


class Collapse(BaseModel):
    """A score of a sparse model, and what is left of it where each layer's experts are replaced by their mean."""

    model_config = ConfigDict(strict=True)

    title: Text
    routed: Share
    mean: Share
    # Half the interval of the difference over test samples; None: of a score that is no mean over them
    error: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None

    @property
    def comparison(self) -> str:
        error = "" if self.error is None else f" ± {100 * self.error:.1f}"
        difference = f"{100 * (self.mean - self.routed):+.1f}{error} points"
        return f"{self.routed:.1%} routed, {self.mean:.1%} with the mean of the experts: {difference}"


class ExpertSummary(BaseModel):
    """Whether the experts of a sparse model do anything."""

    model_config = ConfigDict(strict=True)

    READING: ClassVar[str] = (
        "The collapse test replaces the experts of each layer by their mean: where that changes a score by less than "
        "its conservative 95 % interval over test samples (±), nothing shows that the experts do different things. The "
        "entropy of the routers, a mean over tokens and layers, is 0 bits where they are sure of every token, and "
        "highest where they prefer no expert. Linear CKA compares the features of two experts, each alone with all "
        "tokens, of the same images or texts: 1 if they are alike, 0 if they have nothing in common."
    )

    collapse: list[Collapse] = Field(min_length=1)
    # In bits, over the sparse layers
    entropy: Spread
    # log2 of the number of experts
    most_entropy: FiniteFloat
    # Linear CKA, over the pairs of experts and the sparse towers; None: there are no pairs
    agreement: Spread | None

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Names of measures, and their values."""
        rows = [(f"collapse test, {score.title}", score.comparison) for score in self.collapse]
        bits, alike = self.entropy, self.agreement
        layers = f"(layers: {bits.lowest:.2f} to {bits.highest:.2f})"
        rows.append(("entropy of the routers", f"{bits.mean:.2f} of at most {self.most_entropy:.2f} bits {layers}"))
        if alike is not None:
            pairs = f"(pairs: {alike.lowest:.3f} to {alike.highest:.3f})"
            rows.append(("how alike the experts are", f"CKA {alike.mean:.3f} {pairs}"))
        return rows


def require_summary(content: Any, where: str) -> ExpertSummary:
    """The summary of an analysis. Raises a ValueError that says what is missing or wrong in it."""
    return _validated(ExpertSummary, content, f"{where} has no valid summary of experts")


def require_result(content: Any, where: str) -> dict[str, Any]:
    """The content of a result. Raises a ValueError that says what is missing or wrong in it."""
    _validated(Result, content, f"{where} is not an evaluation result")
    return content


def _validated(schema: type[BaseModel], content: Any, fault: str) -> Any:
    try:
        return schema.model_validate(content)
    except ValidationError as error:
        raise ValueError(f"{fault}: {in_one_line(error.errors()[:3])}") from error


def results_mark(results: Iterable[dict[str, Any]]) -> str:
    """A comment by which a picture tells which results it shows."""
    return f"<!-- results {value_digest(sorted(map(value_digest, results)))} -->"


def read_result(path: str | Path) -> dict[str, Any]:
    """A result as it was written. Raises an OSError or a ValueError if the file cannot be read or holds no result."""
    return require_result(read_json(Path(path)), str(path))


def parts_of_mean(result: dict[str, Any], metric: str) -> list[tuple[float, int]] | None:
    """The shares that a metric is the mean of, each with its number of samples, of which no two shares have one in
    common; None: it is no such mean, or the numbers are not in the result. Accuracy is a mean of several where groups
    of classes have theirs. In retrieval, queries with the same caption or image rise and fall together, so their
    number is that of different captions or of images, whichever is smaller."""
    metrics, number = result["metrics"], result["num_samples"]
    if metric in NO_MEANS:
        return None
    if metric == "accuracy" and any(name.startswith("accuracy/") for name in metrics):
        return [(metrics[f"accuracy/{group}"], size) for group, size in result.get("group_samples", {}).items()] or None
    return [(metrics[metric], min(number, result.get("num_captions", number)))]
