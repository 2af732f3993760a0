"""The stage that writes checkpoints as their authors do."""

from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

from pydantic.dataclasses import dataclass

from clip_moe.engine.context import Context
from clip_moe.engine.settings import STRICT
from clip_moe.engine.stage import Model, Stage


@dataclass(config=STRICT, kw_only=True)
class ExportReleasedStage(Stage):
    """A CLIP-MoE (https://arxiv.org/abs/2409.19291) or MoE-ViE (https://arxiv.org/abs/2608.17402) in its authors'
    layout, the way back from `released_clip_moe` and `released_moe_vie`: `checkpoint.pt`, which is read again and
    compared with the model.

        clip-moe export-released exported --model clip-moe
    """

    kind: ClassVar[str] = "export_released"
    main_process_only: ClassVar[bool] = True

    # A CLIPMoEModel or MoEViEModel: an earlier stage, a folder or a hub name.
    model: Model

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        from clip_moe.conversion import released_clip_moe, released_moe_vie
        from clip_moe.conversion.checkpoints import load_config

        layout = released_moe_vie if load_config(inputs.model).model_type == "moe_vie" else released_clip_moe
        layout.write_checkpoint(inputs.model, directory / "checkpoint.pt")
