"""Whether a paper's claim holds, by scores of several seeds.

`read_claims` reads the file of claims. Each names the cards whose rows it compares: folders beside that file with a
`seeds.json`, as `lab.cards.seeds` writes it.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, TypeAdapter

from clip_moe.engine.files import read_json
from clip_moe.engine.yaml_files import read_yaml
from lab.cards.intervals import paired_interval

LEAST_SEEDS = 3
HOLDS, DOES_NOT_HOLD, INCONCLUSIVE, NOT_MEASURED = "holds", "does not hold", "inconclusive", "not measured"
VERDICTS = (HOLDS, DOES_NOT_HOLD, INCONCLUSIVE, NOT_MEASURED)
Scores = dict[str, dict[str, list[dict[str, float]]]]  # row -> task -> for each seed: metric -> score


class Claim(BaseModel, extra="forbid"):
    """A sentence of a paper, and either what would show it (`cards`, `better`, `than`, `scores`) or what is
    `missing` to show it."""

    claim: str
    # The claim in a few words, for the picture
    short: str
    # Table, section or figure of the paper
    place: str
    # The folders of the results, as seen from the file of claims; a row is that of the first one that has it
    cards: list[str] = []
    # Titles of rows: the first must be better than each of the others
    better: str | None = None
    than: list[str] = []
    # Task -> metrics
    scores: dict[str, list[str]] = {}
    # Percent points by which it must be better; below 0: by which it may be worse
    by: float = 0.0
    # Samples, and multiply-adds where they differ, that its models were trained with
    budget: str = ""
    missing: str = ""
    # Markdown. Where it does not hold: what was tried to find out whether recipe, code or world is the cause
    note: str = ""


class Paper(BaseModel, extra="forbid"):
    """The claims of a paper."""

    link: str | None = None
    claims: list[Claim]


@dataclass(frozen=True)
class Measured:
    """One score of a claim: percentages of both models with each seed, and the interval of their mean difference."""

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
    """A measurement for each metric of a claim; none for a claim with something `missing`.

    Args:
        folder: the folder of the file of claims and of the cards.

    Raises:
        ValueError: the cards have too few seeds, or different numbers of them.
    """
    cards: Scores = {}
    for card in claim.cards:
        cards = read_scores(folder / card) | cards
    measured, pairs = [], [(task, metric) for task, metrics in claim.scores.items() for metric in metrics]
    for task, metric in pairs:
        better, *rivals = (
            [100 * metrics[metric] for metrics in cards[row][task]] for row in [claim.better, *claim.than]
        )
        comparisons = []
        for name, rival in zip(claim.than, rivals, strict=True):
            low, high = paired_interval(better, rival, len(pairs) * len(rivals))
            # Rounded: scores that differ by exactly `by` are equal
            verdict = verdict_of((round(low - claim.by, 9), round(high - claim.by, 9)))
            comparisons.append(Measured(task, metric, better, name, rival, (low, high), verdict))
        worst = verdict_of_all(score.verdict for score in comparisons)
        hardest = (score for score in comparisons if score.verdict == worst)
        measured.append(max(hardest, key=lambda score: statistics.mean(score.than)))
    return measured


def read_claims(path: Path) -> dict[str, Paper]:
    """Title -> paper."""
    raw = read_yaml(path.read_text(encoding="utf-8"), str(path))
    return TypeAdapter(dict[str, Paper]).validate_python(raw)


def read_scores(folder: Path) -> Scores:
    """The scores of a card."""
    path = folder / "seeds.json"
    scores = read_json(path)
    numbers = {len(seeds) for row in scores.values() for seeds in row.values()}
    if len(numbers) != 1 or min(numbers) < LEAST_SEEDS:
        counts = ", ".join(map(str, sorted(numbers))) or "none"
        raise ValueError(f"{path}: all results need the same {LEAST_SEEDS} or more seeds, got {counts}")
    return scores
