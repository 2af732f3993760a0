"""The stage that gives images several captions."""

from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from clip_moe.data.arguments import CaptionPolicy, NumberedData
from clip_moe.engine.context import Context
from clip_moe.engine.settings import STRICT
from clip_moe.engine.stage import Model, PairsStage


@dataclass(config=STRICT, kw_only=True)
class CaptionsStage(PairsStage):
    """A dataset whose images have several captions each, for `caption_weights`; others use it as their `data.source`.

    The built-in worlds have the columns `caption` (detailed) and `raw_caption` (web).

        clip-moe captions runs/captions --model training/symbol_clip --data.source symbols --data.num_samples 64 \\
            --captions '{policy: full, column: caption}' '{policy: first_sentence, column: caption}'
    """

    kind: ClassVar[str] = "captions"

    # Model whose tokenizer counts tokens: an earlier stage, a folder or a hub name.
    model: Model
    # The images, with a column for each text that captions are made of.
    data: NumberedData
    # How the captions of an image are made, one policy after the other.
    captions: list[CaptionPolicy] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self):
        if self.data.captions_per_line:
            raise ValueError("data.captions_per_line: captions are built from whole texts; remove it")
        return self

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        import numpy as np

        from clip_moe.conversion.processors import load_processor
        from clip_moe.data.captions import build_captions
        from clip_moe.data.pairs import caption_columns

        tokenizer = load_processor(inputs.model).tokenizer
        rows = caption_columns(inputs.data, {policy.column for policy in self.captions})
        rows = build_captions(rows, self.captions, tokenizer, context.seed, self.data.num_workers or None)
        rows.save_to_disk(directory)
        missing = np.array([[not caption for caption in captions] for captions in rows["caption"]]).sum(axis=0)
        print(
            f"{self.name}: {len(rows)} images with {len(missing)} captions each, of which are missing: "
            f"{missing.tolist()}"
        )
