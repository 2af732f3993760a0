"""More experts from fewer: a sparse CLIP whose experts are copied (Expert Upcycling, arXiv:2604.19835).

- {name: more, stage: lab.methods.more_experts:MoreExpertsStage, model: trained, num_experts: 16}
"""

import copy
from collections.abc import Mapping
from types import SimpleNamespace

import torch
from accelerate.utils import send_to_device
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor
from transformers import PreTrainedModel

from clip_moe.conversion.checkpoints import load_sparse
from clip_moe.conversion.model_stage import ModelStage
from clip_moe.conversion.processors import load_processor
from clip_moe.conversion.upcycle import check_memory, experts_of_ffn, sparse_blocks, sparse_ffns
from clip_moe.data.arguments import NumberedData
from clip_moe.data.pairs import shared_pairs
from clip_moe.engine.context import Context
from clip_moe.engine.settings import STRICT
from clip_moe.engine.stage import Model
from clip_moe.training.duplicates import shared_duplicates
from clip_moe.training.loader import PairLoader
from clip_moe.training.losses import Pairing, contrastive_loss
from clip_moe.training.samplers import Share

# Name of a sparse block -> (E,), how much each expert matters
Importance = Mapping[str, Tensor]


@dataclass(config=STRICT, kw_only=True)
class MoreExpertsStage(ModelStage):
    """More experts from fewer: experts are copied, and the router has a row for each copy. As many compute each token
    as before, so that a use costs the same.
    """

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

    def run(self, inputs, context, directory):
        importance = None if self.data is None else self._importance(inputs, context)
        model = add_experts(load_sparse(inputs.model), self.num_experts, importance, self.noise, context.seed)
        self.save(model, inputs.model, directory)

    def _importance(self, inputs: SimpleNamespace, context: Context) -> Importance:
        """Name of a sparse block -> (E,), the squared norm of the gradients of each expert, summed over the batches."""
        device, rows = context.accelerator.device, shared_pairs(context, inputs.data).shuffle(seed=context.seed)
        model = load_sparse(inputs.model, torch.float32).to(device)
        if len(rows) < self.batch_size:
            raise ValueError(
                f"{self.name}.batch_size: {self.batch_size} of {len(rows)} pairs: take fewer, or more data"
            )
        processor = load_processor(inputs.model)
        # Comparing the images of shards would read them all
        duplicates = shared_duplicates(
            context, rows.remove_columns("image") if self.data.indexed else rows, processor.tokenizer
        )
        loader = PairLoader(rows, processor, self.data, Share(self.batch_size), image_keys=duplicates.images)
        batches, importance = loader.in_order(), {}
        for number in range(len(rows) // self.batch_size):
            batch = send_to_device(batches[number], device)
            pairing, outputs = Pairing.take(batch), model(**batch)
            model.zero_grad()
            scale, bias = model.logit_scale.exp(), getattr(model, "logit_bias", None)
            loss = contrastive_loss(outputs.image_embeds, outputs.text_embeds, scale, logit_bias=bias, pairing=pairing)
            loss.backward()
            for name, block in sparse_blocks(model).items():
                squares = sum(p.grad.flatten(1).square().sum(dim=1).cpu() for p in block.experts.parameters())
                importance[name] = importance.get(name, 0) + squares
        if not all(0 < block_importance.sum() < torch.inf for block_importance in importance.values()):
            raise ValueError(
                f"{self.name}.data: the loss of its batches has no gradient, or none that is finite: take pairs with "
                "different texts and images, or no data"
            )
        return importance


def copied(importance: Tensor, number: int) -> list[int]:
    """Which expert each of `number` is a copy of: all (E,) once, then again and again the one with the highest
    importance for each copy that it has; the first of equal ones."""
    chosen, counts = list(range(len(importance))), torch.ones(len(importance))
    while len(chosen) < number:
        chosen.append(int((importance / counts).argmax()))
        counts[chosen[-1]] += 1
    return chosen


@torch.no_grad()
def add_experts(
    sparse: PreTrainedModel, number: int, importance: Importance | None = None, noise: float = 0.01, seed: int = 0
) -> PreTrainedModel:
    """A sparse model with `number` experts in each sparse layer, at as many experts a token.

    At the start most tokens meet an expert together with its copy.

    Args:
        importance: decides who is copied; None: all alike.
        noise: the deviation of what is added to the rows of the router of copies, relative to that of the router. It
            lets copies learn different things.

    Raises:
        ValueError: there are as many already, or several narrow experts make an FFN.
    """
    config = copy.deepcopy(sparse.config)
    for tower in sparse_ffns(config).values():
        if number <= tower.num_experts:
            raise ValueError(f"num_experts: {number} are no more than the {tower.num_experts} that there are")
        if experts_of_ffn(tower) > 1:
            raise ValueError(
                f"moe_intermediate_size {tower.moe_intermediate_size}: several narrow experts make an FFN and "
                "cannot be copied one by one: upcycle with more num_experts"
            )
        tower.num_experts = number
    check_memory(config)
    generator = torch.Generator().manual_seed(seed)
    state = sparse.state_dict()
    shared: dict[int, str] = {}  # of a shared encoder, both towers have the same block
    for name, block in sparse_blocks(sparse).items():
        if (first := shared.setdefault(id(block.router.weight), name)) != name:
            state |= {
                f"{name}{key.removeprefix(first)}": state[key] for key in list(state) if key.startswith(f"{first}.")
            }
            continue
        chosen = copied(torch.ones(block.num_experts) if importance is None else importance[name], number)
        for part, tensor in block.state_dict().items():
            if part.startswith(("experts.", "router.")):
                state[f"{name}.{part}"] = tensor[chosen]
        router = state[f"{name}.router.weight"]
        drawn = torch.randn(router[block.num_experts :].shape, generator=generator).to(router)
        router[block.num_experts :] += drawn * noise * block.router.weight.std()
    config.dtype = torch.float32  # biases of experts would be rounded; `to` leaves them
    with torch.random.fork_rng(devices=[]):
        more = type(sparse)(config)
    more.load_state_dict(state)
    return more.to(sparse.dtype).eval()
