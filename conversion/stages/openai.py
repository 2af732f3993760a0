"""The stage that reads OpenAI's and open_clip's weights."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from clip_moe.conversion.model_stage import ModelStage, file_fault
from clip_moe.engine.context import Context
from clip_moe.engine.settings import STRICT


@dataclass(config=STRICT, kw_only=True)
class OpenAIStage(ModelStage):
    """OpenAI's CLIP weights, and open_clip's and Long-CLIP's of their architecture, as transformers' `CLIPModel`.

    Weights become float32.

        clip-moe openai clip-vit-large-patch14 --archive ViT-L-14.pt --processor openai/clip-vit-large-patch14
    """

    kind: ClassVar[str] = "openai"

    # The TorchScript archive that OpenAI publishes (loading TorchScript can run code, so it must be one of the
    # published ones, by its sha256); or a state dict, saved with torch.save or as .safetensors, also within an
    # open_clip training checkpoint. An open_clip_config.json beside it, as on the Hub, sets the activation, the heads
    # (default: 64 wide, and wider from a width of 1,280 on, as in open_clip) and the preprocessing of images.
    archive: str = Field(min_length=1)
    # None: quick_gelu, with a warning if the file is not one of OpenAI's own.
    activation: Literal["quick_gelu", "gelu"] | None = None
    # Folder or hub name whose processor is saved with the model.
    processor: str | None = None
    # Load a TorchScript archive that OpenAI did not publish.
    trust_archive: bool = False

    def faults(self, output_dir: Path) -> Iterator[tuple[str, str | None]]:
        yield "archive", file_fault(self.archive)

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        from clip_moe.conversion.openai import convert

        convert(Path(self.archive), directory, self.activation, self.processor, self.trust_archive)

    def fingerprints(self, inputs: SimpleNamespace) -> dict[str, str]:
        from clip_moe.engine.provenance import named_files

        settings = Path(self.archive).with_name("open_clip_config.json")
        return named_files([self.archive, str(settings)], [self.processor])
