"""The stage that makes one mixture of data experts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from clip_moe.conversion.model_stage import ModelStage
from clip_moe.engine.context import Context
from clip_moe.engine.settings import STRICT, Reads, refuse
from clip_moe.engine.stage import Model


@dataclass(config=STRICT, kw_only=True)
class AssembleStage(ModelStage):
    """Data experts as one CLIPMoDEModel: `clip_moe.conversion.assemble`.

    For example:

        clip-moe assemble runs/mode --experts training/symbol_clip runs/tuned
    """

    kind: ClassVar[str] = "assemble"

    # Earlier stages, folders or hub names, in the order of the clusters 0, 1, ... With fewer experts than clusters,
    # others can be added to the model later.
    experts: list[Model] = Field(min_length=1)
    # A cluster stage with fine-grained centers. None: all experts have the same weight.
    clusters: Annotated[str, Reads("cluster")] | None = None
    # An embed stage of captions or images by the encoder that made the centers.
    captions: Annotated[str, Reads("embed")] | None = None
    # Centers to compare a task's metadata with: the fine-grained ones, or one coarse center per expert, as a baseline
    # (MoDE section 5.2).
    centers: Literal["fine", "coarse"] = "fine"
    # lambda in MoDE eq. 5.
    routing_temperature: float = Field(default=0.2, gt=0)
    # Routing of a task: the paper's printed equations, or the authors' code; see `routing_weights`. The evaluate stage
    # can also measure a mixture with the other one.
    routing: Literal["paper", "released"] = "released"
    # How a linear probe combines the experts' embeddings: concatenated, or summed (MoDE appendix D).
    feature_ensemble: Literal["concatenate", "sum"] = "concatenate"

    @model_validator(mode="after")
    def _check(self):
        changed = self.changed("centers", "routing_temperature", "routing")
        refuse(
            (
                (self.clusters is None) != (self.captions is None),
                "set both clusters and captions, or neither: the metadata's encoder is kept with the captions",
            ),
            (
                self.clusters is None and changed,
                f"{', '.join(changed)}: only for mixtures that route by clusters; set clusters and captions",
            ),
        )
        return self

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        import numpy as np
        import torch

        from clip_moe.conversion import assemble
        from clip_moe.evaluation.sentence_encoders import load_encoder
        from clip_moe.training.clusters import load_clusters
        from clip_moe.training.pair_features import ENCODER

        experts = inputs.experts
        config: dict[str, Any] = {"feature_ensemble": self.feature_ensemble}
        if self.clusters is None:
            assemble.convert(experts, directory, **config)
            return
        clusters, metadata = load_clusters(Path(inputs.clusters))
        folder = Path(inputs.captions) / ENCODER
        encoder = load_encoder(folder)
        number, known = len(experts), len(clusters.centers)
        made_by = metadata.get("encoder")
        refuse(
            (
                clusters.fine_centers is None,
                f"{self.name}.clusters: {self.clusters} has no fine-grained centers: set its num_centers",
            ),
            (number > known, f"{self.name}.experts: {number} experts, but {self.clusters} has {known} clusters"),
            (
                encoder.name != made_by,
                f"{self.captions} was embedded by {encoder.name}, but {self.clusters} by {made_by}",
            ),
        )
        if self.centers == "coarse":
            centers, expert_of_center = clusters.centers[:number], np.arange(number)
        else:
            ours = (clusters.cluster_of_center >= 0) & (clusters.cluster_of_center < number)
            centers, expert_of_center = clusters.fine_centers[ours], clusters.cluster_of_center[ours]
        config |= {"centers": torch.as_tensor(centers), "expert_of_center": torch.as_tensor(expert_of_center)}
        config |= {"routing_temperature": self.routing_temperature, "routing": self.routing}
        config |= {"metadata_modality": encoder.modality, "nearest_center_only": encoder.modality == "text"}
        assemble.convert(experts, directory, folder, metadata_encoder=encoder.name, **config)
