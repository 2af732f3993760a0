"""The stage that writes the checkpoints of MoE-ViE's authors."""

from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

from pydantic.dataclasses import dataclass

from clip_moe.engine.context import Context
from clip_moe.engine.settings import STRICT
from clip_moe.engine.stage import Model, Stage


@dataclass(config=STRICT, kw_only=True)
class ExportMoEViEStage(Stage):
    """A MoE-ViE in the layout of its authors' checkpoints (https://arxiv.org/abs/2608.17402), the way back from
    `released_moe_vie`: `checkpoint.pt`, which is read again and compared with the model.

        clip-moe export-moe-vie released --model moe-vie
    """

    kind: ClassVar[str] = "export_moe_vie"
    main_process_only: ClassVar[bool] = True

    # A MoEViEModel: an earlier stage, a folder or a hub name.
    model: Model

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        from clip_moe.conversion.released_moe_vie import write_checkpoint

        write_checkpoint(inputs.model, directory / "checkpoint.pt")
