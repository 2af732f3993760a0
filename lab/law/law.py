"""How many facts a dense and a sparse CLIP learn: a law of capacity and exposures, fitted to runs."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, stdev
from typing import Any

import numpy as np

# The law whose predictions were tested, and the cases with 8 experts, as `lab.law.outcomes` writes them
FITTED = Path(__file__).with_name("law.json")

# How likely a gain is to lie in its interval
LEVEL = 0.9
# Bits of a fact that need no memory: the tint of a town's shield and its name's ending tell its country
TOLD = {"names": 3.0}
# Draws of the logarithms that the law is off by: of both models alike, of each, and of what both can hold
NORMAL = np.random.default_rng(0).standard_normal((4, 4000))


@dataclass(frozen=True)
class Facts:
    """Facts to remember: pictures that belong to texts.

    Args:
        number: how many, N.
        told: bits that a picture gives away without memory.
        difficulty: how many times more exposures they take than names.
        slope: how steeply a model learns them around the exposures that it takes for half of what it can hold.
        pace: how many times fewer exposures a sparse model takes than a dense one.
        doubt: standard deviation of the logarithm of the difficulty.
    """

    number: int
    told: float
    difficulty: float
    slope: float
    pace: float = 1.0
    doubt: float = 0.0

    @property
    def bits(self) -> float:
        """Bits that have to be remembered to tell all facts apart: N (log2 N - told)."""
        return self.number * (math.log2(self.number) - self.told)


@dataclass(frozen=True)
class TrainedModel:
    """A model and its training, as the law sees them.

    Args:
        width: hidden size of the towers.
        dense: parameters of the towers' layers, but for those that experts add.
        exposures: how often training shows it each fact.
        experts: parameters that experts add to a dense model of that width.
    """

    width: float
    dense: float
    exposures: float
    experts: float = 0.0


@dataclass(frozen=True)
class Errors:
    """Standard deviations of the logarithms of what the law says of cases outside of the fit.

    Args:
        exposures: of `half`, in all models of a case alike.
        model: of `half`, in each model on its own, which seeds are part of.
        width: of `half`, in each model on its own, where their widths differ.
        room: of `capacity`, in all models of a case alike.
    """

    exposures: float
    model: float
    width: float
    room: float


@dataclass(frozen=True)
class Law:
    """share = (1 - exp(-capacity / bits)) / (1 + (half / exposures)**slope), with

    capacity = bits_per_parameter * (dense + expert_worth * experts),
    half = self.exposures * difficulty * (N / 1000)**facts_power / pace
           * (width / 16)**(width_curve * log(width / 16) - width_power)

    Args:
        bits_per_parameter: what a parameter of a dense model's layers can hold.
        expert_worth: what a parameter of an expert holds, relative to one of a dense model.
        exposures: of each of 1,000 names, after which a dense model 16 wide has learned half of what it can hold.
        width_power, width_curve, facts_power: see above.
        slope, real_slope: how steeply it learns names, and real pictures, around that.
        pace: how many times fewer exposures of names a sparse model takes than a dense one. Of real pictures, as many.
        difficulty: world -> how many times more exposures its facts take than names.
    """

    bits_per_parameter: float
    expert_worth: float
    exposures: float
    width_power: float
    width_curve: float
    facts_power: float
    slope: float
    real_slope: float
    pace: float
    difficulty: dict[str, float]
    errors: Errors

    def share(self, facts: Facts, model: TrainedModel, half_error: Any = 0.0, room_error: Any = 0.0) -> Any:
        """The share of the bits that a model knows after its training, from 0 to 1.

        Args:
            half_error, room_error: logarithms of the factors of `half` and `capacity`.
        """
        capacity = self.bits_per_parameter * (model.dense + self.expert_worth * model.experts) * np.exp(room_error)
        width = math.log(model.width / 16)
        log_half = math.log(self.exposures * facts.difficulty) + self.facts_power * math.log(facts.number / 1000)
        log_half += width * (self.width_curve * width - self.width_power) - math.log(facts.pace) * (model.experts > 0)
        ratio = np.exp(facts.slope * (log_half + half_error - math.log(model.exposures)))
        return (1 - np.exp(-capacity / facts.bits)) / (1 + ratio)

    def gains(self, facts: Facts, sparse: TrainedModel, dense: TrainedModel) -> np.ndarray:
        """Gain of a sparse model over a dense one by the law, with its errors drawn 4,000 times."""
        both_draws, sparse_draws, dense_draws, room_draws = NORMAL
        half = both_draws * math.hypot(self.errors.exposures, facts.doubt)
        room = room_draws * self.errors.room
        each = math.hypot(self.errors.model, self.errors.width if sparse.width != dense.width else 0.0)
        sparse_shares = self.share(facts, sparse, half + sparse_draws * each, room)
        return sparse_shares - self.share(facts, dense, half + dense_draws * each, room)

    def facts(self, number: int, world: str | None = None) -> Facts:
        """Facts of a world that the law was fitted to, or of data like the real ones among them: as difficult as their
        mean, with their spread as doubt."""
        if world == "names":
            return Facts(number, TOLD[world], 1.0, self.slope, self.pace)
        if world in self.difficulty:
            return Facts(number, TOLD.get(world, 0.0), self.difficulty[world], self.real_slope)
        logs = [math.log(difficulty) for difficulty in self.difficulty.values()]
        doubt = stdev(logs) * math.sqrt(1 + 1 / len(logs))
        return Facts(number, 0.0, geometric_mean(self.difficulty.values()), self.real_slope, doubt=doubt)


def known_share(information: float, number: int, world: str | None = None) -> float:
    """Share of the bits to remember that a model knows, from `information`, its share of all bits of `number` facts
    (`clip_moe.evaluation.task.INFORMATION`)."""
    bits, told = math.log2(number), TOLD.get(world, 0.0)
    return max(0.0, (information * bits - told) / (bits - told))


def interval(gains: np.ndarray) -> tuple[float, float]:
    """The `LEVEL` interval of drawn gains."""
    low, high = np.quantile(gains, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def probability(gains: np.ndarray) -> float:
    """Probability that the sparse model is ahead."""
    return float((gains > 0).mean())


def fitted_law() -> tuple[Law, list[dict[str, Any]]]:
    """The law whose predictions were tested, and the measured cases with 8 experts."""
    content = json.loads(FITTED.read_text(encoding="utf-8"))
    return law_of(content["law"]), content["cases"]


def law_of(content: Mapping[str, Any]) -> Law:
    """The law from its JSON."""
    return Law(**{**content, "errors": Errors(**content["errors"])})
