"""What scores of several seeds say of a claim: whether it holds.

A paper's claims stand in a file, which `read_claims` reads. For each paper it names a folder with `seeds.json` and
`seeds.md`, as `model_cards.seeds` writes them, or several, made by recipes that share models. Their rows are models.
`experts_0.json`, `experts_1.json`, ... in the same folder, one for each seed, which `evaluation.experts` writes as
`experts.json`, add rows such as "routed", "expert 0" and "K = 2".
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from records.files import read_json
from records.intervals import paired_interval
from records.messages import in_one_line
from records.result_schema import Text
from records.yaml_files import read_yaml

LEAST_SEEDS = 3
HOLDS, DOES_NOT_HOLD, INCONCLUSIVE = "holds", "does not hold", "inconclusive"
NOT_MEASURED, SHOWN_ELSEWHERE = "not measured", "see there"
VERDICTS = (HOLDS, DOES_NOT_HOLD, INCONCLUSIVE, NOT_MEASURED, SHOWN_ELSEWHERE)
Texts = Annotated[list[Text], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
Scores = dict[str, dict[str, list[dict[str, float]]]]  # row -> task -> for each seed: metric -> score
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Headline(BaseModel):
    """The mark of a claim that a reader asks for first."""

    model_config = STRICT

    # The claim in a few words, for the picture
    short: Text
    # Samples, and multiply-adds where they differ, that its models were trained with
    budget: Text | None = None


class Claim(BaseModel):
    """A sentence of a paper, and one of: what would show it (`better`, `than`, `scores`), where it is shown, or what is
    missing to show it."""

    model_config = STRICT

    claim: Text
    # Table, section or figure of the paper
    place: Text
    # Titles of rows: the first must be better than each of the others
    better: Text | None = None
    than: Texts = Field(default_factory=list)
    # Task -> metrics
    scores: dict[str, Annotated[list[Text], Field(min_length=1)]] = Field(default_factory=dict)
    # Percent points by which it must be better; below 0: by which it may be worse
    by: float = 0.0
    # A file that shows it, as seen from the file of claims
    shown_in: Text | None = None
    missing: Text | None = None
    headline: Headline | None = None
    # Markdown. Where it does not hold: what was tried to find out whether recipe, code or world is the cause
    note: str = ""

    @model_validator(mode="after")
    def _check(self):
        compared = [bool(self.better), bool(self.than), bool(self.scores)]
        if any(compared) != all(compared) or any(compared) + bool(self.shown_in) + bool(self.missing) != 1:
            raise ValueError("a claim needs either better, than and scores, or shown_in, or missing")
        return self


class Paper(BaseModel):
    """The claims of a paper that the same results show."""

    model_config = STRICT

    link: Text | None = None
    # The folders of the results, as seen from the file of claims
    results: Annotated[Texts, Field(min_length=1)]
    # The command that makes them
    command: Text
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
    """The verdict on all of several statements together: one that does not hold decides, then one that cannot be
    told."""
    distinct = set(verdicts)
    return next(verdict for verdict in (DOES_NOT_HOLD, INCONCLUSIVE, HOLDS) if verdict in distinct)


def deciding(measured: Sequence[Measured]) -> Measured:
    """The score that decides a claim: among those with the verdict of all, the one with the least difference."""
    verdict = verdict_of_all(score.verdict for score in measured)
    return min((score for score in measured if score.verdict == verdict), key=lambda score: score.difference)


def measure_claim(claim: Claim, scores: Scores, where: str) -> list[Measured]:
    """What the scores say of a claim, one for each of its metrics.

    Args:
        where: the scores are from, for errors.
    """
    measured, pairs = [], [(task, metric) for task, metrics in claim.scores.items() for metric in metrics]
    for task, metric in pairs:
        percentages = {row: _percentages(scores, row, task, metric, where) for row in [claim.better, *claim.than]}
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


def _percentages(scores: Scores, row: str, task: str, metric: str, where: str) -> list[float]:
    try:
        return [100 * metrics[metric] for metrics in scores[row][task]]
    except KeyError as error:
        raise ValueError(f"{where} has no {error}, as {metric} of {row!r} on {task} needs it") from error


def read_claims(path: Path) -> dict[str, Paper]:
    """Title -> paper."""
    try:
        raw = read_yaml(path.read_text(encoding="utf-8"), str(path))
        return TypeAdapter(Annotated[dict[Text, Paper], Field(min_length=1)]).validate_python(raw)
    except ValidationError as error:
        raise ValueError(f"{path}: {in_one_line(error.errors())}") from error


def read_scores(folder: Path) -> Scores | None:
    """The scores in a folder of results; None if there are none yet."""
    path = folder / "seeds.json"
    if not path.exists():
        return None
    scores = read_json(path)
    numbers = {len(of_seeds) for row in scores.values() for of_seeds in row.values()}
    if len(numbers) != 1 or min(numbers) < LEAST_SEEDS:
        counts = ", ".join(map(str, sorted(numbers))) or "none"
        raise ValueError(f"{path}: all results need the same {LEAST_SEEDS} or more seeds, got {counts}")
    experts = _read_experts(folder, numbers.pop())
    twice = sorted(set(scores) & set(experts))
    if twice:
        raise ValueError(f"{path} and the experts_*.json beside it both have {', '.join(twice)}: rename the former")
    return scores | experts


def read_all_scores(folders: Sequence[Path]) -> tuple[Scores, dict[tuple[str, str], Path]]:
    """The scores in several folders of results, of recipes that share models; none if not all are there yet.

    Returns:
        The scores, and for each row and task the first folder that has them.
    """
    merged: Scores = {}
    origin: dict[tuple[str, str], Path] = {}
    for folder in folders:
        scores = read_scores(folder)
        if scores is None:
            return {}, {}
        for row, of_tasks in scores.items():
            tasks = merged.setdefault(row, {})
            for task, of_seeds in of_tasks.items():
                if tasks.setdefault(task, of_seeds) != of_seeds:
                    raise ValueError(
                        f"{task} of {row!r} differs between {origin[row, task]} and {folder}: give one of the rows "
                        "another title, or measure both with the same settings, seeds and commit"
                    )
                origin.setdefault((row, task), folder)
    return merged, origin


def _read_experts(folder: Path, num_seeds: int) -> Scores:
    """The rows of single experts and of the routed model, where they were measured."""
    if not (folder / "experts_0.json").exists():
        return {}
    of_seeds = [read_json(folder / f"experts_{seed}.json") for seed in range(num_seeds)]
    if len({of_seed["weights"] for of_seed in of_seeds}) < num_seeds:
        raise ValueError(f"{folder / 'experts_*.json'}: two are of the same weights; a spread needs different seeds")
    all_metrics = [of_seed["metrics"] for of_seed in of_seeds]
    return {
        row: {task: [metrics.get(task, {}).get(row, {}) for metrics in all_metrics] for task in all_metrics[0]}
        for row in next(iter(all_metrics[0].values()))
    }
