"""MoDE configuration: which data experts there are, and how a task is routed to them."""

import math
from dataclasses import field
from typing import Literal

from huggingface_hub.dataclasses import strict

from .configuration_clip_moe import PublishedConfig


@strict
class CLIPMoDEConfig(PublishedConfig):
    """
    Whole CLIPs, each an expert for a part of the training data, and how a task chooses among them (MoDE).

    Args:
        experts (`list[str]`): the folders of the experts in the repository. Each holds a whole model, dense or sparse,
            with a configuration of its own.
        own_processors (`bool`): whether every expert's folder has a processor of its own, since the experts read texts
            or images differently, as CLIPs and SigLIPs do, or CLIPs of several resolutions.
        projection_dim (`int`, *optional*): size of the embeddings of every expert. None: experts have several sizes.
        metadata_encoder (`str`, *optional*): name of the sentence encoder that the fine-grained cluster centers were
            made with, and that has to embed a task's metadata. None: there are no centers.
        metadata_dim (`int`, *optional*): size of its embeddings.
        metadata_modality (`str`): `"text"`, or `"image"` where the centers are of images (MoDE section 5.3): then every
            test image is its own metadata.
        num_centers (`int`): fine-grained cluster centers, m. 0: all experts have the same weight, whatever the task.
        routing (`str`): `"paper"`, the printed equations (MoDE section 3.3), or `"released"`, the authors' code; see
            `routing_weights`.
        routing_temperature (`float`): lambda of MoDE eq. 5.
        nearest_center_only (`bool`): whether of the centers only the nearest one to each piece of metadata counts
            (MoDE appendix E), or all do, as equation 6 has it.
        feature_ensemble (`str`): how the embeddings of all experts make one, as a linear probe takes it:
            `"concatenate"`, one after the other (MoDE section 5.4), or `"sum"`, element by element (appendix D).
    """

    model_type = "clip_mode"
    is_whole = True

    experts: list[str] = field(default_factory=list)
    own_processors: bool = False
    projection_dim: int | None = 512
    metadata_encoder: str | None = None
    metadata_dim: int | None = None
    metadata_modality: Literal["text", "image"] = "text"
    num_centers: int = 0
    routing: Literal["paper", "released"] = "released"
    routing_temperature: float | int = 0.2
    nearest_center_only: bool = True
    feature_ensemble: Literal["concatenate", "sum"] = "concatenate"

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        self.validate_routing()  # here as a plain ValueError; `@strict` repeats it on saving and wraps it

    def validate_routing(self):
        """Part of `@strict`-powered validation."""
        experts = self.experts
        are_folders = len({*experts}) == len(experts) and all(name and not set(name) & set("./\\") for name in experts)
        limits = {
            "routing_temperature": (0 < self.routing_temperature < math.inf, "above 0 and finite"),
            "feature_ensemble": (
                self.feature_ensemble != "sum" or self.projection_dim is not None,
                '"concatenate" for experts of several sizes: a sum needs embeddings of one size',
            ),
            # torch takes no dots in names
            "experts": (are_folders, "different names of folders in the repository, without dots"),
        }
        for name, (is_within, limit) in limits.items():
            if not is_within:
                raise ValueError(f"{name} must be {limit}, got {getattr(self, name)}.")
