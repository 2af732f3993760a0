"""The stage that reads the checkpoints of MoE-ViE's authors."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from clip_moe.conversion.model_stage import ModelStage, file_fault
from clip_moe.engine.context import Context
from clip_moe.engine.local_names import is_hub_name
from clip_moe.engine.settings import STRICT


@dataclass(config=STRICT, kw_only=True)
class ReleasedMoEViEStage(ModelStage):
    """The checkpoints that MoE-ViE's authors released (https://arxiv.org/abs/2608.17402, facebook/MoEViE-B16-224,
    -L16-384 and -H14-448) as a MoE-ViE, in their precision. They are under CC BY-NC 4.0.

        clip-moe released-moe-vie moe-vie --checkpoint facebook/MoEViE-B16-224 \\
            --processor openai/clip-vit-base-patch32
    """

    kind: ClassVar[str] = "released_moe_vie"

    # A repository on the Hub that holds a .pt of its own name, as facebook/MoEViE-L16-384 does; or a file with a state
    # dict, saved with torch.save or as .safetensors.
    checkpoint: str = Field(min_length=1)
    # Folder or hub name with CLIP's processor, whose tokenizer is MoE-ViE's, too. Its copy prepares images as MoE-ViE
    # takes them, and cuts texts at its length.
    processor: str | None = None
    # How an image becomes a square: its center, as in the authors' demo, or the whole of it, squeezed, as in their
    # evaluation. Their numbers are the better of both.
    resize_mode: Literal["shortest", "squash"] = "shortest"

    def faults(self, output_dir: Path) -> Iterator[tuple[str, str | None]]:
        if self.checkpoint.endswith((".pt", ".safetensors")) or not is_hub_name(self.checkpoint):
            yield "checkpoint", file_fault(self.checkpoint)

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        from clip_moe.conversion.released_moe_vie import convert

        convert(self.checkpoint, directory, self.processor, self.resize_mode)

    def fingerprints(self, inputs: SimpleNamespace) -> dict[str, str]:
        from clip_moe.engine.provenance import named_files

        return named_files([self.checkpoint], [self.checkpoint, self.processor])
