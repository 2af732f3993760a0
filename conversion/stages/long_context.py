"""The stage that lengthens a model's texts."""

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
class LongContextStage(ModelStage):
    """A CLIP, dense or sparse, with a longer text context, as Long-CLIP (https://arxiv.org/abs/2403.15378) makes it.

    The first rows of the position table, which most captions of CLIP's training reach, stay as they are. Between every
    later row and the next one, new rows are interpolated. `clip_moe.conversion.long_context.lengthen` also takes a text
    tower alone.

        clip-moe long-context runs/long --model training/symbol_clip --length 108
    """

    kind: ClassVar[str] = "long_context"

    # An earlier stage, a folder or a hub name.
    model: Model
    # Tokens of a text: 77 can become 248, with 4 positions for each one after the first 20.
    length: int = Field(gt=0)
    # First positions that stay.
    keep: int = Field(default=20, gt=0)

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        from clip_moe.conversion.checkpoints import load_clip
        from clip_moe.conversion.long_context import lengthen, verify

        self.save(lengthen(load_clip(inputs.model), self.length, self.keep), inputs.model, directory, self.length)
        verify(inputs.model, directory, self.keep)
