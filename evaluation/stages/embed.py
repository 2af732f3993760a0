"""The stage that writes a model's embeddings for other programs."""

from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from clip_moe.data.arguments import NumberedData
from clip_moe.engine.context import Context
from clip_moe.engine.settings import STRICT
from clip_moe.engine.stage import Model, Stage


@dataclass(config=STRICT, kw_only=True)
class EmbedStage(Stage):
    """A model's embeddings of your pictures and captions, normalized and in the order of the data.

    The folder gets image_embeds.npy and text_embeds.npy, and rows.jsonl, which says of each pair where it is in the
    data, its picture and its captions; or all of that as embeds.parquet. Pictures that cannot be read are left out,
    counted and named. Several processes share the work.

        clip-moe embed runs/embeddings --model training/name_clip_moe --data.source names --data.num_samples 64
        accelerate launch -m clip_moe embed mine --model FOLDER --data.source my/photos
    """

    kind: ClassVar[str] = "embed"

    # A CLIPModel or CLIPMoEModel: an earlier stage, a folder or a hub name.
    model: Model
    # The pairs to embed.
    data: NumberedData
    # What to embed.
    what: Literal["both", "images", "captions"] = "both"
    # Form of the files.
    form: Literal["npy", "parquet"] = "npy"
    # Images or texts that are embedded at a time.
    batch_size: int = Field(default=64, gt=0)
    # Of the computation; files are in float32.
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        import torch
        from accelerate import PartialState

        from clip_moe.evaluation.embed import write_embeddings

        accelerator = context.accelerator
        num_images, num_captions, unreadable = write_embeddings(
            inputs.model,
            inputs.data,
            directory,
            self.what,
            self.form,
            self.batch_size,
            accelerator.device,
            getattr(torch, self.dtype),
            self.data.num_workers or None,
            PartialState() if accelerator.num_processes > 1 else None,
        )
        accelerator.on_main_process(print)(
            f"{self.name}: {num_images} pictures and {num_captions} captions, {len(unreadable)} pictures skipped"
        )
