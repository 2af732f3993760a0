"""What scores of several seeds say of a paper's claim: whether it holds.

The claims stand in a file, which `read_claims` reads. Each names the cards that it compares rows of: folders beside the
file with `seeds.json`, as `model_cards.seeds` writes it.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from records.files import read_json
from records.intervals import paired_interval
from records.messages import in_one_line
from records.result_schema import Text
from records.yaml_files import read_yaml

LEAST_SEEDS = 3
HOLDS, DOES_NOT_HOLD, INCONCLUSIVE, NOT_MEASURED = "holds", "does not hold", "inconclusive", "not measured"
VERDICTS = (HOLDS, DOES_NOT_HOLD, INCONCLUSIVE, NOT_MEASURED)
Scores = dict[str, dict[str, list[dict[str, float]]]]  # row -> task -> for each seed: metric -> score
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Claim(BaseModel):
    """A sentence of a paper, and either what would show it (`cards`, `better`, `than`, `scores`) or what is
    `missing` to show it."""

    model_config = STRICT

    claim: Text
    # The claim in a few words, for the picture
    short: Text
    # Table, section or figure of the paper
    place: Text
    # The folders of the results, as seen from the file of claims; a row is that of the first one that has it
    cards: list[Text] = Field(default_factory=list)
    # Titles of rows: the first must be better than each of the others
    better: Text | None = None
    than: list[Text] = Field(default_factory=list)
    # Task -> metrics
    scores: dict[str, Annotated[list[Text], Field(min_length=1)]] = Field(default_factory=dict)
    # Percent points by which it must be better; below 0: by which it may be worse
    by: float = 0.0
    # Samples, and multiply-adds where they differ, that its models were trained with
    budget: Text | None = None
    missing: Text | None = None
    # Markdown. Where it does not hold: what was tried to find out whether recipe, code or world is the cause
    note: str = ""

    @model_validator(mode="after")
    def _check(self):
        compared = {bool(self.cards), bool(self.better), bool(self.than), bool(self.scores)}
        if compared != {not self.missing}:
            raise ValueError("a claim needs either cards, better, than and scores, or missing")
        return self


class Paper(BaseModel):
    """The claims of a paper."""

    model_config = STRICT

    link: Text | None = None
    claims: list[Claim] = Field(min_length=1)


@dataclass(frozen=True)
class Measured:
    """What a claim says of one score: the percentages of both models with each seed, and the interval of their mean
    difference."""

    task: str
    metric: str
    better: Sequence[float]
    rival: str
    than: Sequence[float]
    interval: tuple[float, float]
    verdict: str

    @property
    def difference(self) -> float:
        """The difference of the means, in percent points."""
        return statistics.mean(self.better) - statistics.mean(self.than)


def verdict_of(interval: tuple[float, float]) -> str:
    """Whether one model is better than another, from the interval of the difference."""
    low, high = interval
    return HOLDS if low > 0 else DOES_NOT_HOLD if high < 0 else INCONCLUSIVE


def verdict_of_all(verdicts: Iterable[str]) -> str:
    """The verdict on several statements together: the worst of theirs; without any, "not measured"."""
    distinct = set(verdicts)
    return next((verdict for verdict in (DOES_NOT_HOLD, INCONCLUSIVE, HOLDS) if verdict in distinct), NOT_MEASURED)


def deciding(measured: Sequence[Measured]) -> Measured:
    """The score that decides a claim: among those with the verdict of all, the one with the least difference."""
    verdict = verdict_of_all(score.verdict for score in measured)
    return min((score for score in measured if score.verdict == verdict), key=lambda score: score.difference)


def measure_claim(claim: Claim, folder: Path) -> list[Measured]:
    """What the scores say of a claim, one for each of its metrics; none of a claim that something is missing for.

    Args:
        folder: where the file of claims lies, beside the cards.

    Raises:
        ValueError: no card has a row, a task or a metric, or they have too few seeds.
    """
    scores: Scores = {}
    for card in claim.cards:
        scores = read_scores(folder / card) | scores
    measured, pairs = [], [(task, metric) for task, metrics in claim.scores.items() for metric in metrics]
    for task, metric in pairs:
        percentages = {row: _percentages(claim, scores, row, task, metric) for row in [claim.better, *claim.than]}
        better, of_rivals = percentages[claim.better], []
        for rival in claim.than:
            low, high = paired_interval(better, percentages[rival], len(pairs) * len(claim.than))
            # Rounded: scores that differ by exactly `by` are equal
            verdict = verdict_of((round(low - claim.by, 9), round(high - claim.by, 9)))
            of_rivals.append(Measured(task, metric, better, rival, percentages[rival], (low, high), verdict))
        worst = verdict_of_all(score.verdict for score in of_rivals)
        hardest = (score for score in of_rivals if score.verdict == worst)
        measured.append(max(hardest, key=lambda score: statistics.mean(score.than)))
    return measured


def _percentages(claim: Claim, scores: Scores, row: str, task: str, metric: str) -> list[float]:
    try:
        return [100 * metrics[metric] for metrics in scores[row][task]]
    except KeyError as error:
        where = " and ".join(claim.cards)
        raise ValueError(f"{where} has no {error}, as {metric} of {row!r} on {task} needs it") from error


def read_claims(path: Path) -> dict[str, Paper]:
    """Title -> paper."""
    try:
        raw = read_yaml(path.read_text(encoding="utf-8"), str(path))
        return TypeAdapter(Annotated[dict[Text, Paper], Field(min_length=1)]).validate_python(raw)
    except ValidationError as error:
        raise ValueError(f"{path}: {in_one_line(error.errors())}") from error


def read_scores(folder: Path) -> Scores:
    """The scores of a card."""
    path = folder / "seeds.json"
    scores = read_json(path)
    numbers = {len(of_seeds) for row in scores.values() for of_seeds in row.values()}
    if len(numbers) != 1 or min(numbers) < LEAST_SEEDS:
        counts = ", ".join(map(str, sorted(numbers))) or "none"
        raise ValueError(f"{path}: all results need the same {LEAST_SEEDS} or more seeds, got {counts}")
    return scores
