"""The stage that averages models."""

from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from clip_moe.conversion.model_stage import ModelStage
from clip_moe.engine.context import Context
from clip_moe.engine.settings import STRICT, refuse
from clip_moe.engine.stage import Model


@dataclass(config=STRICT, kw_only=True)
class AverageStage(ModelStage):
    """One model with the weighted mean of the parameters of several.

    Equal weights give a start for fine-tuning (MoDE appendix D). Means of a model and its fine-tuned weights trade what
    was learned against what was kept (WiSE-FT, https://arxiv.org/abs/2109.01903).

        clip-moe average runs/between --models training/symbol_clip runs/tuned --weights 0.3 0.7
    """

    kind: ClassVar[str] = "average"

    # Earlier stages, folders or hub names.
    models: list[Model] = Field(min_length=1)
    # One weight per model, with a sum of 1; None: equal weights.
    weights: list[float] | None = None

    @model_validator(mode="after")
    def _check(self):
        weights, number = self.weights, len(self.models)
        is_wrong = weights is not None and not (len(weights) == number and abs(sum(weights) - 1) < 1e-6)
        refuse((is_wrong, f"weights: {number} models need {number} weights that sum to 1, got {weights}"))
        return self

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        from clip_moe.conversion.average import average
        from clip_moe.conversion.processors import require_same

        require_same(inputs.models)
        self.save(average(inputs.models, self.weights), inputs.models[0], directory)
