"""Estimates by the law of lab/law/README.md for a dense and a sparse model of the same data."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedConfig

from clip_moe.conversion.dense import dense_config
from clip_moe.conversion.processors import load_processor
from clip_moe.conversion.upcycle import shared_config
from clip_moe.data.arguments import DataArguments
from clip_moe.data.pairs import load_pairs
from clip_moe.data.texts import present_captions, same_words
from clip_moe.data.tokenizer import read_texts
from clip_moe.engine.markdown import escape
from clip_moe.evaluation.costs import count_parameters, meta_model, paper_config
from lab.law.law import LEVEL, Facts, Law, TrainedModel, fitted_law, interval, probability
from modeling_clip_moe.families import sparse_towers

CAVEAT = (
    "This is a guess by the law in lab/law, for data as hard as the worlds there. Shares are of the bits; a gain "
    f"is a {LEVEL:.0%} interval."
)


@dataclass(frozen=True)
class Estimate:
    """A dense and a sparse model after their training.

    Args:
        dense, sparse: the shares of the bits that the law says they know; NaN outside of what was measured.
        gains: draws of the difference; there none.
        nearest: the case that was run and is most like it.
        outside: what lies outside of what was measured, a sentence each; then nothing else holds.
    """

    dense: float
    sparse: float
    gains: np.ndarray
    nearest: dict[str, Any]
    outside: list[str]

    @property
    def sentence(self) -> str:
        """After "with 8 experts, "."""
        (low, high), ahead, case = interval(self.gains), probability(self.gains), self.nearest
        winner, ahead = ("dense", 1 - ahead) if ahead < 0.5 else ("sparse", ahead)
        return (
            f"it should know {self.sparse:.0%} instead of {self.dense:.0%}, a gain of {100 * low:+.0f} to "
            f"{100 * high:+.0f} points: **{winner}**, with a probability of {ahead:.0%}. The nearest case that was "
            f"run: {case['facts']:,} {case['world']}, {case['parameters']:,} parameters, {case['exposures']:,.0f} "
            f"times: {100 * case['gain']:+.1f} points with {case['experts']} experts."
        )


def estimate(facts: Facts, dense: TrainedModel, sparse: TrainedModel) -> Estimate:
    """Estimate for a dense and a sparse model; with equal multiply-adds, the sparse one sees fewer pairs."""
    law, cases = fitted_law()
    numbers = {"facts": facts.number, "parameters": dense.dense, "bits": facts.bits / dense.dense}
    numbers |= {"width": dense.width, "experts": sparse.experts / dense.dense}
    numbers |= {"exposures": dense.exposures, "sparse_exposures": sparse.exposures}
    measured = [_numbers(law, case) for case in cases]
    outside = []
    for name, number in numbers.items():
        values = [case[name] for case in measured]
        low, high = min(values), max(values)
        if not 0.99 * low <= number <= 1.01 * high:  # cases are rounded
            outside.append(f"{MEASURED[name]} {_shown(number)}, and {_shown(low)} to {_shown(high)} were measured")
    nearest = cases[min(range(len(cases)), key=lambda case: _distance(numbers, measured[case]))]
    if outside:
        return Estimate(math.nan, math.nan, np.array([]), nearest, outside)
    shares = (float(law.share(facts, model)) for model in (dense, sparse))
    return Estimate(*shares, law.gains(facts, sparse, dense), nearest, outside)


MEASURED = {
    "facts": "different captions:",
    "parameters": "parameters of the dense model's layers:",
    "bits": "bits to remember, for each of these:",
    "width": "hidden size:",
    "experts": "parameters that experts add, for each of the dense model:",
    "exposures": "times that training shows each caption to the dense model:",
    "sparse_exposures": "to the sparse model:",
}


def _numbers(law: Law, case: dict[str, Any]) -> dict[str, Any]:
    """A case that was run, by what verdicts are limited to."""
    bits = law.facts(case["facts"], case["world"]).bits
    ratios = {"bits": bits / case["parameters"], "experts": case["expert_parameters"] / case["parameters"]}
    return case | ratios


def _shown(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _distance(numbers: Mapping[str, float], case: Mapping[str, float]) -> float:
    """Between two cases: their bits for each parameter and their exposures count alike, both as ratios."""
    points = ([math.log(point["bits"]), math.log(point["exposures"])] for point in (numbers, case))
    return math.dist(*points)


def trained_model(config: PreTrainedConfig, exposures: float) -> TrainedModel:
    """A dense or a sparse model after its training."""
    parameters = count_parameters(meta_model(config))["layers"]
    width = statistics.mean(tower.hidden_size for tower in (config.text_config, config.vision_config))
    experts = 0
    if sparse_towers(config):
        dense = dense_config(config)
        dense = shared_config(dense) if getattr(config, "shared_encoder", False) else dense
        experts = parameters - count_parameters(meta_model(dense))["layers"]
    return TrainedModel(width, parameters - experts, exposures, experts)


def unmeasured_experts(config: PreTrainedConfig) -> list[str]:
    """What lies outside of what was measured in a sparse model's experts, a sentence each."""
    kinds = {(t.expert_size / t.intermediate_size, t.num_experts_per_tok) for t in sparse_towers(config).values()}
    return [
        f"experts {width:.3g} of the FFN wide, {active} a token, and whole FFNs, 2 a token, were measured"
        for width, active in sorted(kinds - {(1, 2)})
    ]


@dataclass(frozen=True)
class CountedCaptions:
    """Captions of data.

    Args:
        pairs: captions with an image each.
        different: that the model's tokenizer tells apart.
        texts: different texts; the tokenizer may read several alike.
    """

    source: str
    pairs: int
    texts: int
    different: int

    @property
    def sentence(self) -> str:
        alike = (
            f", {self.texts - self.different:,} of which are read as another one is"
            if self.texts > self.different
            else ""
        )
        return (
            f"{escape(self.source)} has {self.pairs:,} captions. {self.texts:,} are different{alike}: "
            f"{self.different:,} to tell apart, each {self.pairs / self.different:.3g} times."
        )


def count_captions(data: DataArguments, models: Sequence[str]) -> CountedCaptions:
    """How many captions there are to tell apart, for the tokenizer of the first model that has one, or else by words.

    Raises:
        ValueError: all captions are alike, or there are none.
    """
    texts = [text for captions in load_pairs(data, images=False)["caption"] for text in present_captions(captions)]
    names = [name for name in models if paper_config(name) is None]
    if names:
        keys = read_texts(load_processor(names[0]).tokenizer, texts).digests
    else:
        keys = [same_words(text) for text in texts]
    if len(set(keys)) < 2:
        raise ValueError(f"{data.source}: all of its {len(texts):,} captions are alike: there is nothing to tell apart")
    return CountedCaptions(data.source, len(texts), len(set(texts)), len(set(keys)))
