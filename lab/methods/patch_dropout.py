"""Patch dropout (FLIP, arXiv:2212.00794, section 3): a stage that trains on a part of each image's patches.

- {name: half, stage: lab.methods.patch_dropout:PatchDropoutStage, model: sparse, patch_dropout: 0.5}

A short `train` stage on whole images follows it.
"""

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import nn
from transformers import PreTrainedModel

from clip_moe.engine.settings import STRICT
from clip_moe.training.stages.train import TrainStage
from modeling_clip_moe.families import family_of


@dataclass(config=STRICT, kw_only=True)
class PatchDropoutStage(TrainStage):
    """A `train` stage each of whose steps leaves patches out."""

    # The share of an image's patches that a step leaves out.
    patch_dropout: float = Field(gt=0, lt=1)

    def problems(self, model, batch_size):
        yield from super().problems(model, batch_size)
        if family_of(model.config).naflex:
            yield "patch_dropout: it goes with images of one size, but this model takes any shape"
            return
        vision = model.config.vision_config
        if hasattr(vision, "rope_theta"):
            yield "patch_dropout: this model rotates patches by their places, which have to be all there"
        patches = (vision.image_size // vision.patch_size) ** 2
        if round(patches * self.patch_dropout) == patches:
            yield f"patch_dropout: it leaves none of {patches} patches: take at most {(patches - 1) / patches:.3f}"

    def task(self, model, inputs):
        drop_patches(model, self.patch_dropout)
        return super().task(model, inputs)


def drop_patches(model: PreTrainedModel, share: float) -> None:
    """While it trains, a share of each image's patches is left out before the first layer, each time others. A class
    token stays."""

    def keep_some(embeddings: nn.Module, inputs: tuple, hidden_states: torch.Tensor) -> torch.Tensor:
        if not embeddings.training:
            return hidden_states
        first = int(hasattr(embeddings, "class_embedding"))
        others, patches = hidden_states[:, :first], hidden_states[:, first:]
        number = patches.shape[1] - round(patches.shape[1] * share)
        chosen = torch.rand(patches.shape[:2], device=patches.device).topk(number, dim=1).indices  # (B, number)
        return torch.cat([others, patches.gather(1, chosen[..., None].expand(-1, -1, patches.shape[2]))], dim=1)

    model.vision_model.embeddings.register_forward_hook(keep_some)
