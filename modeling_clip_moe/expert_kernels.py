"""
Kernels of the experts: grouped products on sorted rows, and functions that are fused on a GPU.

The axes of tensors are named in `sparse_moe`; N, the rows of a layer, is T * K.
"""

from collections.abc import Callable
from functools import cache, wraps

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.utils import logging

from .dispatch import Dispatch
from .torch_internals import (
    FakeTensor,
    _get_current_dispatch_mode_stack,
    _len_torch_dispatch_stack_pre_dispatch,
    mark_static,
    peek_interpreter_stack,
    set_recompile_limit,
)
from .transformers_internals import _grouped_linear

logger = logging.get_logger(__name__)

# How often a function may be compiled anew, for other widths, lengths and frozen weights
RECOMPILE_LIMIT = 64


@cache
def compiled(function: Callable) -> Callable:
    """A function under `torch.compile`, whose compiler takes seconds to import: only where something is compiled."""
    set_recompile_limit(RECOMPILE_LIMIT)
    return torch.compile(function)


@cache
def _can_fuse() -> bool:
    """Whether functions can be compiled for the GPU: by trying, since it takes Triton, a C compiler, the headers of
    Python and a folder to write to."""
    try:
        compiled(torch.square)(torch.ones(1, device="cuda"))
    except Exception as error:  # of Triton, of the C compiler, of the file system: there is no class that they share
        logger.warning(f"Experts run slower on this GPU, since kernels cannot be compiled for it: {error}")
        return False
    return True


def fused(function: Callable) -> Callable:
    """On a GPU, few kernels in place of many that each read and write all rows."""

    @wraps(function)
    def run(*arguments):
        is_fused = _is_fused(arguments[0])
        for tensor in arguments if is_fused else ():
            # The towers' widths differ. As variables they would make the kernels up to four times slower
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.ndim > 1:
                mark_static(tensor, tensor.ndim - 1)
        return (compiled(function) if is_fused else function)(*arguments)

    return run


def _is_fused(tensor: Tensor) -> bool:
    is_eager = not torch.compiler.is_compiling() and not _get_current_dispatch_mode_stack()
    return tensor.is_cuda and is_eager and not is_recorded(tensor) and _can_fuse()


def activate(rows: Tensor, act_fn: Callable, is_gated: bool) -> Tensor:
    """(N, I), of the first product (N, I), or (N, 2 I) where its second half is gated by the first (GLU variants,
    arXiv:2002.05202)."""
    if not is_gated:
        return act_fn(rows)
    gate, up = rows.chunk(2, dim=-1)
    return act_fn(gate) * up


def _with_bias(rows: Tensor, bias: Tensor | None, expert_ids: Tensor) -> Tensor:
    """The bias of each row's expert is added in float32, as a linear layer adds it."""
    return rows.float() if bias is None else rows.float() + bias[expert_ids].float()


@fused
def _activate(rows: Tensor, bias: Tensor | None, expert_ids: Tensor, act_fn: Callable, is_gated: bool) -> Tensor:
    """(N, I), of the first product and its bias."""
    return activate(_with_bias(rows, bias, expert_ids), act_fn, is_gated).to(rows.dtype)


@fused
def _activate_backward(
    rows: Tensor,
    bias: Tensor | None,
    expert_ids: Tensor,
    act_fn: Callable,
    is_gated: bool,
    is_computed: Tensor,
    gradient: Tensor,
) -> tuple[Tensor, Tensor]:
    """The output of `_activate`, computed again, and the gradient of its rows."""
    activated, pull = torch.func.vjp(
        lambda inputs: activate(inputs, act_fn, is_gated), _with_bias(rows, bias, expert_ids)
    )
    return activated.to(rows.dtype), torch.where(is_computed, pull(gradient.float())[0], 0).to(rows.dtype)


@fused
def _combine(rows: Tensor, bias: Tensor | None, expert_ids: Tensor, rank: Tensor, weights: Tensor) -> Tensor:
    """(T, D), the weighted sum over the K experts of each token. A row of weight 0 may hold anything."""
    choices = weights.T  # (K, T)
    values = _with_bias(rows, bias, expert_ids)[rank].unflatten(0, choices.shape) * choices[..., None]
    return values.masked_fill(choices[..., None] == 0, 0).sum(dim=0).to(rows.dtype)


@fused
def _gather_backward(rows: Tensor, rank: Tensor, is_computed: Tensor, top_k: int) -> Tensor:
    """(T, D), the sum over the K rows of each token."""
    return torch.where(is_computed, rows, 0)[rank].unflatten(0, (top_k, -1)).sum(dim=0)


@fused
def _combine_backward(
    rows: Tensor,
    bias: Tensor | None,
    expert_ids: Tensor,
    order: Tensor,
    weights: Tensor,
    is_computed: Tensor,
    gradient: Tensor,
) -> tuple[Tensor, Tensor]:
    """The gradients of the rows (N, D), and of each row's weight (N,)."""
    rows_gradient = torch.where(is_computed, gradient[order % weights.shape[0]].to(weights.dtype), 0)
    outputs = _with_bias(rows, bias, expert_ids)
    weights_gradient = torch.where(is_computed, rows_gradient * outputs, 0).sum(dim=-1)
    return (rows_gradient * weights.T.flatten()[order][:, None]).to(rows.dtype), weights_gradient


class GroupedFFNs(torch.autograd.Function):
    """
    The FFNs of all experts on sorted rows, with few passes over them. It keeps the two products, but neither the rows
    nor their activations, which it computes again. The gradient of a gather is a gather and a sum over K, never an
    addition at an index, which is slow on a GPU.
    """

    @staticmethod
    def forward(ctx, hidden_states, weights, up_proj, up_bias, down_proj, down_bias, rows, act_fn, is_gated):
        (order, counts), rank = rows, rows.rank()
        ends = counts.cumsum(dim=0, dtype=torch.int32)
        numbers = torch.arange(order.shape[0], device=order.device, dtype=torch.int32)
        expert_ids = torch.searchsorted(ends, numbers, right=True).clamp(max=counts.shape[0] - 1)

        up = F.grouped_mm(hidden_states[order % weights.shape[0]], up_proj.transpose(-2, -1), offs=ends)
        activated = _activate(up, up_bias, expert_ids, act_fn, is_gated)
        down = F.grouped_mm(activated, down_proj.transpose(-2, -1), offs=ends)
        ctx.save_for_backward(
            hidden_states, weights, up_proj, up_bias, down_proj, down_bias, up, down, order, rank, ends, expert_ids
        )
        ctx.act_fn, ctx.is_gated = act_fn, is_gated
        return _combine(down, down_bias, expert_ids, rank, weights)

    @staticmethod
    def backward(ctx, gradient):
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # for a gradient of the gradient
            *inputs, _, _, order, _, ends, _ = ctx.saved_tensors
            # Aliases: between the inputs themselves, a gradient would also flow from one to another computed from it
            inputs = [None if tensor is None else tensor.view_as(tensor) for tensor in inputs]
            rows = Dispatch(order, ends.diff(prepend=ends.new_zeros(1)))
            outputs = grouped_ffns(*inputs, rows, ctx.act_fn, ctx.is_gated).to(gradient.dtype)
            needed = [i for i in range(len(inputs)) if ctx.needs_input_grad[i]]
            gradients = torch.autograd.grad(outputs, [inputs[i] for i in needed], gradient, create_graph=True)
            gradients = dict(zip(needed, gradients, strict=True))
            return *(gradients.get(i) for i in range(len(inputs))), None, None, None
        hidden_states, weights, up_proj, up_bias, down_proj, down_bias, up, down, order, rank, ends, expert_ids = (
            ctx.saved_tensors
        )
        # Products leave the rows of no expert, at the end, as they were in memory
        is_computed = (torch.arange(order.shape[0], device=order.device) < ends[-1])[:, None]
        # As many experts as a multiple of 8, for which a product is faster. Those beyond E have no row
        experts = torch.arange(-(-ends.shape[0] // 8) * 8, device=order.device)
        chosen = ((expert_ids[:, None] == experts) & is_computed).T.to(up.dtype)  # (E rounded up, N)

        down_gradient, weights_gradient = _combine_backward(
            down, down_bias, expert_ids, order, weights, is_computed, gradient
        )
        needed, gradients = ctx.needs_input_grad, [None] * 9
        if any(needed[i] for i in (0, 2, 3, 4)):
            activated_gradient = F.grouped_mm(down_gradient, down_proj, offs=ends)
            activated, up_gradient = _activate_backward(
                up, up_bias, expert_ids, ctx.act_fn, ctx.is_gated, is_computed, activated_gradient
            )
        if needed[0]:
            rows_gradient = F.grouped_mm(up_gradient, up_proj, offs=ends)
            gradients[0] = _gather_backward(rows_gradient, rank, is_computed, weights.shape[1])
        gradients[1] = weights_gradient[rank].view(weights.T.shape).T
        if needed[2]:
            gradients[2] = F.grouped_mm(up_gradient.T, hidden_states[order % weights.shape[0]], offs=ends)
        if needed[3]:
            # A product adds in float32, and on a GPU not one row after another
            gradients[3] = (chosen @ up_gradient)[: ends.shape[0]]
        if needed[4]:
            gradients[4] = F.grouped_mm(down_gradient.T, activated, offs=ends)
        if needed[5]:
            gradients[5] = (chosen @ down_gradient)[: ends.shape[0]]
        return tuple(gradients)


def grouped_ffns(hidden_states, weights, up_proj, up_bias, down_proj, down_bias, rows, act_fn, is_gated) -> Tensor:
    """As `GroupedFFNs`, of operations that any compiled or exported program may have."""
    (order, counts), rank = rows, rows.rank()
    ends = counts.cumsum(dim=0, dtype=torch.int32)
    numbers = torch.arange(order.shape[0], device=order.device)
    is_computed = (numbers < ends[-1])[:, None]
    if torch.compiler.is_exporting():
        # It may become ONNX, whose product leaves no row out: the last expert computes those of no expert
        ends = torch.cat([ends[:-1], torch.full_like(ends[-1:], order.shape[0])])
    expert_ids = (numbers[:, None] >= ends[:-1]).sum(dim=-1)
    chosen = (expert_ids[:, None] == torch.arange(ends.shape[0], device=order.device)).to(up_proj.dtype)

    def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        outputs = _grouped_linear(rows, weight, ends)
        # The biases by a product, too, whose gradient adds rows in float32
        outputs = outputs if bias is None else torch.addmm(outputs, chosen, bias)
        return torch.where(is_computed, outputs, 0)

    # The gradient of rows that no product computes may be anything, too
    # Not by a remainder, which the exporter to ONNX does not take of a size that it does not know
    token_ids = torch.arange(weights.shape[0], device=order.device).repeat(weights.shape[1])[order]
    inputs = torch.where(is_computed, hidden_states[token_ids], 0)
    outputs = linear(activate(linear(inputs, up_proj, up_bias), act_fn, is_gated), down_proj, down_bias)
    return (outputs[rank].unflatten(0, weights.T.shape) * weights.T[..., None]).sum(dim=0)


def is_recorded(hidden_states: Tensor) -> bool:
    """Whether a tool records, transforms or only shapes this run, to repeat it with other data: `torch.jit.trace`,
    `make_fx`, `torch.onnx`, `torch.func.vmap`, tensors without data."""
    return (
        torch.jit.is_tracing()
        or torch.onnx.is_in_onnx_export()
        or peek_interpreter_stack() is not None
        or has_no_data(hidden_states)
        # Modes that make a program: proxies, functional or fake tensors
        or any(getattr(mode, "_mode_key", None) is not None for mode in _get_current_dispatch_mode_stack())
        or _len_torch_dispatch_stack_pre_dispatch() > 0
    )


def has_no_data(tensor: Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)
