"""The stage that embeds a dataset."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from clip_moe.data.arguments import NumberedPictures
from clip_moe.engine.context import Context
from clip_moe.engine.settings import STRICT, Reads, refuse
from clip_moe.engine.stage import Stage

if TYPE_CHECKING:
    import datasets

    from clip_moe.evaluation.sentence_encoders import SentenceEncoder


@dataclass(config=STRICT, kw_only=True)
class EmbedStage(Stage):
    """Normalized embeddings of a dataset's images, captions or both, to cluster it and for other programs.

    The folder gets arrays `image`, `text` or both (pairs, size), in the order of the data, in files of safetensors that
    are named by their first row. Any number of processes share the work. Pairs that cannot be read are left out.

        clip-moe embed runs/embeddings --model training/symbol_clip --data.source symbols --data.num_samples 64
        clip-moe embed runs/sentences --model tfidf --what captions --data.source symbols --data.num_samples 64
    """

    kind: ClassVar[str] = "embed"
    has_rows_of_pairs: ClassVar[bool] = True

    # A CLIP: an earlier stage, a folder or a hub name. For captions alone (MoDE section 3.2) also a sentence encoder: a
    # model of sentence-transformers, a text model of transformers, "tfidf", which is fitted to these captions, or an
    # earlier embed stage, whose encoder is used again.
    model: Annotated[str, Reads("model", "embed", literals=["tfidf"])]
    # The pairs to embed; of images alone, captions are not needed (`caption_column: null`).
    data: NumberedPictures
    # Modalities to embed. With `images` or `captions`, the folder keeps the encoder, which a mixture routes by: tasks
    # by captions (MoDE), single images by images (section 5.3, a baseline).
    what: Literal["both", "images", "captions"] = "both"
    # Pairs per batch and process.
    batch_size: int = Field(default=256, gt=0)
    # The weights of the L captions of an image, as in the stages that train on them: its text embedding is their
    # weighted mean. None: the first caption that is not missing.
    caption_weights: list[Annotated[float, Field(ge=0)]] | None = Field(default=None, min_length=1)
    # How a text model of transformers makes one embedding: the mean over its tokens, the first one (unsupervised
    # SimCSE), or the model's own pooler on the first one (supervised SimCSE).
    pooling: Literal["mean", "cls", "pooler"] = "mean"
    # Size of the embeddings of tfidf.
    dim: int = Field(default=64, gt=0)
    # tfidf leaves out words that a larger share of the captions has; ubiquitous words hide topics.
    max_df: float = Field(default=1.0, gt=0, le=1)

    @model_validator(mode="after")
    def _check(self):
        is_tfidf = self.model == "tfidf"
        refuse(
            (not is_tfidf and self.changed("dim", "max_df"), "dim and max_df are for tfidf only"),
            (
                self.changed("pooling") and (is_tfidf or self.what != "captions"),
                f"pooling: {self.pooling} is for a text model of transformers, with what: captions",
            ),
            (is_tfidf and self.what != "captions", "tfidf embeds captions only: set what: captions"),
            (
                self.data.caption_column is None and self.what != "images",
                "data.caption_column: data without captions need what: images",
            ),
            (
                self.caption_weights is not None and self.what != "both",
                f"caption_weights need what: both, got {self.what}",
            ),
        )
        return self

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        from clip_moe.data.pairs import shared_pairs
        from clip_moe.evaluation import embedder
        from clip_moe.training.loader import PairLoader
        from clip_moe.training.pair_features import BATCHES_PER_SHARD, ENCODER, encode_pairs, new_store
        from clip_moe.training.samplers import Share

        accelerator, images = context.accelerator, self.what != "captions"
        rows = shared_pairs(context, inputs.data, images)
        if self.what == "both":
            batch_size = min(self.batch_size, len(rows))
            workers, device = self.data.num_workers, accelerator.device
            clip = embedder.Embedder(inputs.model, None, batch_size, device, num_workers=workers, state=accelerator)
            loader = PairLoader(
                rows, clip.processor, self.data, Share(batch_size), caption_weights=self.caption_weights
            )
            context.sample_bytes["images"] = loader.bytes_in_memory
            compute, shard_size = clip.compute(loader.in_order()), batch_size * embedder.BATCHES_PER_SHARD
            encoder_name = None
        else:
            encoder = self._kept_encoder(inputs.model, rows, context, directory / ENCODER)
            compute = encode_pairs(encoder, rows, self.batch_size)
            shard_size, encoder_name = self.batch_size * BATCHES_PER_SHARD, encoder.name
        store = new_store(directory, rows, self.data, shard_size, context, images, encoder_name)
        store.write(accelerator, f"embeddings of {self.what}", compute)

    def _kept_encoder(self, source: str, rows: "datasets.Dataset", context: Context, folder: Path) -> "SentenceEncoder":
        """The encoder, which the main process saves in this folder."""
        from clip_moe.engine.files import new_folder
        from clip_moe.evaluation.sentence_encoders import TfidfEncoder, load_encoder, open_encoder
        from clip_moe.training.pair_features import first_captions

        modality = "image" if self.what == "images" else "text"
        if context.accelerator.is_main_process and not folder.is_dir():
            with new_folder(folder) as partial:
                if source == "tfidf":
                    TfidfEncoder.fit(first_captions(rows), self.dim, context.seed, self.max_df).save(partial)
                elif (Path(source) / folder.name).is_dir():
                    shutil.copytree(Path(source) / folder.name, partial, dirs_exist_ok=True)
                else:
                    open_encoder(source, self.pooling, modality=modality).save(partial)
        context.accelerator.wait_for_everyone()
        encoder = load_encoder(folder, context.accelerator.device)
        if encoder.modality != modality:
            raise ValueError(f"what is {self.what}, but the encoder {encoder.name} embeds {encoder.modality}")
        return encoder
