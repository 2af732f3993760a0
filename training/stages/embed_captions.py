"""The stage that embeds the captions of a dataset."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from clip_moe.data.arguments import NumberedData
from clip_moe.engine.context import Context
from clip_moe.engine.settings import STRICT, Reads
from clip_moe.engine.stage import Stage

if TYPE_CHECKING:
    import datasets


@dataclass(config=STRICT, kw_only=True)
class EmbedCaptionsStage(Stage):
    """The sentence embeddings of a dataset's captions, by which data experts are found (MoDE section 3.2).

    For example:

        clip-moe embed-captions runs/sentences --encoder training/symbol_clip --data.source symbols \\
            --data.num_samples 64
    """

    kind: ClassVar[str] = "embed_captions"
    has_rows_of_pairs: ClassVar[bool] = True

    # A folder or hub name of sentence-transformers, of a text model of transformers, or of a CLIP, whose text tower is
    # used; "tfidf", which is fitted to these captions; or an earlier embed_captions stage, whose encoder is used again.
    encoder: Annotated[str, Reads("embed_captions", "model", literals=["tfidf"])]
    # The pairs whose captions are embedded.
    data: NumberedData
    # "image" embeds the images in place of the captions, with a CLIP as encoder, such as the seed model (MoDE section
    # 5.3, to compare with). Every test image then routes itself, by all centers.
    modality: Literal["text", "image"] = "text"
    # How a text model of transformers makes one embedding: the mean over its tokens, the first one (unsupervised
    # SimCSE), or the model's own pooler on the first one (supervised SimCSE).
    pooling: Literal["mean", "cls", "pooler"] = "mean"
    # Size of the embeddings of tfidf.
    dim: int = Field(default=64, gt=0)
    # tfidf leaves out words that a larger share of the captions has; what is said of everything hides topics.
    max_df: float = Field(default=1.0, gt=0, le=1)
    # Captions that are embedded at a time, by one process.
    batch_size: int = Field(default=256, gt=0)
    # In which precision embeddings are kept.
    dtype: Literal["float32", "float16"] = "float32"

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        from clip_moe.data.shared_rows import shared_pairs
        from clip_moe.evaluation.sentence_encoders import load_encoder
        from clip_moe.training.caption_clusters import ENCODER, caption_store, encoder_features

        accelerator, folder = context.accelerator, directory / ENCODER
        images = self.modality == "image"
        rows = shared_pairs(context, inputs.data, images)
        if accelerator.is_main_process and not folder.is_dir():
            self._keep_encoder(inputs.encoder, rows, context.seed, folder)
        accelerator.wait_for_everyone()
        encoder = load_encoder(folder, accelerator.device)
        if encoder.modality != self.modality:
            raise ValueError(f"modality {self.modality}, but the encoder {encoder.name} is of the other")

        store = caption_store(directory, rows, self.data, self.batch_size, encoder, context)
        compute = encoder_features(encoder, rows, self.batch_size, self.dtype)
        store.write(accelerator, "embeddings", compute)

    def _keep_encoder(self, source: str, rows: "datasets.Dataset", seed: int, folder: Path) -> None:
        from clip_moe.engine.files import new_folder
        from clip_moe.evaluation.sentence_encoders import TfidfEncoder, open_encoder
        from clip_moe.training.caption_clusters import ENCODER, captions_of

        with new_folder(folder) as partial:
            if self.encoder == "tfidf":
                TfidfEncoder.fit(captions_of(rows), self.dim, seed, self.max_df).save(partial)
            elif (Path(source) / ENCODER).is_dir():
                shutil.copytree(Path(source) / ENCODER, partial, dirs_exist_ok=True)
            else:
                open_encoder(source, self.pooling, modality=self.modality).save(partial)
