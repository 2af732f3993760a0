"""What a dense and a sparse CLIP learn of facts: a law of capacity and exposures, fitted to runs (docs/law.md)."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, geometric_mean
from typing import Any

# The law, and the cases that it was fitted to, as `model_cards.law_outcomes` writes them
FITTED = Path(__file__).with_name("law.json")

# Bits of a fact that need no memory: the tint of a town's shield and its name's ending tell its country
TOLD = {"names": 3.0}


@dataclass(frozen=True)
class Facts:
    """Facts to remember: pictures that belong to texts.

    Args:
        number: how many, N.
        told: bits that a picture gives away without memory.
        difficulty: how many times more exposures they take than names.
    """

    number: int
    told: float = 0.0
    difficulty: float = 1.0

    @property
    def bits(self) -> float:
        """Bits that have to be remembered to tell all facts apart: N (log2 N - told)."""
        return self.number * (math.log2(self.number) - self.told)


@dataclass(frozen=True)
class Capacity:
    """What a model can hold.

    Args:
        width: hidden size of the towers.
        dense: parameters of the towers' layers, but for those that experts add.
        experts: parameters that experts add to a dense model of that width.
    """

    width: float
    dense: float
    experts: float = 0.0


@dataclass(frozen=True)
class Law:
    """share = (1 - exp(-held / bits)) / (1 + (half / exposures)**slope), with

    held = bits_per_parameter * (dense + expert_worth * experts),
    half = self.exposures * difficulty * (width / 16)**-width_power * (N / 1000)**facts_power

    Args:
        bits_per_parameter: what a parameter of a dense model's layers can hold.
        expert_worth: what a parameter of an expert holds, relative to one of a dense model.
        exposures: of each of 1,000 names, after which a model 16 wide has learned half of what it can hold.
        width_power, facts_power: see above.
        slope: how steeply it learns around that.
        difficulty: world -> how many times more exposures its facts take than names.
        gain_error: standard deviation of the gains of cases outside of the fit around those that the law gives.
    """

    bits_per_parameter: float
    expert_worth: float
    exposures: float
    width_power: float
    facts_power: float
    slope: float
    difficulty: dict[str, float]
    gain_error: float

    def share(self, facts: Facts, model: Capacity, exposures: float) -> float:
        """The share of the bits that a model knows after so many exposures of each fact, from 0 to 1."""
        held = self.bits_per_parameter * (model.dense + self.expert_worth * model.experts)
        half = self.exposures * facts.difficulty * (model.width / 16) ** -self.width_power
        half *= (facts.number / 1000) ** self.facts_power
        return (1 - math.exp(-held / facts.bits)) / (1 + (half / exposures) ** self.slope)

    def probability(self, gain: float) -> float:
        """That a sparse model is ahead where the law says that it gains so much."""
        return NormalDist().cdf(gain / self.gain_error)

    def reach(self, level: float = 0.9) -> float:
        """Half of the interval of a gain."""
        return NormalDist().inv_cdf((1 + level) / 2) * self.gain_error

    def facts(self, number: int, world: str | None = None) -> Facts:
        """Facts of a built-in world, or of data like the real ones among them: as difficult as their mean."""
        unknown = geometric_mean(self.difficulty.values())
        return Facts(number, TOLD.get(world, 0.0), {"names": 1.0, **self.difficulty}.get(world, unknown))


def fitted_law() -> tuple[Law, list[dict[str, Any]]]:
    """The law, and the cases that it was fitted to."""
    content = json.loads(FITTED.read_text(encoding="utf-8"))
    return Law(**content["law"]), content["cases"]


@dataclass(frozen=True)
class Forecast:
    """A dense and a sparse model of one width after as many multiply-adds of training.

    Args:
        dense, sparse: the shares of the bits that the law says they know.
        probability: that the sparse one knows more.
        nearest: the case that was run and is most like it.
        outside: what lies outside of what was measured, a sentence each; then nothing else holds.
    """

    dense: float
    sparse: float
    probability: float
    nearest: dict[str, Any]
    outside: list[str]


def forecast(facts: Facts, dense: Capacity, sparse: Capacity, exposures: float, sparse_exposures: float) -> Forecast:
    """What the law says of a dense and a sparse model, which sees less within as many multiply-adds."""
    law, cases = fitted_law()
    shares = law.share(facts, dense, exposures), law.share(facts, sparse, sparse_exposures)
    numbers = {"parameters": dense.dense, "facts": facts.number, "exposures": exposures}
    nearest = min(cases, key=lambda case: _distance(numbers, case))
    outside = []
    for name, number in numbers.items():
        low, high = (of(case[name] for case in cases) for of in (min, max))
        if not low <= number <= high:
            outside.append(f"{MEASURED[name]} {number:,.0f}, and {low:,.0f} to {high:,.0f} were measured")
    return Forecast(*shares, law.probability(shares[1] - shares[0]), nearest, outside)


MEASURED = {
    "parameters": "parameters of the dense model's layers:",
    "facts": "different captions:",
    "exposures": "times that training shows each:",
}


def _distance(numbers: Mapping[str, float], case: Mapping[str, Any]) -> float:
    """Between two cases: their bits for each parameter and their exposures count alike, both as ratios."""

    def places(of: Mapping[str, Any]) -> Sequence[float]:
        load = of["facts"] * math.log2(of["facts"]) / of["parameters"]
        return math.log(load), math.log(of["exposures"])

    return math.dist(places(numbers), places(case))
