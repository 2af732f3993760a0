"""
The experts of a sparse layer, and their implementations: a loop, one grouped product for all, and what a tool records.

The axes of tensors are named in `sparse_moe`.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from .configuration_clip_moe import CLIPMoETowerConfig
from .dispatch import Dispatch, dispatch
from .expert_kernels import GroupedFFNs, grouped_ffns, has_no_data, is_recorded
from .torch_internals import _get_current_dispatch_mode_stack, peek_interpreter_stack
from .transformers_internals import ALL_EXPERTS_FUNCTIONS, use_experts_implementation

# Implementations that take the rows which the router sorted. Those of transformers sort for themselves
TAKE_ROWS = ("eager", "grouped", "by_device")


def _each_expert(stacked: Tensor) -> Sequence[Tensor]:
    """A parameter of all experts, expert by expert. Unbinding makes its gradient one stacked tensor; indexing would
    build one of full size for each expert."""
    try:
        return stacked.unbind()
    except NotImplementedError:  # torchao's quantized tensors, which are not trained
        return [stacked[i] for i in range(stacked.shape[0])]


def _each_ffn(experts: nn.Module) -> Iterator[tuple[Tensor, ...]]:
    """Up projection with its bias and down projection with its bias, expert by expert."""
    up_projs, up_biases = _each_expert(experts.up_proj), _each_expert(experts.up_proj_bias)
    down_projs, down_biases = _each_expert(experts.down_proj), _each_expert(experts.down_proj_bias)
    return zip(up_projs, up_biases, down_projs, down_biases, strict=True)


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

    def forward(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, rows: Dispatch | None = None
    ) -> Tensor:
        """
        The weighted sum (T, D) of each token's experts.

        Args:
            hidden_states: (T, D).
            top_k_index, top_k_weights: (T, K), from the router.
            rows: the sorted rows of these ids. None: they are sorted here.
        """
        if is_recorded(hidden_states) and not torch.compiler.is_compiling():
            return experts_forward_all(self, hidden_states, top_k_index, top_k_weights)
        order, counts = rows or dispatch(top_k_index, self.num_experts)
        counts = counts.tolist()
        order = order[: sum(counts)]
        token_ids = order % hidden_states.shape[0]

        outputs = []
        inputs = hidden_states.index_select(0, token_ids).split(counts)
        for expert_input, ffn in zip(inputs, _each_ffn(self), strict=True):
            up_proj, up_proj_bias, down_proj, down_proj_bias = ffn
            intermediate = self.act_fn(F.linear(expert_input, up_proj, up_proj_bias))
            outputs.append(F.linear(intermediate, down_proj, down_proj_bias))
        outputs = torch.cat(outputs) * top_k_weights.T.flatten().index_select(0, order)[:, None]
        combined = torch.zeros_like(hidden_states, dtype=outputs.dtype).index_add(0, token_ids, outputs)
        return combined.to(hidden_states.dtype)


# Rows of an expert on a CPU, below which grouped products train faster than the loop, which stacks the gradients of all
# experts' weights (lab/speed/results/experts_few_rows_cpu.md)
FEW_ROWS = 160


def experts_forward_grouped(
    experts: CLIPMoEExperts,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    rows: Dispatch | None = None,
) -> Tensor:
    """
    All experts in one product, without waiting for the token counts; under autocast in its precision.

    transformers' `grouped_mm` takes the biases by an index, whose gradient on a GPU adds the rows of an expert one
    after another: forward and backward of an FFN take up to 4.6 times as long (lab/speed/results/experts_gpu.md).
    """
    device, dtype, output_dtype = top_k_index.device, experts.up_proj.dtype, hidden_states.dtype
    if torch.is_autocast_enabled(device.type):
        dtype = output_dtype = torch.get_autocast_dtype(device.type)
    is_unknown = torch.onnx.is_in_onnx_export() or peek_interpreter_stack() is not None
    if is_unknown or _is_counted() or not _fits_grouped_products(experts, dtype):
        if torch.compiler.is_compiling():
            return experts_forward_all(experts, hidden_states, top_k_index, top_k_weights)
        return _loop(experts, hidden_states, top_k_index, top_k_weights, rows)
    rows = rows or dispatch(top_k_index, experts.num_experts)
    with torch.autocast(device.type, enabled=False):
        # torch's compiler knows grouped products in bfloat16 alone; transformers has others
        is_plain = torch.compiler.is_compiling() and (dtype != torch.bfloat16 or torch.compiler.is_exporting())
        is_plain = is_plain or torch.jit.is_tracing() or not _is_fixed(experts.act_fn)
        outputs = (grouped_ffns if is_plain else GroupedFFNs.apply)(
            hidden_states.to(dtype),
            top_k_weights,
            experts.up_proj.to(dtype),
            experts.up_proj_bias.to(dtype),
            experts.down_proj.to(dtype),
            experts.down_proj_bias.to(dtype),
            rows,
            experts.act_fn,
        )
        return outputs.to(output_dtype)


def _fits_grouped_products(experts: CLIPMoEExperts, dtype: torch.dtype) -> bool:
    """Whether torch has grouped products for them: not in float64, nor of sizes that are no multiples of 16 bytes. On a
    GPU, only bfloat16 on Hopper and data-center Blackwell; others wait for the counts, once a product."""
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


def experts_forward_all(
    experts: CLIPMoEExperts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Every expert computes every token, E / K times the arithmetic, and what a token did not choose counts nothing. So
    no size depends on the data, and there are only operations that every tool knows."""
    weights = top_k_weights.new_zeros(top_k_index.shape[0], experts.num_experts + 1)  # the last is that of no expert
    weights = weights.scatter_add(1, top_k_index, top_k_weights)[:, :-1].unsqueeze(-1)
    combined = torch.zeros_like(hidden_states, dtype=weights.dtype)
    for weight, ffn in zip(weights.unbind(dim=1), _each_ffn(experts), strict=True):
        up_proj, up_proj_bias, down_proj, down_proj_bias = ffn
        intermediate = experts.act_fn(F.linear(hidden_states, up_proj, up_proj_bias))
        outputs = F.linear(intermediate, down_proj, down_proj_bias) * weight
        combined = combined + outputs.masked_fill(weight == 0, 0)  # also where an output is not finite
    return combined.to(hidden_states.dtype)


def _is_counted() -> bool:
    """Whether a `FlopCounterMode` counts, which does not know grouped products."""
    if torch.compiler.is_compiling():
        return False
    modes = _get_current_dispatch_mode_stack()
    return any(type(mode).__module__ == "torch.utils.flop_counter" for mode in modes)  # not imported for it


def experts_forward_by_device(
    experts: CLIPMoEExperts,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    rows: Dispatch | None = None,
) -> Tensor:
    """
    The default implementation: `grouped` on a GPU that has its products, and where experts train with few rows on a
    CPU; else the loop. It follows the input, so a model may move at any time.

    A recorded program would keep the loop's sizes, which are those of the data. So compiled programs, `torch.export`
    and CUDA graphs have `grouped`, others all experts. While a `FlopCounterMode` counts, the loop runs, or without data
    `batched_mm`: both multiply what a token's experts do.

    On one core in float32, the loop takes 0.94 to 1.09 times K dense FFNs on 8 images, and 1.34 to 2.12 times in a
    training step of one image, where transformers' `grouped_mm` takes 1.16 to 1.46 (lab/speed/results/experts_cpu.md).
    """
    if torch.compiler.is_compiling() and not torch.onnx.is_in_onnx_export():
        return experts_forward_grouped(experts, hidden_states, top_k_index, top_k_weights, rows)
    if has_no_data(hidden_states) and _is_counted():
        return ALL_EXPERTS_FUNCTIONS["batched_mm"](experts, hidden_states, top_k_index, top_k_weights)
    if is_recorded(hidden_states):
        return experts_forward_all(experts, hidden_states, top_k_index, top_k_weights)
    if hidden_states.is_cuda or _train_with_few_rows(experts, top_k_index):
        return experts_forward_grouped(experts, hidden_states, top_k_index, top_k_weights, rows)
    return _loop(experts, hidden_states, top_k_index, top_k_weights, rows)


def _loop(experts, hidden_states, top_k_index, top_k_weights, rows) -> Tensor:
    """The function that the decorator replaced."""
    return CLIPMoEExperts.forward.__wrapped__(experts, hidden_states, top_k_index, top_k_weights, rows)


def _train_with_few_rows(experts: CLIPMoEExperts, top_k_index: Tensor) -> bool:
    """
    Whether the experts train with few rows on a CPU in float32, as was measured.

    Whether gradients are on is not asked: batches in parts are embedded without them first, and have to come out the
    same with them.
    """
    measured = top_k_index.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
    few_rows = top_k_index.numel() < FEW_ROWS * experts.num_experts
    weights = (experts.up_proj, experts.up_proj_bias, experts.down_proj, experts.down_proj_bias)
    trains = experts.training and all(w.requires_grad and w.dtype == torch.float32 for w in weights)
    return measured and few_rows and trains


ALL_EXPERTS_FUNCTIONS.register("grouped", experts_forward_grouped)
ALL_EXPERTS_FUNCTIONS.register("by_device", experts_forward_by_device)
