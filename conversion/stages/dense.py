"""The stage that takes one expert out of a model."""

from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from clip_moe.conversion.model_stage import ModelStage
from clip_moe.engine.context import Context
from clip_moe.engine.settings import STRICT, Reads
from clip_moe.engine.stage import Model


@dataclass(config=STRICT, kw_only=True)
class DenseStage(ModelStage):
    """One expert of a CLIP-MoE as a dense CLIP: every token goes through that expert.

    Routers and fusion gates are left out, so right after upcycling every expert gives back the original model bit for
    bit (with scale 1, where one is needed).

        clip-moe dense runs/expert --model training/name_clip_moe --take 1
    """

    kind: ClassVar[str] = "dense"

    # A sparse model: an earlier stage, a folder or a hub name.
    model: Model
    # Number of the expert, from 0; or base, the FFN beside the experts of a model with fusion gates.
    take: Annotated[int, Field(ge=0)] | Literal["base"]
    # If the weights of a token's experts do not sum to 1, as in CLIP-UP: the factor of the expert's output,
    # a number or an analyze stage of the model.
    scale: float | Annotated[str, Reads("analyze")] | None = None

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        from clip_moe.conversion.checkpoints import load_sparse
        from clip_moe.conversion.dense import extract, read_scale, verify

        scale = read_scale(inputs.scale, inputs.model) if isinstance(inputs.scale, str) else inputs.scale
        self.save(extract(load_sparse(inputs.model), self.take, scale), inputs.model, directory)
        verify(inputs.model, directory, self.take, scale)
