"""Long-CLIP (arXiv:2403.15378), with which CLIP-MoE is compared: its loss, and the primary components of features,
through which a gradient flows.

- {name: long_clip, stage: lab.methods.long_clip:TrainLongCLIPStage, model: base, data: {source: captions}}
"""

from types import SimpleNamespace
from typing import Annotated

import torch
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from clip_moe.data.columns import Rows
from clip_moe.data.texts import present_captions
from clip_moe.engine.context import Context
from clip_moe.engine.settings import STRICT
from clip_moe.training.losses import Pairing, contrastive_loss, gather, gathered_rows
from clip_moe.training.stages.train import TrainStage


@dataclass(config=STRICT, kw_only=True)
class TrainLongCLIPStage(TrainStage):
    """Long-CLIP's fine-tuning: images with their long captions, and the primary components of the images' features with
    the short captions. The data have these two captions, as a captions stage with `full` and `first_sentence` makes
    them."""

    # The weights of the long and of the short captions' loss, which sum to 1. The authors' code adds the two losses,
    # which is the same to AdamW.
    caption_weights: list[Annotated[float, Field(ge=0)]] = Field(
        default_factory=lambda: [0.5, 0.5], min_length=2, max_length=2
    )
    # How many principal components of a global batch's image features the short captions are compared with.
    num_components: int = Field(default=32, gt=0)

    @model_validator(mode="after")
    def _check_components(self):
        pairs = self.global_batch_size // self.gradient_accumulation_steps
        if self.num_components >= pairs - 1:
            raise ValueError(
                f"num_components {self.num_components} leave nothing out of a batch of {pairs}: at most {pairs - 2} do"
            )
        return self

    def choose_pairs(self, rows: Rows, inputs: SimpleNamespace, context: Context) -> Rows:
        """All pairs. Each must have both captions."""
        for index, captions in enumerate(rows["caption"]):
            if isinstance(captions, str) or len(captions) != 2 or len(present_captions(captions)) != 2:
                raise ValueError(f"image {index} of {self.data.source} has no long and short caption: {captions!r:.80}")
        return rows

    def contrastive_loss(
        self,
        image_embeds: torch.Tensor,
        text_embeds: torch.Tensor,
        logit_scale: torch.Tensor,
        pairing: Pairing,
        logit_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `TrainStage.contrastive_loss`; `text_embeds` are (2 * B, D), a long and a short one of each image."""
        primary = primary_components(gather(image_embeds), self.num_components)[gathered_rows(image_embeds)]
        texts = text_embeds.unflatten(0, (-1, 2)).unbind(dim=1)  # the long ones, the short ones
        keys = (None, None) if pairing.text_keys is None else pairing.text_keys.unflatten(0, (-1, 2)).unbind(dim=1)
        options = {"chunk_size": self.loss_chunk_size, "label_smoothing": self.label_smoothing}
        options["logit_bias"] = None if self.loss == "softmax" else logit_bias
        loss = 0.0
        for place, images in enumerate((image_embeds, primary)):
            place_pairing = Pairing(image_keys=pairing.image_keys, text_keys=keys[place])
            place_loss = contrastive_loss(images, texts[place], logit_scale, **options, pairing=place_pairing)
            loss = loss + self.caption_weights[place] * place_loss
        return loss


class _Projection(torch.autograd.Function):
    """The projection onto the eigenvectors of a symmetric matrix (D, D) with the largest eigenvalues.

    Through `eigh` alone, the gradient divides by differences of eigenvalues that do not count here, and which are often
    nearly 0: those within the chosen ones, and within the others.
    """

    @staticmethod
    def forward(ctx, matrix: torch.Tensor, number: int) -> torch.Tensor:
        values, vectors = torch.linalg.eigh(matrix)  # in ascending order
        ctx.save_for_backward(values, vectors)
        ctx.number = number
        return vectors[:, -number:] @ vectors[:, -number:].T

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        values, vectors = ctx.saved_tensors
        others, chosen = vectors[:, : -ctx.number], vectors[:, -ctx.number :]
        gaps = values[-ctx.number :] - values[: -ctx.number, None]  # (D - number, number)
        change = others @ (others.T @ (gradient + gradient.T) @ chosen / gaps) @ chosen.T
        return (change + change.T) / 2, None


def primary_components(features: torch.Tensor, number: int) -> torch.Tensor:
    """Features reduced to their mean and their largest principal components (Long-CLIP section 3.3).

    The gradient flows through all of it, mean and directions of the components included, as in the authors' code.

    Args:
        features: (B, D), of the batch whose components count.
        number: how many components.

    Returns:
        (B, D), not normalized.
    """
    mean = features.mean(dim=0)
    centered = features - mean
    return centered @ _Projection.apply(centered.T @ centered, number) + mean
