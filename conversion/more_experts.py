"""More experts from fewer: a sparse CLIP whose experts are copied (Expert Upcycling, arXiv:2604.19835)."""

import copy
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from clip_moe.conversion.checkpoints import load_sparse
from clip_moe.conversion.processors import copy_processor
from clip_moe.conversion.upcycle import check_memory, experts_of_ffn, sparse_blocks, sparse_ffns
from clip_moe.engine.files import save

# Name of a sparse block -> (E,), how much each expert matters
Importance = Mapping[str, Tensor]


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
        ValueError: there are as many already, several narrow experts make an FFN, or routers have ReLU.
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
        if tower.scoring_func == "relu":
            raise ValueError(
                "routers with ReLU would choose an expert and all its copies: train them with more from the start"
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


def convert(
    source: str | Path, folder: Path, number: int, importance: Importance | None, noise: float, seed: int
) -> None:
    """Saves a sparse model with more experts, and its processor."""
    save(add_experts(load_sparse(source), number, importance, noise, seed), folder)
    copy_processor(source, folder)
