"""The stage of Long-CLIP (arXiv:2403.15378), with which CLIP-MoE is compared."""

from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from clip_moe.engine.context import Context
from clip_moe.engine.settings import STRICT
from clip_moe.training.stages.train import TrainStage

if TYPE_CHECKING:
    import torch

    from clip_moe.data.sources import Rows
    from clip_moe.training.losses import Pairing


@dataclass(config=STRICT, kw_only=True)
class TrainLongCLIPStage(TrainStage):
    """Long-CLIP's fine-tuning: images with their long captions, and the primary components of the images' features with
    the short captions. The data have these two captions, as a captions stage with `full` and `first_sentence` makes
    them.

        clip-moe train-long-clip runs/long_tuned --model runs/long --data.source runs/captions --global_batch_size \\
            8 --max_steps 2 --learning_rate 1e-4 --num_components 4
    """

    kind: ClassVar[str] = "train_long_clip"

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

    def choose_pairs(self, rows: "Rows", inputs: SimpleNamespace, context: Context) -> "Rows":
        """All pairs. Each must have both captions."""
        from clip_moe.data.texts import present_captions

        for index, captions in enumerate(rows["caption"]):
            if isinstance(captions, str) or len(captions) != 2 or len(present_captions(captions)) != 2:
                raise ValueError(f"image {index} of {self.data.source} has no long and short caption: {captions!r:.80}")
        return rows

    def contrastive_loss(
        self,
        image_embeds: "torch.Tensor",
        text_embeds: "torch.Tensor",
        logit_scale: "torch.Tensor",
        pairing: "Pairing",
        logit_bias: "torch.Tensor | None" = None,
    ) -> "torch.Tensor":
        """See `TrainStage.contrastive_loss`; `text_embeds` are (2 * B, D), a long and a short one of each image."""
        from clip_moe.training.losses import Pairing, contrastive_loss, gather, gathered_rows
        from clip_moe.training.primary_components import primary_components

        primary = primary_components(gather(image_embeds), self.num_components)[gathered_rows(image_embeds)]
        long, short = text_embeds.unflatten(0, (-1, 2)).unbind(dim=1)
        bias = None if self.loss == "softmax" else logit_bias
        settings = logit_scale, self.loss_chunk_size, self.label_smoothing, bias
        keys = (None, None) if pairing.text_keys is None else pairing.text_keys.unflatten(0, (-1, 2)).unbind(dim=1)
        long_pairing, short_pairing = (
            Pairing(image_keys=pairing.image_keys, text_keys=text_keys) for text_keys in keys
        )
        losses = [contrastive_loss(image_embeds, long, *settings, pairing=long_pairing)]
        losses.append(contrastive_loss(primary, short, *settings, pairing=short_pairing))
        return sum(weight * loss for weight, loss in zip(self.caption_weights, losses, strict=True))
