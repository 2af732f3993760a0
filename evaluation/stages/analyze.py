"""The stage that analyzes the experts of a model."""

from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from clip_moe.engine.context import Context
from clip_moe.engine.settings import STRICT
from clip_moe.engine.stage import Model, Stage
from clip_moe.evaluation.measured_tasks import MeasuredTasks


@dataclass(config=STRICT, kw_only=True)
class AnalyzeStage(MeasuredTasks, Stage):
    """The scores of each expert of a sparse model, and the tokens routed to it, as a page with pictures.

    Do the experts do different things? The collapse test measures every task with the routers, and with every layer's
    experts replaced by their mean; if that costs nothing, the experts are interchangeable. The page also shows the
    entropy of the routers, in bits, and how similar the experts are.

    Then every task is measured with all tokens sent through one expert, for every expert (CLIP-MoE Table 1, CLIP-FMoE
    Tables 4 and 17). An expert alone has the total weight of a token's experts in the routed model. If these weights do
    not sum to 1, experts.json also has the scales that a dense stage takes.

        clip-moe analyze runs/experts --model training/name_clip_moe --tasks names_256
    """

    kind: ClassVar[str] = "analyze"
    main_process_only: ClassVar[bool] = True

    # A sparse model: an earlier stage, a folder or a hub name.
    model: Model
    # Batch size for images and texts.
    batch_size: int = Field(default=64, gt=0)

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        from clip_moe.evaluation.experts import analyze_experts

        print(analyze_experts(inputs.model, self.open_tasks(), directory, self.batch_size))
