"""The stage that averages models."""

from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from clip_moe.conversion.model_stage import ModelStage
from clip_moe.engine.context import Context
from clip_moe.engine.settings import STRICT
from clip_moe.engine.stage import Model


@dataclass(config=STRICT, kw_only=True)
class AverageStage(ModelStage):
    """One model with the weighted mean of the parameters of several.

    Equal weights give a start for fine-tuning (MoDE appendix D). Between a model and what fine-tuning made of it lies a
    line of models that trade what was learned against what was kept (WiSE-FT, https://arxiv.org/abs/2109.01903).

        clip-moe average runs/between --models training/symbol_clip runs/tuned --weights 0.3 0.7
    """

    kind: ClassVar[str] = "average"

    # Earlier stages, folders or hub names.
    models: list[Model] = Field(min_length=1)
    # One for each model, which sum to 1; None: all alike.
    weights: list[float] | None = None

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        from clip_moe.conversion.average import average
        from clip_moe.conversion.processors import require_same

        require_same(inputs.models)
        self.save(average(inputs.models, self.weights), inputs.models[0], directory)
