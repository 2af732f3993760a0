"""
The dispatch of a sparse layer: which rows its experts compute, in which order, and the way back.

A layer has T * K choices: K experts for each of T tokens. One stable sort by expert id yields everything that computing
them takes:

    order   which choice a row is. The rows of expert 0 come first, then those of expert 1, and so on, and at the end
            those that no expert computes. So an expert's rows lie together, which a grouped product wants.
    place   of a row in the queue of its expert. Choices are sorted first choices first, and in the order of their
            tokens, as the queues of CLIP-UP and V-MoE are. So a capacity keeps the rows whose place is below it.
    rank    the way back: which row a choice is, the inverse of the order.

    choices (K, T)     0 1 0 0 | 1 0 2 1         tokens 0 to 3, first choices | second choices
    order              0 2 3 5 | 1 4 7 | 6       numbers of choices, k * T + t
    place              0 1 2 3 | 0 1 2 | 0       with a capacity of 3, choice 5 is dropped
    rank               0 4 1 2 | 5 3 7 6

No size depends on the data. So nothing waits for a GPU, and what is compiled or exported is the same. Counting places
by `cumsum` over a one-hot of the choices took 23.6 ms on an H200 where the sort takes 0.29 ms, and 46 % of a training
step of CLIP-UP L/14.
"""

from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor


class Dispatch(NamedTuple):
    """
    The rows of a layer in the order of its experts.

    Args:
        order: (K * T,), the choice of each row, whose number is k * T + t. Those of no expert are at the end.
        counts: (E,), the rows of each expert.
    """

    order: Tensor
    counts: Tensor

    def rank(self) -> Tensor:
        """(K * T,), the row of each choice."""
        return _put(torch.arange(self.order.shape[0], device=self.order.device), self.order)


def dispatch(expert_ids: Tensor, num_experts: int) -> Dispatch:
    """The rows of all choices (T, K): the experts of each token, best first; E, the number of experts, stands for
    none."""
    order, _, counts = _sort(expert_ids, num_experts)
    return Dispatch(order, counts[:num_experts, 0])


def dispatch_within_capacity(
    expert_ids: Tensor, num_experts: int, capacity_factor: tuple[int, int], num_groups: int = 1
) -> tuple[Dispatch, Tensor]:
    """
    The rows of the choices that find room at their expert. Of a group with N tokens that are not padding, an expert
    takes ceil(N * C / E): the first choices of all tokens in token order, then the second choices, and so on (CLIP-UP,
    "first-come-first-serve"; the order is V-MoE's).

    Args:
        expert_ids: (T, K), the experts of each token, best first; E for padding, which takes no room.
        num_experts: E.
        capacity_factor: C, as of `as_fraction`. With K choices a token and perfect balance, C = K drops nothing.
        num_groups: how many groups of consecutive tokens, each of the same length, have a capacity of their own.

    Returns:
        The rows, and which choices they are: (T, K) of bool, False for a choice that is dropped and for padding.
    """
    num_tokens, top_k = expert_ids.shape
    order, queue, counts = _sort(expert_ids, num_experts, num_groups)
    tokens = (expert_ids[:, 0] < num_experts).view(num_groups, -1).sum(dim=-1)
    numerator, denominator = capacity_factor
    divisor = denominator * num_experts
    capacity = tokens * numerator + divisor - 1  # rounded up, which ONNX does not of < 0
    # (groups,). Without a remainder, since OpenVINO rounds a quotient of integers to the nearest one
    capacity = (capacity - capacity % divisor) // divisor
    capacity = torch.cat([capacity.expand(num_experts, -1), torch.zeros_like(capacity)[None]])  # (E + 1, groups)

    rows = torch.arange(order.shape[0], device=order.device)
    place = rows - _starts(counts)[queue]
    kept = place < capacity.flatten()[queue]
    # Rows that stay move up, and the others go behind them
    counts = torch.minimum(counts, capacity)
    new_rows = torch.where(kept, _starts(counts)[queue] + place, 0)
    left_out = (~kept).long().cumsum(dim=0) - 1 + counts.sum()
    new_rows = torch.where(kept, new_rows, left_out)
    moved = Dispatch(_put(order, new_rows), counts[:num_experts].sum(dim=1))
    return moved, _put(kept, order).view(top_k, num_tokens).T


def as_fraction(capacity_factor: float) -> tuple[int, int]:
    """Numerator and denominator. A compiled function takes other ints as they come, but cannot read another float."""
    factor = Fraction(str(capacity_factor)).limit_denominator(10**6)  # of 4 / 3, products of more digits overflow
    return factor.numerator, factor.denominator


def _sort(expert_ids: Tensor, num_experts: int, num_groups: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Order, the queue of each row and the counts (E + 1, groups) of the queues. An expert has one for each group, with
    the number expert * groups + group."""
    groups = torch.arange(num_groups, device=expert_ids.device).repeat_interleave(expert_ids.shape[0] // num_groups)
    queue = (expert_ids.T * num_groups + groups).flatten()
    counts = queue.new_zeros((num_experts + 1) * num_groups).scatter_add(0, queue, torch.ones_like(queue))
    # The fewer digits, the less time. An exported program may become ONNX, whose runtime sorts no bytes
    is_small = counts.shape[0] <= 256 and not torch.compiler.is_exporting()
    keys = queue.to(torch.uint8 if is_small else torch.int32)
    if torch.onnx.is_in_onnx_export():  # whose older exporter knows no stable sort
        order = (queue * queue.shape[0] + torch.arange(queue.shape[0], device=queue.device)).argsort()
        queue = queue[order]
    else:
        queue, order = keys.sort(stable=True)
    # An index of bytes would be read as a mask
    return order, queue.int(), counts.view(num_experts + 1, num_groups)


def _starts(counts: Tensor) -> Tensor:
    """The first row of each queue."""
    counts = counts.flatten()
    return counts.cumsum(dim=0) - counts


def _put(values: Tensor, places: Tensor) -> Tensor:
    """Scatter values to a permutation of places."""
    return torch.empty_like(values).scatter(0, places, values)
