"""The stage that puts a sparse tower into a LLaVA."""

from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

from pydantic.dataclasses import dataclass

from clip_moe.conversion.model_stage import ModelStage
from clip_moe.engine.context import Context
from clip_moe.engine.settings import STRICT
from clip_moe.engine.stage import Model


@dataclass(config=STRICT, kw_only=True)
class LlavaStage(ModelStage):
    """A LLaVA of transformers with a CLIP-MoE in place of its vision tower.

    The language model and the projector stay as they are: a tower upcycled from the CLIP that the LLaVA was trained
    with fits at once, any other one of the same width needs the projector trained again. Import
    `modeling_clip_moe` before loading the result.

        clip-moe llava llava-moe --model llava-hf/llava-1.5-7b-hf --tower clip-moe-l14-336
    """

    kind: ClassVar[str] = "llava"

    # A LlavaForConditionalGeneration: an earlier stage, a folder or a hub name.
    model: Model
    # A sparse model, or its vision tower alone: an earlier stage, a folder or a hub name.
    tower: Model

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        from clip_moe.conversion.llava import convert

        convert(inputs.model, inputs.tower, directory)
