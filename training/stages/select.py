"""The stage that selects pairs by the metadata of tasks."""

from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from clip_moe.engine.context import Context
from clip_moe.engine.settings import STRICT, Reads
from clip_moe.engine.stage import Stage


@dataclass(config=STRICT, kw_only=True)
class SelectStage(Stage):
    """One cluster, 0, of the pairs whose fine-grained centers are nearest to the metadata of tasks that are known
    before training (MoDE section 5.5, retrieval-enhanced).

        clip-moe select runs/selected --fine runs/fine --captions runs/sentences --metadata 'a red circle'
    """

    kind: ClassVar[str] = "select"
    has_rows_of_pairs: ClassVar[bool] = True
    main_process_only: ClassVar[bool] = True

    # A cluster_fine stage.
    fine: Annotated[str, Reads("cluster_fine")]
    # An embed_captions stage of its encoder.
    captions: Annotated[str, Reads("embed_captions")]
    # Class names, queries or captions.
    metadata: list[str] = Field(min_length=1)

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        import numpy as np
        import torch

        from clip_moe.evaluation.sentence_encoders import encode_metadata, load_encoder
        from clip_moe.training.caption_clusters import ENCODER, save_experts
        from clip_moe.training.clusters import load_centers, nearest_centers

        encoder = load_encoder(Path(inputs.captions) / ENCODER)
        centers = load_centers(Path(inputs.fine), encoder.name)
        if encoder.modality != "text":
            raise ValueError(f"metadata are texts, but {self.captions} embedded images")
        nearest = np.unique(nearest_centers(encode_metadata(encoder, self.metadata), torch.as_tensor(centers)))
        expert_of_center = np.where(np.isin(np.arange(len(centers)), nearest), 0, -1)
        center = centers[nearest].mean(axis=0, keepdims=True)
        save_experts(self.name, Path(inputs.fine), context, directory, (centers, expert_of_center, center))
