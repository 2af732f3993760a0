"""More experts from fewer: a sparse CLIP whose experts are copied (Expert Upcycling, arXiv:2604.19835).

- {name: more, stage: lab.methods.more_experts:MoreExpertsStage, model: trained, num_experts: 16}
"""

import copy

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from transformers import PreTrainedModel

from clip_moe.conversion.checkpoints import load_sparse
from clip_moe.conversion.model_stage import ModelStage
from clip_moe.conversion.upcycle import check_memory, experts_of_ffn, sparse_blocks, sparse_ffns
from clip_moe.engine.settings import STRICT
from clip_moe.engine.stage import Model


@dataclass(config=STRICT, kw_only=True)
class MoreExpertsStage(ModelStage):
    """More experts from fewer: experts are copied in turn, and the router has a row for each copy. As many compute each
    token as before, so that a use costs the same.
    """

    # A sparse CLIP: an earlier stage, a folder or a hub name.
    model: Model
    # Experts of each sparse layer, more than it has.
    num_experts: int = Field(gt=1)
    # Noise of the router's rows of copies, relative to the deviation of the router.
    noise: float = Field(default=0.01, gt=0)

    def run(self, inputs, context, directory):
        model = add_experts(load_sparse(inputs.model), self.num_experts, self.noise, context.seed)
        self.save(model, inputs.model, directory)


@torch.no_grad()
def add_experts(sparse: PreTrainedModel, number: int, noise: float = 0.01, seed: int = 0) -> PreTrainedModel:
    """A sparse model with `number` experts in each sparse layer, at as many experts a token.

    At the start most tokens meet an expert together with its copy.

    Args:
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
        chosen = torch.arange(number) % block.num_experts
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
