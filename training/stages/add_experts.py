"""The stage that gives a sparse model more experts."""

import typing
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from clip_moe.engine.context import Context
from clip_moe.engine.settings import STRICT
from clip_moe.engine.stage import Model, NumberedData, Stage

if typing.TYPE_CHECKING:
    from clip_moe.conversion.more_experts import Importance


@dataclass(config=STRICT, kw_only=True)
class AddExpertsStage(Stage):
    """More experts from fewer (Expert Upcycling, https://arxiv.org/abs/2604.19835): experts are copied, and the router
    has a row for each copy. As many compute each token as before, so that a use costs the same.

        clip-moe add-experts runs/more --model runs/clip_moe --num_experts 16
    """

    kind: ClassVar[str] = "add_experts"
    makes_model: ClassVar[bool] = True
    main_process_only: ClassVar[bool] = True

    # A sparse CLIP: an earlier stage, a folder or a hub name.
    model: Model
    # Experts of each sparse layer, more than it has.
    num_experts: int = Field(gt=1)
    # Pairs that tell which experts are copied: those with the largest squared gradient of the contrastive loss, over
    # how often they are there already. None: all alike.
    data: NumberedData | None = None
    # Pairs of a batch of that loss.
    batch_size: int = Field(default=64, gt=1)
    # Noise of the router's rows of copies, relative to the deviation of the router.
    noise: float = Field(default=0.01, gt=0)

    def run(self, inputs: SimpleNamespace, context: Context, directory: Path) -> None:
        from clip_moe.conversion.more_experts import convert

        importance = None if self.data is None else self._importance(inputs, context)
        convert(inputs.model, directory, self.num_experts, importance, self.noise, context.seed)

    def _importance(self, inputs: SimpleNamespace, context: Context) -> "Importance":
        """Name of a sparse block -> (E,), the squared norm of the gradients of each expert, summed over the batches."""
        import torch
        from accelerate.utils import send_to_device

        from clip_moe.conversion.checkpoints import load_sparse
        from clip_moe.conversion.processors import load_processor
        from clip_moe.conversion.upcycle import sparse_blocks
        from clip_moe.training.loader import PairLoader
        from clip_moe.training.losses import Pairing, contrastive_loss

        device, rows = context.accelerator.device, context.pairs(inputs.data).shuffle(seed=context.seed)
        model = load_sparse(inputs.model, torch.float32).to(device)
        if len(rows) < self.batch_size:
            raise ValueError(
                f"{self.name}.batch_size: {self.batch_size} of {len(rows)} pairs: take fewer, or more data"
            )
        processor = load_processor(inputs.model)
        # Comparing the images of shards would read them all
        duplicates = context.duplicates(
            rows.remove_columns("image") if self.data.indexed else rows, processor.tokenizer
        )
        loader = PairLoader(rows, processor, self.data, self.batch_size, with_keys=True, image_keys=duplicates.images)
        batches, importance = loader.in_order(), {}
        for number in range(len(rows) // self.batch_size):
            batch = send_to_device(batches[number], device)
            pairing, outputs = Pairing.take(batch), model(**batch)
            embeds = outputs.image_embeds, outputs.text_embeds, model.logit_scale.exp()
            model.zero_grad()
            contrastive_loss(*embeds, logit_bias=getattr(model, "logit_bias", None), pairing=pairing).backward()
            for name, block in sparse_blocks(model).items():
                squares = sum(p.grad.flatten(1).square().sum(dim=1).cpu() for p in block.experts.parameters())
                importance[name] = importance.get(name, 0) + squares
        if not all(0 < of_block.sum() < torch.inf for of_block in importance.values()):
            raise ValueError(
                f"{self.name}.data: the loss of its batches has no gradient, or none that is finite: take pairs with "
                "different texts and images, or no data"
            )
        return importance
