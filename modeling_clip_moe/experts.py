"""
The experts of a sparse layer, and their implementations: a loop, one grouped product for all, and what a tool records.

The axes of tensors are named in `sparse_moe`.
"""

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from .configuration_clip_moe import CLIPMoETowerConfig
from .dispatch import Dispatch, dispatch
from .expert_kernels import GroupedFFNs, activate, grouped_ffns, has_no_data, is_recorded
from .torch_internals import _get_current_dispatch_mode_stack, peek_interpreter_stack
from .transformers_internals import ALL_EXPERTS_FUNCTIONS, use_experts_implementation

# Implementations that take the rows which the router sorted. Those of transformers sort for themselves
TAKE_ROWS = ("eager", "grouped", "by_device")


def _each_expert(stacked: Tensor | None, num_experts: int) -> Sequence[Tensor | None]:
    """A parameter of all experts, expert by expert. Unbinding makes its gradient one stacked tensor; indexing would
    build one of full size for each expert."""
    if stacked is None:
        return [None] * num_experts
    try:
        return stacked.unbind()
    except NotImplementedError:  # torchao's quantized tensors, which are not trained
        return [stacked[i] for i in range(stacked.shape[0])]


def _each_ffn(experts: "CLIPMoEExperts") -> Iterator[Callable[[Tensor], Tensor]]:
    """The FFNs, expert by expert, as functions from (N, D) to (N, D)."""
    weights = (_each_expert(weight, experts.down_proj.shape[0]) for weight in experts.weights())
    return (functools.partial(_ffn, experts, *of_expert) for of_expert in zip(*weights, strict=True))


def _ffn(
    experts: "CLIPMoEExperts",
    up_proj: Tensor,
    up_proj_bias: Tensor | None,
    down_proj: Tensor,
    down_proj_bias: Tensor | None,
    hidden_states: Tensor,
) -> Tensor:
    intermediate = activate(F.linear(hidden_states, up_proj, up_proj_bias), experts.act_fn, experts.is_gated)
    return F.linear(intermediate, down_proj, down_proj_bias)


@use_experts_implementation(has_gate=False, has_bias=True)
class CLIPMoEExperts(nn.Module):
    """E FFNs like the tower's, stacked. Computes only what was chosen: expert id E stands for no expert.

    Attributes:
        up_proj, up_proj_bias: (E, I, D) and (E, I), as CLIP's `fc1`.
        gate_up_proj, gate_up_proj_bias: (E, 2 I, D) and (E, 2 I), of gated experts in their place: first what goes
            through the activation, then what it multiplies, as in transformers' mixtures.
        down_proj, down_proj_bias: (E, D, I) and (E, D). Biases are None with `moe_mlp_bias=False`.
    """

    def __init__(self, config: CLIPMoETowerConfig):
        super().__init__()
        self.num_experts, self.is_gated = config.num_experts, config.use_gated_mlp
        up, up_size = ("gate_up_proj", 2 * config.expert_size) if self.is_gated else ("up_proj", config.expert_size)
        for name, sizes in (
            (up, (up_size, config.hidden_size)),
            ("down_proj", (config.hidden_size, config.expert_size)),
        ):
            bias = nn.Parameter(torch.empty(self.num_experts, sizes[0])) if config.moe_mlp_bias else None
            self.register_parameter(name, nn.Parameter(torch.empty(self.num_experts, *sizes)))
            self.register_parameter(f"{name}_bias", bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def weights(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """The first projection, which of gated experts is `gate_up_proj`, and the second one, each with its bias."""
        up = "gate_up_proj" if self.is_gated else "up_proj"
        return getattr(self, up), getattr(self, f"{up}_bias"), self.down_proj, self.down_proj_bias

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
            outputs.append(ffn(expert_input))
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
    device, dtype, output_dtype = top_k_index.device, experts.down_proj.dtype, hidden_states.dtype
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
            hidden_states.to(dtype), top_k_weights, *_padded(experts, dtype), rows, experts.act_fn, experts.is_gated
        )
        return outputs.to(output_dtype)


def _padded(experts: CLIPMoEExperts, dtype: torch.dtype) -> list[Tensor | None]:
    """The weights in a precision, with zero hidden units up to a width of 16 bytes, which grouped products want. They
    add nothing, and their gradients are dropped."""
    up_proj, up_bias, down_proj, down_bias = (None if w is None else w.to(dtype) for w in experts.weights())
    width = down_proj.shape[-1]
    if padding := -width % (16 // dtype.itemsize):
        # Of gated experts, each half of the first projection
        up_proj = F.pad(up_proj.unflatten(1, (-1, width)), (0, 0, 0, padding)).flatten(1, 2)
        up_bias = None if up_bias is None else F.pad(up_bias.unflatten(1, (-1, width)), (0, padding)).flatten(1, 2)
        down_proj = F.pad(down_proj, (0, padding))
    return [up_proj, up_bias, down_proj, down_bias]


def _fits_grouped_products(experts: CLIPMoEExperts, dtype: torch.dtype) -> bool:
    """Whether torch has grouped products for them: not in float64, nor of a hidden size that is no multiple of 16
    bytes. On a GPU, only bfloat16 on Hopper and data-center Blackwell; others wait for the counts, once a product."""
    device, hidden_size = experts.down_proj.device, experts.down_proj.shape[1]
    if device.type == "cuda" and not torch.compiler.is_compiling():
        if dtype != torch.bfloat16 or torch.cuda.get_device_capability(device)[0] not in (9, 10):
            return False
    return dtype != torch.float64 and hidden_size * dtype.itemsize % 16 == 0


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
        outputs = ffn(hidden_states) * weight
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
    weights = (weight for weight in experts.weights() if weight is not None)
    trains = experts.training and all(w.requires_grad and w.dtype == torch.float32 for w in weights)
    return measured and few_rows and trains


ALL_EXPERTS_FUNCTIONS.register("grouped", experts_forward_grouped)
ALL_EXPERTS_FUNCTIONS.register("by_device", experts_forward_by_device)
