"""The stage that analyzes the experts of a model."""

import dataclasses
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from clip_moe.engine.context import Context
from clip_moe.engine.settings import STRICT
from clip_moe.engine.stage import Model, Stage
from clip_moe.evaluation.measured_tasks import REHEARSED_ROWS, MeasuredTasks


@dataclass(config=STRICT, kw_only=True)
class AnalyzeStage(MeasuredTasks, Stage):
    """The scores of each expert of a sparse model, and the tokens that it gets, as a page with pictures.

    Do the experts do anything? First comes the collapse test: every task is measured with the routers, and with every
    layer's experts replaced by their mean; if that costs nothing, the experts do nothing apart from each other. Beside
    it stand the entropy of the routers, in bits, and how alike the experts are.

    Then every task is measured with all tokens sent through one expert, for every expert (CLIP-MoE Table 1, CLIP-FMoE
    Tables 4 and 17). An expert alone has the weight that the experts of a token have together in the routed model.
    Where the weights do not sum to 1, experts.json also has the scales that a dense stage takes.

        clip-moe analyze runs/experts --model training/name_clip_moe --tasks names_256
    """

    kind: ClassVar[str] = "analyze"
    main_process_only: ClassVar[bool] = True

    # An earlier stage, a folder or a hub name: a sparse model.
    model: Model
    # The sparse layer of the vision tower whose patches are drawn; None: the last one.
    layer: int | None = None
    # Images or texts that are computed at a time.
    batch_size: int = Field(default=64, gt=0)

    def rehearsed(self, num_samples: int) -> typing.Self:
        """On few rows of each task."""
        return dataclasses.replace(super().rehearsed(num_samples), max_rows=REHEARSED_ROWS)

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        from clip_moe.evaluation.experts import analyze_experts

        beginning = analyze_experts(
            inputs.model,
            self.open_tasks(),
            directory,
            layer=self.layer,
            batch_size=self.batch_size,
        )
        print(beginning)
