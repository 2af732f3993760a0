"""The outcome of training by its contrastive losses: at chance, collapsed, or memorized.

Chance is the loss of equal similarities. Small CLIPs that died, at rates of 0.05 to 0.5, end within 0.1 % of it, their
gradient below a thousandth of the first one; those that learn slowly keep more than a tenth of it.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, computed_field

DID_NOT_LEAVE_CHANCE, COLLAPSED, MEMORIZED = "did not leave chance", "collapsed", "memorized its pairs"
AT_CHANCE = 0.98
# A run that was never below this share of chance has not left it
LEFT_CHANCE = 0.9
# Fraction of the first gradient's norm below which no gradient is left
VANISHED = 0.03
# Fewer steps have no outcome: a tenth of them is too noisy
LEAST_STEPS = 20


class Training(BaseModel):
    """Contrastive losses of a training, without router losses, in nats."""

    model_config = ConfigDict(strict=True, defer_build=True)

    steps: int
    # Pairs that are told apart in one loss
    batch_size: int
    # Loss of the first batch if all its similarities were equal
    chance: FiniteFloat = Field(gt=0)
    # Before the first step; the least mean over a tenth of the steps, or the first; the mean over the last tenth
    first: FiniteFloat
    lowest: FiniteFloat
    last: FiniteFloat
    # The last gradient's norm, as a share of the first one's; None: one overflowed, in half precision
    gradient: FiniteFloat | None
    # Loss of held-out pairs at their best temperature, in batches of that size; and its chance level
    test: FiniteFloat | None = None
    test_chance: FiniteFloat | None = None

    @classmethod
    def from_log(cls, lines: Iterable[Mapping[str, Any]], batch_size: int) -> "Training | None":
        """Summarize the lines of a `log.jsonl`; None: its losses have no chance, or nothing to tell apart."""
        logged = [line for line in lines if "loss" in line]
        if not logged or not 0 < logged[0].get("chance", 0) < math.inf:
            return None
        first, last = logged[0], logged[-1]
        norms = first["grad_norm"], last["grad_norm"]
        gradient = norms[1] / norms[0] if norms[0] else 0.0
        tenths = defaultdict(list)
        for before, line in zip([{"step": 0}, *logged], logged, strict=False):
            tenths[-(-10 * line["step"] // last["step"])] += [line["loss"]] * (line["step"] - before["step"])
        means = [sum(losses) / len(losses) for losses in tenths.values()]
        return cls(
            steps=last["step"],
            batch_size=batch_size,
            chance=first["chance"],
            first=first["loss"],
            lowest=min([first["loss"], *means]),
            last=means[-1],
            gradient=gradient if all(map(math.isfinite, norms)) else None,
        )

    def with_test(self, loss: float, chance: float) -> "Training":
        """Beside the loss of held-out pairs and chance for them."""
        return self.model_copy(update={"test": loss, "test_chance": chance})

    @computed_field
    @property
    def outcome(self) -> str | None:
        """None: neither, or too few steps."""
        if self.steps < LEAST_STEPS:
            return None
        last, lowest = self.last / self.chance, self.lowest / self.chance
        if lowest < LEFT_CHANCE and 1 - last < (1 - lowest) / 4:
            return COLLAPSED
        if last >= AT_CHANCE:
            return DID_NOT_LEAVE_CHANCE
        if self.test is not None and last <= 0.5 and self.test >= AT_CHANCE * self.test_chance:
            return MEMORIZED
        return None

    @property
    def is_dead(self) -> bool:
        """At chance or collapsed: its scores say nothing about the method."""
        return self.outcome in (DID_NOT_LEAVE_CHANCE, COLLAPSED)

    @property
    def advice(self) -> str | None:
        """The change to make before training again."""
        if self.outcome == MEMORIZED:
            return "add pairs or lower the epochs"
        if self.outcome == DID_NOT_LEAVE_CHANCE and self.gradient is not None and self.gradient > VANISHED:
            return "raise the learning rate or the steps, as its gradient has not vanished"
        return "lower the learning rate, warm up longer or add pairs" if self.is_dead else None

    def __str__(self) -> str:
        text = f"{self.steps:,} steps, contrastive loss {self.last:.2f} ({self.first:.2f} before them; "
        text += f"chance {self.chance:.2f})"
        if self.test is not None:
            text += f", of the test {self.test:.2f} at its best temperature (chance {self.test_chance:.2f})"
        return f"{text}: {self.outcome}" if self.outcome else text
