"""
The experts of a sparse layer, and their implementations: a loop, one grouped product for all, and what a tool records.

Axes of the tensors, as used in the comments:
    T  tokens                  K  experts per token     N  rows, T * K
    D  hidden size             E  experts of a layer    I  intermediate size of an expert
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from transformers.activations import ACT2FN
from transformers.utils import logging

from .configuration_clip_moe import CLIPMoETowerConfig
from .dispatch import Dispatch, dispatch
from .transformers_internals import ALL_EXPERTS_FUNCTIONS, _grouped_linear, use_experts_implementation

logger = logging.get_logger(__name__)

# Implementations that take the rows which the router sorted. Those of transformers sort for themselves
TAKE_ROWS = ("eager", "grouped", "by_device")


def _each_expert(stacked: torch.Tensor) -> Sequence[torch.Tensor]:
    """
    A parameter of all experts, expert by expert. Unbinding makes its gradient one stacked tensor, where indexing would
    build one of full size for each expert.
    """
    try:
        return stacked.unbind()
    except NotImplementedError:  # torchao's quantized tensors, which are not trained
        return [stacked[i] for i in range(stacked.shape[0])]


def _each_ffn(experts: nn.Module) -> Iterator[tuple[torch.Tensor, ...]]:
    """Up projection with its bias and down projection with its bias, expert by expert."""
    weights = experts.up_proj, experts.up_proj_bias, experts.down_proj, experts.down_proj_bias
    return zip(*map(_each_expert, weights), strict=True)


@use_experts_implementation(has_gate=False, has_bias=True)
class CLIPMoEExperts(nn.Module):
    """E FFNs like CLIP's, stacked. Computes only what was chosen: expert id E stands for no expert."""

    def __init__(self, config: CLIPMoETowerConfig):
        super().__init__()
        self.num_experts = config.num_experts
        self.up_proj = nn.Parameter(torch.empty(config.num_experts, config.expert_size, config.hidden_size))
        self.up_proj_bias = nn.Parameter(torch.empty(config.num_experts, config.expert_size))
        self.down_proj = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, config.expert_size))
        self.down_proj_bias = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.act_fn = ACT2FN[config.hidden_act]

    def extra_repr(self) -> str:
        num_experts, intermediate_size, hidden_size = self.up_proj.shape
        return f"{num_experts=}, {hidden_size=}, {intermediate_size=}"

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        rows: Dispatch | None = None,
    ) -> torch.Tensor:
        """
        Args:
            hidden_states: (T, D).
            top_k_index, top_k_weights: (T, K), from the router.
            rows: the sorted rows of these ids. None: they are sorted here.

        Returns:
            (T, D), the weighted sum of each token's experts.
        """
        if is_recorded(hidden_states) and not torch.compiler.is_compiling():
            return experts_forward_all(self, hidden_states, top_k_index, top_k_weights)
        order, counts = rows or dispatch(top_k_index, self.num_experts)
        counts = counts.tolist()
        order = order[: sum(counts)]
        token_ids = order % hidden_states.shape[0]

        outputs = []
        inputs = hidden_states.index_select(0, token_ids).split(counts)
        for expert_input, (up_proj, up_proj_bias, down_proj, down_proj_bias) in zip(
            inputs, _each_ffn(self), strict=True
        ):
            intermediate = self.act_fn(F.linear(expert_input, up_proj, up_proj_bias))
            outputs.append(F.linear(intermediate, down_proj, down_proj_bias))
        outputs = torch.cat(outputs) * top_k_weights.T.flatten().index_select(0, order)[:, None]
        combined = torch.zeros_like(hidden_states, dtype=outputs.dtype).index_add(0, token_ids, outputs)
        return combined.to(hidden_states.dtype)


# How often a function may be compiled anew, for other widths, lengths and frozen weights
RECOMPILE_LIMIT = 64


@cache
def compiled(function: Callable) -> Callable:
    """A function under `torch.compile`, whose compiler takes seconds to import: only where something is compiled."""
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    return torch.compile(function)


@cache
def _can_fuse() -> bool:
    """Whether functions can be compiled for the GPU. One is, since besides Triton it takes a C compiler, the headers of
    Python and a folder to write to."""
    try:
        compiled(torch.square)(torch.ones(1, device="cuda"))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of Triton, of the C compiler, of the file system: there is no class that they share
        logger.warning(f"Experts run slower on this GPU, for which nothing can be compiled: {error}")
        return False
    return True


def fused(function: Callable) -> Callable:
    """On a GPU, few kernels in place of many that each read and write all rows."""

    @wraps(function)
    def run(*arguments):
        if not _is_fused(arguments[0]):
            return function(*arguments)
        for tensor in arguments:
            # The towers' widths differ. As variables they would make the kernels up to four times slower
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.ndim > 1:
                torch._dynamo.mark_static(tensor, tensor.ndim - 1)
        return compiled(function)(*arguments)

    return run


def _is_fused(tensor: torch.Tensor) -> bool:
    is_eager = not torch.compiler.is_compiling() and not _get_current_dispatch_mode_stack()
    return tensor.is_cuda and is_eager and not is_recorded(tensor) and _can_fuse()


@fused
def _activate(rows: torch.Tensor, bias: torch.Tensor, expert_ids: torch.Tensor, act_fn: Callable) -> torch.Tensor:
    """(N, I), of the first product and its bias, added in float32 as a linear layer adds it."""
    return act_fn(rows.float() + bias[expert_ids].float()).to(rows.dtype)


@fused
def _activate_backward(
    rows: torch.Tensor,
    bias: torch.Tensor,
    expert_ids: torch.Tensor,
    act_fn: Callable,
    is_computed: torch.Tensor,
    gradient: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `_activate` gave, computed again, and the gradient of its rows."""
    activated, pull = torch.func.vjp(act_fn, rows.float() + bias[expert_ids].float())
    return activated.to(rows.dtype), torch.where(is_computed, pull(gradient.float())[0], 0).to(rows.dtype)


@fused
def _combine(
    rows: torch.Tensor, bias: torch.Tensor, expert_ids: torch.Tensor, rank: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """(T, D), the weighted sum over the K experts of each token. A row of weight 0 may hold anything."""
    choices = weights.T  # (K, T)
    values = (rows.float() + bias[expert_ids].float())[rank].unflatten(0, choices.shape) * choices[..., None]
    return values.masked_fill(choices[..., None] == 0, 0).sum(dim=0).to(rows.dtype)


@fused
def _gather_backward(rows: torch.Tensor, rank: torch.Tensor, is_computed: torch.Tensor, top_k: int) -> torch.Tensor:
    """(T, D), the sum over the K rows of each token."""
    return torch.where(is_computed, rows, 0)[rank].unflatten(0, (top_k, -1)).sum(dim=0)


@fused
def _combine_backward(
    rows: torch.Tensor,
    bias: torch.Tensor,
    expert_ids: torch.Tensor,
    order: torch.Tensor,
    weights: torch.Tensor,
    is_computed: torch.Tensor,
    gradient: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of the rows (N, D), and of each row's weight (N,)."""
    of_rows = torch.where(is_computed, gradient[order % weights.shape[0]].to(weights.dtype), 0)
    of_weights = torch.where(is_computed, of_rows * (rows.float() + bias[expert_ids].float()), 0).sum(dim=-1)
    return (of_rows * weights.T.flatten()[order][:, None]).to(rows.dtype), of_weights


class _GroupedFFNs(torch.autograd.Function):
    """
    The FFNs of all experts on sorted rows, with few passes over them. It keeps the two products, but neither the rows
    nor what the activation makes of them, which is computed again.

    Where a row goes is known both ways. So the gradient of a gather is a gather and a sum over K, and never an addition
    at an index, which is slow on a GPU.
    """

    @staticmethod
    def forward(ctx, hidden_states, weights, up_proj, up_bias, down_proj, down_bias, rows, act_fn):
        (order, counts), rank = rows, rows.rank()
        ends = counts.cumsum(dim=0, dtype=torch.int32)
        numbers = torch.arange(order.shape[0], device=order.device, dtype=torch.int32)
        expert_ids = torch.searchsorted(ends, numbers, right=True).clamp(max=counts.shape[0] - 1)

        up = F.grouped_mm(hidden_states[order % weights.shape[0]], up_proj.transpose(-2, -1), offs=ends)
        activated = _activate(up, up_bias, expert_ids, act_fn)
        down = F.grouped_mm(activated, down_proj.transpose(-2, -1), offs=ends)
        ctx.save_for_backward(
            hidden_states, weights, up_proj, up_bias, down_proj, down_bias, up, down, order, rank, ends, expert_ids
        )
        ctx.act_fn = act_fn
        return _combine(down, down_bias, expert_ids, rank, weights)

    @staticmethod
    def backward(ctx, gradient):
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # for a gradient of the gradient
            *inputs, _, _, order, _, ends, _ = ctx.saved_tensors
            # Of aliases: of the inputs themselves, a gradient would also go by one that was computed of another
            inputs = [tensor.view_as(tensor) for tensor in inputs]
            rows = Dispatch(order, ends.diff(prepend=ends.new_zeros(1)))
            outputs = _grouped_ffns(*inputs, rows, ctx.act_fn).to(gradient.dtype)
            needed = [i for i in range(len(inputs)) if ctx.needs_input_grad[i]]
            found = torch.autograd.grad(outputs, [inputs[i] for i in needed], gradient, create_graph=True)
            found = dict(zip(needed, found, strict=True))
            return *(found.get(i) for i in range(len(inputs))), None, None
        hidden_states, weights, up_proj, up_bias, down_proj, down_bias, up, down, order, rank, ends, expert_ids = (
            ctx.saved_tensors
        )
        # Products leave the rows of no expert, at the end, as they were in memory
        is_computed = (torch.arange(order.shape[0], device=order.device) < ends[-1])[:, None]
        # As many experts as a multiple of 8, for which a product is faster. Those beyond E have no row
        experts = torch.arange(-(-ends.shape[0] // 8) * 8, device=order.device)
        chosen = ((expert_ids[:, None] == experts) & is_computed).T.to(up.dtype)  # (E rounded up, N)

        of_down, of_weights = _combine_backward(down, down_bias, expert_ids, order, weights, is_computed, gradient)
        needed, gradients = ctx.needs_input_grad, [None] * 8
        if any(needed[i] for i in (0, 2, 3, 4)):
            of_activated = F.grouped_mm(of_down, down_proj, offs=ends)
            activated, of_up = _activate_backward(up, up_bias, expert_ids, ctx.act_fn, is_computed, of_activated)
        if needed[0]:
            of_rows = F.grouped_mm(of_up, up_proj, offs=ends)
            gradients[0] = _gather_backward(of_rows, rank, is_computed, weights.shape[1])
        gradients[1] = of_weights[rank].view(weights.T.shape).T
        if needed[2]:
            gradients[2] = F.grouped_mm(of_up.T, hidden_states[order % weights.shape[0]], offs=ends)
        if needed[3]:
            # A product adds in float32, and on a GPU not one row after another
            gradients[3] = (chosen @ of_up)[: ends.shape[0]]
        if needed[4]:
            gradients[4] = F.grouped_mm(of_down.T, activated, offs=ends)
        if needed[5]:
            gradients[5] = (chosen @ of_down)[: ends.shape[0]]
        return tuple(gradients)


# Rows of an expert on a CPU, below which grouped products train faster than the loop, which stacks the gradients of all
# experts' weights (measured with transformers' `grouped_mm`: lab/speed/results/experts_few_rows_cpu.md)
FEW_ROWS = 160


def experts_forward_grouped(
    experts: CLIPMoEExperts,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    rows: Dispatch | None = None,
) -> torch.Tensor:
    """
    All experts in one product, without waiting for the token counts; under autocast in its precision.

    transformers' `grouped_mm` takes the biases by an index, whose gradient on a GPU adds the rows of an expert one
    after another: forward and backward of an FFN take up to 4.6 times as long (lab/speed/results/experts_gpu.md).
    """
    device, dtype, output_dtype = top_k_index.device, experts.up_proj.dtype, hidden_states.dtype
    if torch.is_autocast_enabled(device.type):
        dtype = output_dtype = torch.get_autocast_dtype(device.type)
    is_unknown = torch.onnx.is_in_onnx_export() or torch._C._functorch.peek_interpreter_stack() is not None
    if is_unknown or _is_counted() or not _fits_grouped_products(experts, dtype):
        arguments = experts, hidden_states, top_k_index, top_k_weights
        return experts_forward_all(*arguments) if torch.compiler.is_compiling() else _loop(*arguments, rows)
    rows = rows or dispatch(top_k_index, experts.num_experts)
    weights = (experts.up_proj, experts.up_proj_bias, experts.down_proj, experts.down_proj_bias)
    weights = (weight.to(dtype) for weight in weights)
    with torch.autocast(device.type, enabled=False):
        arguments = hidden_states.to(dtype), top_k_weights, *weights, rows, experts.act_fn
        # torch's compiler knows grouped products in bfloat16 alone; transformers has others
        is_plain = torch.compiler.is_compiling() and (dtype != torch.bfloat16 or torch.compiler.is_exporting())
        is_plain = is_plain or torch.jit.is_tracing() or not _is_fixed(experts.act_fn)
        return (_grouped_ffns if is_plain else _GroupedFFNs.apply)(*arguments).to(output_dtype)


def _fits_grouped_products(experts: CLIPMoEExperts, dtype: torch.dtype) -> bool:
    """
    Whether torch has grouped products for them: not in float64, nor of sizes that are no multiples of 16 bytes. On a
    GPU only those in bfloat16 of Hopper and data-center Blackwell are; others wait for the counts, once a product.
    """
    device = experts.up_proj.device
    if device.type == "cuda" and not torch.compiler.is_compiling():
        if dtype != torch.bfloat16 or torch.cuda.get_device_capability(device)[0] not in (9, 10):
            return False
    sizes = (size * dtype.itemsize for size in experts.up_proj.shape[1:])
    return dtype != torch.float64 and all(size % 16 == 0 for size in sizes)


def _is_fixed(act_fn: nn.Module) -> bool:
    """Whether an activation may be computed again: it has no dropout, and no parameters that want a gradient."""
    is_random = any(isinstance(part, nn.Dropout) and part.training for part in act_fn.modules())
    return not is_random and next(act_fn.parameters(), None) is None


def _grouped_ffns(hidden_states, weights, up_proj, up_bias, down_proj, down_bias, rows, act_fn) -> torch.Tensor:
    """As `_GroupedFFNs`, of operations that any compiled or exported program may have."""
    (order, counts), rank = rows, rows.rank()
    ends = counts.cumsum(dim=0, dtype=torch.int32)
    numbers = torch.arange(order.shape[0], device=order.device)
    is_computed = (numbers < ends[-1])[:, None]
    if torch.compiler.is_exporting():
        # It may become ONNX, whose product leaves no row out: the last expert computes those of no expert
        ends = torch.cat([ends[:-1], torch.full_like(ends[-1:], order.shape[0])])
    expert_ids = (numbers[:, None] >= ends[:-1]).sum(dim=-1)
    chosen = (expert_ids[:, None] == torch.arange(ends.shape[0], device=order.device)).to(up_bias.dtype)

    def linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        # The biases by a product, too, whose gradient adds rows in float32
        outputs = torch.addmm(_grouped_linear(rows, weight, ends), chosen, bias)
        return torch.where(is_computed, outputs, 0)

    # The gradient of rows that no product computes may be anything, too
    # Not by a remainder, which the exporter to ONNX does not take of a size that it does not know
    token_ids = torch.arange(weights.shape[0], device=order.device).repeat(weights.shape[1])[order]
    inputs = torch.where(is_computed, hidden_states[token_ids], 0)
    outputs = linear(act_fn(linear(inputs, up_proj, up_bias)), down_proj, down_bias)
    return (outputs[rank].unflatten(0, weights.T.shape) * weights.T[..., None]).sum(dim=0)


def experts_forward_all(
    experts: CLIPMoEExperts, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """
    Every expert computes every token, E / K times the arithmetic of the others, and what a token did not choose counts
    nothing. So no size depends on the data, and there are only operations that every tool knows.
    """
    weights = top_k_weights.new_zeros(top_k_index.shape[0], experts.num_experts + 1)  # the last is that of no expert
    weights = weights.scatter_add(1, top_k_index, top_k_weights)[:, :-1].unsqueeze(-1)
    combined = torch.zeros_like(hidden_states, dtype=weights.dtype)
    for weight, (up_proj, up_proj_bias, down_proj, down_proj_bias) in zip(
        weights.unbind(dim=1), _each_ffn(experts), strict=True
    ):
        intermediate = experts.act_fn(F.linear(hidden_states, up_proj, up_proj_bias))
        outputs = F.linear(intermediate, down_proj, down_proj_bias) * weight
        combined = combined + outputs.masked_fill(weight == 0, 0)  # also where an output is not finite
    return combined.to(hidden_states.dtype)


def is_recorded(hidden_states: torch.Tensor) -> bool:
    """
    Whether a tool records, transforms or only shapes this run, to repeat it with other data: `torch.jit.trace`,
    `make_fx`, `torch.onnx`, `torch.func.vmap`, tensors without data.
    """
    return (
        torch.jit.is_tracing()
        or torch.onnx.is_in_onnx_export()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or _has_no_data(hidden_states)
        or any(_records(mode) for mode in _get_current_dispatch_mode_stack())
        or torch._ops._len_torch_dispatch_stack_pre_dispatch() > 0
    )


def _has_no_data(tensor: torch.Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def _records(mode: TorchDispatchMode) -> bool:
    """Whether a mode makes a program: proxies, functional or fake tensors."""
    return getattr(mode, "_mode_key", None) is not None


def _is_counted() -> bool:
    """Whether a `FlopCounterMode` counts, which does not know grouped products."""
    if torch.compiler.is_compiling():
        return False
    modes = _get_current_dispatch_mode_stack()
    return any(type(mode).__module__ == "torch.utils.flop_counter" for mode in modes)  # not imported for it


def experts_forward_by_device(
    experts: CLIPMoEExperts,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    rows: Dispatch | None = None,
) -> torch.Tensor:
    """
    The default implementation: `grouped` on a GPU that has its products, and where experts train with few rows on a
    CPU; else the loop. It follows the input, so a model may move at any time.

    The loop's sizes are those of the data, which a recorded program would keep. Compiled programs, those of
    `torch.export` and CUDA graphs have `grouped`, and whatever else is recorded has all experts. While a
    `FlopCounterMode` counts, the loop runs, or without data `batched_mm`: both multiply what a token's experts do.

    On one core in float32, the loop takes 0.94 to 1.09 times K dense FFNs on 8 images, and 1.34 to 2.12 times in a
    training step of one image, where transformers' `grouped_mm` takes 1.16 to 1.46 (lab/speed/results/experts_cpu.md).
    """
    arguments = experts, hidden_states, top_k_index, top_k_weights
    if torch.compiler.is_compiling() and not torch.onnx.is_in_onnx_export():
        return experts_forward_grouped(*arguments, rows)
    if _has_no_data(hidden_states) and _is_counted():
        return ALL_EXPERTS_FUNCTIONS["batched_mm"](*arguments)
    if is_recorded(hidden_states):
        return experts_forward_all(*arguments)
    if hidden_states.is_cuda or _train_with_few_rows(experts, top_k_index):
        return experts_forward_grouped(*arguments, rows)
    return _loop(*arguments, rows)


def _loop(experts: CLIPMoEExperts, *arguments: Any) -> torch.Tensor:
    return CLIPMoEExperts.forward.__wrapped__(experts, *arguments)  # what the decorator replaced


def _train_with_few_rows(experts: CLIPMoEExperts, top_k_index: torch.Tensor) -> bool:
    """
    Whether the experts train as it was measured: on a CPU, in float32. Others have the loop, also those whose sizes are
    no multiples of 16 bytes, which grouped products refuse.

    Whether gradients are on is not asked: batches in parts are embedded without them first, and have to come out the
    same with them.
    """
    measured = top_k_index.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
    few_rows = top_k_index.numel() < FEW_ROWS * experts.num_experts
    weights = (experts.up_proj, experts.up_proj_bias, experts.down_proj, experts.down_proj_bias)
    trains = experts.training and all(w.requires_grad and w.dtype == torch.float32 for w in weights)
    return measured and few_rows and trains and all(size % 4 == 0 for size in experts.up_proj.shape[1:])


ALL_EXPERTS_FUNCTIONS.register("grouped", experts_forward_grouped)
ALL_EXPERTS_FUNCTIONS.register("by_device", experts_forward_by_device)
