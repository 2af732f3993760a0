"""The stage that writes the checkpoints of CLIP-MoE's authors."""

from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

from pydantic.dataclasses import dataclass

from clip_moe.engine.context import Context
from clip_moe.engine.settings import STRICT
from clip_moe.engine.stage import Model, Stage


@dataclass(config=STRICT, kw_only=True)
class ExportCLIPMoEStage(Stage):
    """A CLIP-MoE in the layout of its authors' checkpoints (https://arxiv.org/abs/2409.19291), the way back from
    `released_clip_moe`: `checkpoint.pt`, which is read again and compared with the model.

        clip-moe export-clip-moe released --model clip-moe
    """

    kind: ClassVar[str] = "export_clip_moe"
    main_process_only: ClassVar[bool] = True

    # A CLIPMoEModel: an earlier stage, a folder or a hub name.
    model: Model

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        from clip_moe.conversion.released_clip_moe import write_checkpoint

        write_checkpoint(inputs.model, directory / "checkpoint.pt")
