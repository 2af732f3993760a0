"""The stage that reads and writes the checkpoints of CLIP-MoE's authors."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from clip_moe.conversion.model_stage import ModelStage, file_fault
from clip_moe.engine.context import Context
from clip_moe.engine.settings import STRICT


@dataclass(config=STRICT, kw_only=True)
class ReleasedCLIPMoEStage(ModelStage):
    """The checkpoints that CLIP-MoE's authors released (https://arxiv.org/abs/2409.19291) as a CLIP-MoE.

    The tensors determine the sparse layers and the number of experts, but not how many experts compute a token.

        clip-moe released-clip-moe clip-moe --checkpoint clip-moe-4-2.pt --processor openai/clip-vit-large-patch14
    """

    kind: ClassVar[str] = "released_clip_moe"

    # A state dict, saved with torch.save or as .safetensors.
    checkpoint: str = Field(min_length=1)
    # Experts that compute each token, K.
    num_experts_per_tok: int = Field(default=2, gt=0)
    # Folder or hub name whose processor is saved with the model.
    processor: str | None = None

    def faults(self, output_dir: Path) -> Iterator[tuple[str, str | None]]:
        yield "checkpoint", file_fault(self.checkpoint)

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        from clip_moe.conversion.released_clip_moe import convert

        convert(Path(self.checkpoint), directory, self.num_experts_per_tok, self.processor)

    def fingerprints(self, inputs: SimpleNamespace) -> dict[str, str]:
        from clip_moe.engine.provenance import named_files

        return named_files([self.checkpoint], [self.processor])
