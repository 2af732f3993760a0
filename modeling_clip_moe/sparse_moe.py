"""
The sparse block of CLIP-UP, CLIP-MoE and CLIP-FMoE, the losses of its routers, and what models of all families share.

Nothing here is CLIP's alone: every encoder of transformers takes the block whose layers have an FFN `mlp` of `fc1` and
`fc2`.

Axes of the tensors, as used in the comments:
    B  sequences of the batch (an image or a text)      E  experts of a layer
    S  tokens of a sequence, with its padding           K  experts per token
    T  all tokens, B * S                                L  sparse layers of a tower
    D  hidden size                                      I  intermediate size of an expert

Papers:
    CLIP-UP    Wang et al., "CLIP-UP: A Simple and Efficient Mixture-of-Experts CLIP Training Recipe with Sparse
               Upcycling"
    CLIP-MoE   Zhang et al., "CLIP-MoE: Towards Building Mixture of Experts for CLIP with Diversified Multiplet
               Upcycling"
    CLIP-FMoE  Tran et al., "CLIP-FMoE: Scalable CLIP via Fused Mixture-of-Experts with Enforced Specialization"
    LIMoE      Mustafa et al., "Multimodal Contrastive Learning with LIMoE: the Language-Image Mixture of Experts"
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from transformers import PreTrainedConfig
from transformers import __version__ as transformers_version
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import PrefixChange
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _grouped_linear, use_experts_implementation
from transformers.models.clip.modeling_clip import CLIPMLP
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, logging
from transformers.utils.generic import maybe_autocast
from transformers.utils.output_capturing import OutputRecorder

from .configuration_clip_moe import CLIPMoETowerConfig

logger = logging.get_logger(__name__)

Reduce = Callable[[torch.Tensor], torch.Tensor]


# In files, every sparse block has an empty tensor of this name. CLIP's own classes, which look for their FFN there,
# would take a random one and at most warn if there was nothing; this is an error
SPARSE_LAYER_MARK = "fc1.weight"


def _stack_layers(router_logits: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Router logits of the L layers, each (B, S, E) or (T, E), as one float32 tensor (L, T, E)."""
    device = router_logits[0].device
    return torch.stack([logits.flatten(0, -2).to(device) for logits in router_logits]).float()


def _one_hot(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """As torch's, but for its look at the values, which a recorded program cannot have."""
    return (ids[..., None] == torch.arange(num_experts, device=ids.device)).long()


def _mean_over_tokens(values: torch.Tensor, mask: torch.Tensor | None, reduce: Reduce | None) -> torch.Tensor:
    """Mean (L, N) of `values` (L, T, N) over all tokens but padding, of all processes if `reduce` sums over them."""
    num_layers, num_tokens, num_values = values.shape
    mask = values.new_ones(num_tokens) if mask is None else mask.flatten().to(values)
    sums = (values * mask[:, None]).sum(dim=1)
    sums = torch.cat([sums.flatten(), mask.sum(dim=0, keepdim=True)])
    if reduce is not None:
        sums = reduce(sums)
    return sums[:-1].view(num_layers, num_values) / sums[-1]


def load_balancing_loss(
    router_logits: tuple[torch.Tensor, ...],
    top_k: int,
    mask: torch.Tensor | None = None,
    reduce: Reduce | None = None,
) -> torch.Tensor:
    """
    Load balancing loss: sum over the experts of R_e * P_e, with R_e = E / (K * T) * (tokens that choose expert e) and
    P_e the mean probability of expert e (CLIP-UP eq. 5).

    It is 1 at perfect balance, for every K. transformers' `load_balancing_loss_func`, and CLIP-FMoE eq. 3 as printed,
    are K there: multiply a coefficient meant for them by K. Choices count before capacity drops any.

    Args:
        router_logits: one tensor (B, S, E) or (T, E) a layer. The loss is the mean of the layers' (CLIP-UP, CLIP-MoE);
            for the loss of all layers' tokens together (CLIP-FMoE), give those as one layer.
        top_k: how many choices of a token count: K (CLIP-UP, CLIP-FMoE), or 1 for the argmax alone (CLIP-MoE eq. 7).
        mask: (B, S) or (T,), 1 for a token and 0 for padding.
        reduce: maps a vector of this process's sums (choices, probabilities, number of tokens) to the sums over all
            processes, differentiably. None: the loss of this process's tokens.

    Returns:
        `torch.Tensor`: a scalar.
    """
    probabilities = _stack_layers(router_logits).softmax(dim=-1)  # (L, T, E)
    num_experts = probabilities.shape[-1]
    choices = _one_hot(probabilities.topk(top_k).indices, num_experts).sum(dim=-2)  # (L, T, E)
    means = _mean_over_tokens(torch.cat([choices, probabilities], dim=-1), mask, reduce)  # (L, 2 * E)
    chosen, probability = means.split(num_experts, dim=-1)
    return (num_experts / top_k * chosen * probability).sum(dim=-1).mean()


def router_z_loss(
    router_logits: tuple[torch.Tensor, ...], mask: torch.Tensor | None = None, reduce: Reduce | None = None
) -> torch.Tensor:
    """
    Router z-loss: mean over tokens and layers of logsumexp(logits)^2, which keeps the logits small (CLIP-UP eq. 6,
    where G means the logits).

    Args:
        router_logits, mask, reduce: see `load_balancing_loss`.

    Returns:
        `torch.Tensor`: a scalar.
    """
    z = _stack_layers(router_logits).logsumexp(dim=-1, keepdim=True)  # (L, T, 1)
    return _mean_over_tokens(z.square(), mask, reduce).mean()


def _entropy(probabilities: torch.Tensor, logarithms: torch.Tensor) -> torch.Tensor:
    """Entropy of the last axis, which stays with size 1. Its gradient is finite where a probability is 0."""
    finite = logarithms.clamp(min=torch.finfo(logarithms.dtype).min)
    return -(probabilities * finite).sum(dim=-1, keepdim=True)


def local_entropy_loss(
    router_logits: tuple[torch.Tensor, ...], mask: torch.Tensor | None = None, reduce: Reduce | None = None
) -> torch.Tensor:
    """
    LIMoE's local loss: mean over tokens and layers of the entropy of a token's probabilities (CLIP-UP eq. 8). Low when
    the router is sure of every token.

    Args:
        router_logits, mask, reduce: see `load_balancing_loss`.

    Returns:
        `torch.Tensor`: a scalar between 0 and log(E).
    """
    logits = _stack_layers(router_logits)
    entropy = _entropy(logits.softmax(dim=-1), logits.log_softmax(dim=-1))  # (L, T, 1)
    return _mean_over_tokens(entropy, mask, reduce).mean()


def global_entropy_loss(
    router_logits: tuple[torch.Tensor, ...],
    min_experts: float,
    mask: torch.Tensor | None = None,
    reduce: Reduce | None = None,
) -> torch.Tensor:
    """
    LIMoE's thresholded global loss: mean over layers of max(0, log(m) - entropy of the mean probabilities) (CLIP-UP
    eq. 9 and 10). Zero once a layer spreads its tokens over m experts or more.

    CLIP-UP eq. 9 prints the entropy itself; only its negative, as in LIMoE, is smallest when many experts are in use.

    Args:
        router_logits, mask, reduce: see `load_balancing_loss`.
        min_experts: m, how many experts in use are enough (CLIP-UP: 6).

    Returns:
        `torch.Tensor`: a scalar.
    """
    probabilities = _mean_over_tokens(_stack_layers(router_logits).softmax(dim=-1), mask, reduce)  # (L, E)
    logarithms = probabilities.clamp(min=torch.finfo(probabilities.dtype).tiny).log()
    return (math.log(min_experts) - _entropy(probabilities, logarithms)).clamp(min=0).mean()


def _count_groups(batch_size: int, group_size: int) -> int:
    if batch_size % group_size != 0:
        raise ValueError(
            f"capacity_group_size={group_size} does not divide the batch of {batch_size} sequences. Change either."
        )
    return batch_size // group_size


def expert_capacity_mask(
    top_k_index: torch.Tensor,
    num_experts: int,
    capacity_factor: float,
    mask: torch.Tensor | None = None,
    group_size: int | None = None,
) -> torch.Tensor:
    """
    Which choices find room at their expert. A group has T tokens that are not padding, of which an expert takes
    ceil(T * C / E): the first choices of all tokens in token order, then the second choices, and so on (CLIP-UP,
    "first-come-first-serve"; the order is V-MoE's).

    Args:
        top_k_index: (B, S, K), the experts of each token, best first.
        num_experts: E.
        capacity_factor: C. With K choices a token and perfect balance, C = K drops nothing.
        mask: (B, S), 1 for a token and 0 for padding, which takes no room.
        group_size: how many consecutive sequences share a capacity. None: all B.

    Returns:
        `torch.Tensor`: (B, S, K) of bool, False for a choice that is dropped and for padding.
    """
    batch_size, _, top_k = top_k_index.shape
    num_groups = _count_groups(batch_size, group_size or batch_size)
    mask = torch.ones_like(top_k_index[..., 0]) if mask is None else mask.long()  # (B, S)

    choices = _one_hot(top_k_index, num_experts) * mask[..., None, None]  # (B, S, K, E)
    choices = choices.view(num_groups, -1, top_k, num_experts).transpose(1, 2)  # (groups, K, tokens, E)
    position = choices.flatten(1, 2).cumsum(dim=1).view_as(choices)  # in the queue of an expert, from 1
    tokens = mask.reshape(num_groups, -1).sum(dim=-1)
    factor = Fraction(str(capacity_factor)).limit_denominator(10**6)  # of 4 / 3, products of more digits overflow
    divisor = factor.denominator * num_experts
    capacity = (tokens * factor.numerator + divisor - 1) // divisor  # (groups,), rounded up, which ONNX does not of < 0
    within_capacity = (choices * (position <= capacity[:, None, None, None])).sum(dim=-1)  # (groups, K, tokens)
    return within_capacity.transpose(1, 2).reshape(top_k_index.shape).bool()


class CLIPMoERouter(nn.Module):
    """Chooses K experts for each token, drops what exceeds their capacity and weighs the rest. Works in float32."""

    def __init__(self, config: CLIPMoETowerConfig):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        # Set by `force_expert`: the one expert of all tokens, and its weight; None: as much as K experts have together
        self.forced_expert: int | None = None
        self.forced_scale: float | None = None
        # Set by `seed_router_noise`: the seed of this call, and which share of the batch this process has
        self.noise_seed: int | None = None
        self.process_index = 0

    def forward(
        self, hidden_states: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Args:
            hidden_states: (B, S, D).
            mask: (B, S), 1 for a token and 0 for padding, which goes to no expert.

        Returns:
            logits (B, S, E), weights (B, S, K) and expert ids (B, S, K), best first. A choice that capacity drops, and
            those of padding, have weight 0 and id E. With a forced expert, K is 1: see `force_expert`.
        """
        config = self.config
        noise = config.router_jitter_noise if self.training else 0.0
        if noise > 0:
            hidden_states = hidden_states * self._noise(hidden_states, 1 - noise, 1 + noise)
        with maybe_autocast(device_type=hidden_states.device.type, enabled=False):
            logits = F.linear(hidden_states.float(), self.weight.float())  # (B, S, E)
        kept = None if mask is None else mask.bool()[..., None]
        if self.forced_expert is not None:
            ids = torch.full_like(logits[..., :1], self.forced_expert, dtype=torch.long)  # (B, S, 1)
            if kept is not None:
                ids = ids.masked_fill(~kept, config.num_experts)
            if self.forced_scale is None:
                top_k = logits.softmax(dim=-1).topk(config.num_experts_per_tok, dim=-1).values
                weights = top_k.sum(dim=-1, keepdim=True)  # (B, S, 1)
            else:
                weights = torch.full_like(logits[..., :1], self.forced_scale)
            return logits, weights * (ids < config.num_experts), ids
        weights, ids = logits.softmax(dim=-1).topk(config.num_experts_per_tok, dim=-1)  # (B, S, K)

        if config.norm_topk_prob and config.norm_before_capacity:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        capacity_factor = config.capacity_factor if self.training else config.eval_capacity_factor
        if capacity_factor is not None:
            kept = expert_capacity_mask(ids, config.num_experts, capacity_factor, mask, config.capacity_group_size)
        if kept is not None:
            weights = weights * kept
            ids = ids.masked_fill(~kept, config.num_experts)
        if config.norm_topk_prob and not config.norm_before_capacity:
            # The kept choices sum to 1 "even when some tokens are dropped" (CLIP-UP, "Normalize gating weights before
            # or after routing")
            total = weights.sum(dim=-1, keepdim=True)
            weights = weights / total.masked_fill(total == 0, 1.0)  # none is kept
        return logits, weights, ids

    def _noise(self, hidden_states: torch.Tensor, low: float, high: float) -> torch.Tensor:
        """Uniform random numbers of the shape (B, S, D) of the hidden states."""
        group_size = self.config.capacity_group_size
        if self.noise_seed is None or group_size is None:
            return torch.empty_like(hidden_states).uniform_(low, high)
        batch_size, length, width = hidden_states.shape
        num_groups = _count_groups(batch_size, group_size)
        # Every group has its own, also for the padding that it would have beside longer texts
        max_length = getattr(self.config, "max_position_embeddings", length)
        noise = hidden_states.new_empty(batch_size, max_length, width)
        for number, group in enumerate(noise.split(group_size), start=self.process_index * num_groups):
            seed = hash((self.noise_seed, number)) % 2**63
            group.uniform_(low, high, generator=torch.Generator(noise.device).manual_seed(seed))
        return noise[:, :length]


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
    """E copies of CLIP's FFN, stacked. Computes only what was chosen: expert id E stands for no expert."""

    def __init__(self, config: CLIPMoETowerConfig):
        super().__init__()
        self.num_experts = config.num_experts
        self.up_proj = nn.Parameter(torch.empty(config.num_experts, config.intermediate_size, config.hidden_size))
        self.up_proj_bias = nn.Parameter(torch.empty(config.num_experts, config.intermediate_size))
        self.down_proj = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, config.intermediate_size))
        self.down_proj_bias = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """
        Args:
            hidden_states: (T, D).
            top_k_index, top_k_weights: (T, K), from the router.

        Returns:
            (T, D), the weighted sum of each token's experts.
        """
        if is_recorded(hidden_states) and not torch.compiler.is_compiling():
            return experts_forward_all(self, hidden_states, top_k_index, top_k_weights)
        expert_ids, order = top_k_index.flatten().sort(stable=True)
        token_counts = torch.bincount(expert_ids, minlength=self.num_experts)[: self.num_experts].tolist()
        order = order[: sum(token_counts)]  # the id E is sorted to the end
        token_ids = order // top_k_index.shape[-1]

        outputs = []
        inputs = hidden_states.index_select(0, token_ids).split(token_counts)
        for expert_input, (up_proj, up_proj_bias, down_proj, down_proj_bias) in zip(
            inputs, _each_ffn(self), strict=True
        ):
            intermediate = self.act_fn(F.linear(expert_input, up_proj, up_proj_bias))
            outputs.append(F.linear(intermediate, down_proj, down_proj_bias))
        outputs = torch.cat(outputs) * top_k_weights.flatten().index_select(0, order)[:, None]
        combined = torch.zeros_like(hidden_states, dtype=outputs.dtype).index_add(0, token_ids, outputs)
        return combined.to(hidden_states.dtype)


# Rows of an expert on a CPU, below which grouped products train faster than the loop, which stacks the gradients of all
# experts' weights (measured with transformers' `grouped_mm`: benchmarks/results/experts_few_rows_cpu.md)
FEW_ROWS = 160
# Rows of an expert on a GPU, from which the loop is faster, although it waits for the token counts
# (benchmarks/results/experts_gpu.md)
MANY_ROWS = 4096


def experts_forward_grouped(
    experts: CLIPMoEExperts, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """
    All experts in one product, without waiting for the token counts; under autocast in its precision.

    transformers' `grouped_mm` takes the biases by an index, whose gradient on a GPU adds the rows of an expert one
    after another: forward and backward of an FFN take up to 4.6 times as long (benchmarks/results/experts_gpu.md).
    """
    num_tokens, top_k = top_k_index.shape
    device, dtype = top_k_index.device, experts.up_proj.dtype
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    expert_ids, order = top_k_index.flatten().sort(stable=True)
    dropped = (expert_ids == experts.num_experts)[:, None]  # no product computes their rows, which may hold anything
    # An exported program may become ONNX, whose product leaves no row out: the last expert computes them
    groups = expert_ids.clamp(max=experts.num_experts - 1) if torch.compiler.is_exporting() else expert_ids
    chosen = groups[:, None] == torch.arange(experts.num_experts, device=device)  # (T * K, E)
    ends = chosen.sum(dim=0).cumsum(dim=0, dtype=torch.int32)

    def linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        # The biases by a product, too, whose gradient adds rows in float32
        outputs = torch.addmm(_grouped_linear(rows, weight.to(dtype), ends), chosen.to(dtype), bias.to(dtype))
        return outputs.masked_fill(dropped, 0)

    with torch.autocast(device.type, enabled=False):
        # The gradient of dropped rows may be anything, too
        rows = hidden_states.to(dtype).index_select(0, order // top_k).masked_fill(dropped, 0)
        intermediate = experts.act_fn(linear(rows, experts.up_proj, experts.up_proj_bias))
        outputs = linear(intermediate, experts.down_proj, experts.down_proj_bias)
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=device))
    outputs = outputs.index_select(0, rank).unflatten(0, (num_tokens, top_k)) * top_k_weights[..., None]
    return outputs.sum(dim=1).to(hidden_states.dtype)


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


def _counts(mode: TorchDispatchMode) -> bool:
    """Whether a mode belongs to a `FlopCounterMode`."""
    return type(mode).__module__ == "torch.utils.flop_counter"  # which is not imported for it


def experts_forward_by_device(
    experts: CLIPMoEExperts, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """
    The default implementation: `grouped` on a GPU, unless rows are many, and where experts train with few rows on a
    CPU; else the loop. It follows the input, so a model may move at any time.

    The loop's sizes are those of the data, which a recorded program would keep. Compiled programs, those of
    `torch.export` and CUDA graphs have `grouped`, and whatever else is recorded has all experts. While a
    `FlopCounterMode` counts, there is the loop, of which it knows every product, or without data `batched_mm`.

    Time over K dense FFNs on the same tokens, float32 on one core, B/16 and L/14, top-2 of 4 and of 8, the loop and
    transformers' `grouped_mm` (benchmarks/results/experts_cpu.md): the forward of 8 images 0.94 to 1.07 and 1.17 to
    1.36, a training step 0.99 to 1.09 and 0.99 to 1.37; a training step of 1 image 1.34 to 2.12 and 1.16 to 1.46. With
    32 images the loop is at 0.85 to 1.03 (experts_32_images_cpu.md). In bfloat16 both are at 0.98 to 1.01, where it is
    slow (experts_bfloat16_cpu.md).
    """
    arguments = experts, hidden_states, top_k_index, top_k_weights
    loop = CLIPMoEExperts.forward.__wrapped__  # what the decorator replaced
    if torch.compiler.is_compiling() and not torch.onnx.is_in_onnx_export():
        return experts_forward_grouped(*arguments)
    if _has_no_data(hidden_states) and any(map(_counts, _get_current_dispatch_mode_stack())):
        return ALL_EXPERTS_FUNCTIONS["batched_mm"](*arguments)  # products of the chosen experts, whichever they are
    if is_recorded(hidden_states):
        return experts_forward_all(*arguments)
    if any(map(_counts, _get_current_dispatch_mode_stack())):
        return loop(*arguments)
    few_on_gpu = hidden_states.is_cuda and top_k_index.numel() < MANY_ROWS * experts.num_experts
    is_captured = hidden_states.is_cuda and torch.cuda.is_current_stream_capturing()
    if few_on_gpu or is_captured or _train_with_few_rows(experts, top_k_index):
        return experts_forward_grouped(*arguments)
    return loop(*arguments)


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


class CLIPMoEFusionGate(nn.Module):
    """How much of each output channel comes from the base FFN and how much from the experts (CLIP-FMoE sec. 4.3).

    The paper's Linear has no bias: only so do the parameters that its Table 5 counts come out.
    """

    def __init__(self, config: CLIPMoETowerConfig):
        super().__init__()
        self.proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: torch.Tensor, base: torch.Tensor, moe: torch.Tensor) -> torch.Tensor:
        gate = self.proj(hidden_states).sigmoid()  # (B, S, D)
        # G * base + (1 - G) * moe, written so that it is exact where the two are equal: at the start
        return moe + gate * (base - moe)


class CLIPMoESparseMoeBlock(nn.Module):
    """Stands where CLIP has its FFN: router and experts, and with `fusion_gate` the FFN beside them."""

    def __init__(self, config: CLIPMoETowerConfig):
        super().__init__()
        self.num_experts = config.num_experts
        self.router = CLIPMoERouter(config)
        self.experts = CLIPMoEExperts(config)
        # Lets transformers' implementations accept id E, which they know from expert parallelism
        self.experts._is_expert_parallel = True
        self.base = CLIPMLP(config) if config.fusion_gate else None
        self.fusion_gate = CLIPMoEFusionGate(config) if config.fusion_gate else None

    def forward(self, hidden_states: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        _, weights, ids = self.router(hidden_states, mask)
        num_experts = self.num_experts
        if self.experts.num_experts < num_experts:
            # Expert parallelism sends every choice to some process and knows no id E. What is dropped has weight 0, so
            # any expert will do: a different one for each
            anywhere = torch.arange(ids.numel(), device=ids.device).view_as(ids) % num_experts
            ids = torch.where(ids < num_experts, ids, anywhere)
        output = self.experts(hidden_states.flatten(0, 1), ids.flatten(0, 1), weights.flatten(0, 1))
        output = output.view_as(hidden_states)
        if self.fusion_gate is not None:
            output = self.fusion_gate(hidden_states, self.base(hidden_states), output)
        return output


class SparseEncoderLayer:
    """An encoder layer of a family, with a sparse block instead of the FFN in the layers of `config.moe_layers`.

    It stands before the family's own layer, of which it takes the attention, the norms and the FFN of dense layers.
    """

    def __init__(self, config, layer_idx: int):
        super().__init__(config)
        self.is_sparse = layer_idx in config.moe_layers
        if self.is_sparse:
            self.mlp = CLIPMoESparseMoeBlock(config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """
        Args:
            hidden_states: (B, S, D).
            attention_mask: what the attention implementation takes.
            mask: (B, S), 1 for a token and 0 for padding, which no expert computes.
        """
        residual = hidden_states
        hidden_states = self.layer_norm1(hidden_states)
        hidden_states, _ = self.self_attn(hidden_states=hidden_states, attention_mask=attention_mask, **kwargs)
        hidden_states = residual + hidden_states

        residual = hidden_states
        hidden_states = self.layer_norm2(hidden_states)
        hidden_states = self.mlp(hidden_states, mask) if self.is_sparse else self.mlp(hidden_states)
        return residual + hidden_states


def require_one_encoder(state_dict: Mapping[str, torch.Tensor], tied: Mapping[str, str], prefix: str = "") -> None:
    """Raises ValueError if weights that are one tensor in a model (`tied`: name -> name) differ in a state dict."""
    pairs = [(f"{prefix}{name}", f"{prefix}{source}") for name, source in tied.items()]
    differing = [
        name
        for name, source in pairs
        if name in state_dict
        and source in state_dict
        and state_dict[name].device.type != "meta"
        and not torch.equal(state_dict[name], state_dict[source])
    ]
    if differing:
        raise ValueError(
            f"A model with shared_encoder=True has one encoder, but the towers differ in {_abbreviate(differing)}. "
            "Tie them with model.tie_weights(), which keeps the text tower's, or set shared_encoder to False."
        )


def _abbreviate(keys: list[str]) -> str:
    shown, more = keys[:8], len(keys) - 8
    return ", ".join(shown) + (f", ... ({more} more)" if more > 0 else "")


def router_losses(
    router_logits: tuple[torch.Tensor, ...] | None,
    tower: CLIPMoETowerConfig,
    config: PreTrainedConfig,
    mask: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """The weighted router losses of a tower, or None if it has no recorded router."""
    if not router_logits:
        return None
    balance = load_balancing_loss(router_logits, tower.num_experts_per_tok, mask)
    z = router_z_loss(router_logits, mask)
    return config.router_aux_loss_coef * balance + config.router_z_loss_coef * z


def _warn_unquantized(model: nn.Module, name: str) -> None:
    """Warn of experts that a quantization left as they are, as those that only look for `nn.Linear` do."""
    experts = [module for module in model.modules() if isinstance(module, CLIPMoEExperts)]
    weights = [weight for module in experts for weight in (module.up_proj, module.down_proj)]
    if any(type(weight) is nn.Parameter and weight.is_floating_point() for weight in weights):
        logger.warning(
            f"{name}: the quantization left the experts as they are. Name their weights, experts.up_proj and "
            "experts.down_proj, to quantize them, too."
        )


# What else a model with routers can output
ROUTER_OUTPUTS = {
    "router_logits": OutputRecorder(CLIPMoERouter, index=0),
    "expert_ids": OutputRecorder(CLIPMoERouter, index=2),
}


class SparseMoEMixin:
    """
    What the sparse models of all families share: the initialization of experts, and loading that refuses incomplete
    checkpoints. It stands before a family's own subclass of `PreTrainedModel`.
    """

    _auto_class = "AutoModel"
    # Otherwise looked up in the class that is built first, and remembered for its subclasses
    _can_set_experts_implementation_cached_value = True
    # Losses are means over the batch, whatever else a `Trainer` passes: it divides them by the accumulation steps
    accepts_loss_kwargs = False
    # How this class's weights differ from those in a file
    _checkpoint_conversions = []
    # Weights that a checkpoint may lack
    _optional_weights = ()
    # What the names of a tower's weights start with in files
    _tower_prefix = ""
    # Of a subclass of a family's own tower, which builds dense layers: what they become before weights are drawn
    layer_class: type[SparseEncoderLayer] | None = None

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        self._register_conversions()

    def post_init(self):
        if self.layer_class is not None and hasattr(self, "encoder"):
            layers = range(self.config.num_hidden_layers)
            self.encoder.layers = nn.ModuleList([self.layer_class(self.config, i) for i in layers])
        super().post_init()
        # Not those of its towers, which transformers adds: each ignores the other one
        ignored = type(self)._keys_to_ignore_on_load_unexpected or []
        self._keys_to_ignore_on_load_unexpected = {*ignored, rf"\.mlp\.{re.escape(SPARSE_LAYER_MARK)}$"}

    def _register_conversions(self):
        # transformers looks conversions up by class name: without this, a subclass would load random weights. Not when
        # a class is made, since the first registration builds the table of all models
        register_checkpoint_conversion_mapping(type(self).__name__, self._checkpoint_conversions, overwrite=True)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, output_loading_info=False, **kwargs):
        """
        Loads a model as `PreTrainedModel.from_pretrained` does, but never a partly random one.

        Raises:
            ValueError: if the checkpoint lacks weights of this model or holds weights that are no part of a CLIP; if
                it is split in a way that this transformers gets wrong; if it is to have a shared encoder, but its
                towers differ or it is split.
        """
        split = kwargs.get("distributed_config")
        splits_experts = min(getattr(split, "fsdp_size", None) or 1, getattr(split, "ep_size", None) or 1) > 1
        if splits_experts and [int(part) for part in transformers_version.split(".")[:2]] < [5, 23]:
            raise ValueError(
                f"transformers {transformers_version} computes wrong gradients of experts where fsdp_size="
                f"{split.fsdp_size} meets ep_size={split.ep_size}. Use one of them, or transformers 5.23 or newer."
            )
        try:
            model, info = super().from_pretrained(
                pretrained_model_name_or_path, *model_args, output_loading_info=True, **kwargs
            )
        except (IndexError, NotImplementedError) as error:
            config = kwargs.get("config") or cls.config_class.from_pretrained(pretrained_model_name_or_path)
            if kwargs.get("device_map") is None or not getattr(config, "shared_encoder", False):
                raise
            raise ValueError(
                f"{pretrained_model_name_or_path} cannot be placed by device_map={kwargs['device_map']!r}: one with "
                "shared_encoder=True has to fit into one device. Raise max_memory, or name the device."
            ) from error
        if split is not None and getattr(model.config, "shared_encoder", False):
            raise ValueError(
                f"{pretrained_model_name_or_path} has shared_encoder=True: such a model cannot be split over "
                "processes. Leave distributed_config out."
            )
        if untied := sorted(model.get_expanded_tied_weights_keys().keys() - model.all_tied_weights_keys.keys()):
            raise ValueError(
                f"{pretrained_model_name_or_path} has shared_encoder=True in its configuration, but its towers differ "
                f"in {_abbreviate(untied)}. Is it a model of two encoders? Then set shared_encoder to False."
            )
        missing = sorted(key for key in info["missing_keys"] if not key.startswith(cls._optional_weights))
        left_over = sorted(info["unexpected_keys"])
        if missing or left_over:
            raise ValueError(
                f"{pretrained_model_name_or_path} does not hold the weights of this {cls.__name__}. "
                f"Missing: {_abbreviate(missing) or 'none'}. Left over: {_abbreviate(left_over) or 'none'}."
            )
        if getattr(model, "hf_quantizer", None) is not None:
            _warn_unquantized(model, pretrained_model_name_or_path)
        return (model, info) if output_loading_info else model

    def gather_sharded_state_dict_for_save(self, model_to_save, state_dict, *args, **kwargs):
        """
        Part of `save_pretrained`: gives the weights of a tower the names that they have in files of a whole model, and
        adds the marks that make CLIP's own classes refuse the checkpoint.
        """
        self._register_conversions()  # of a model that came out of a pickle
        # By itself, transformers adds a prefix only to what had one when it was loaded
        if self._tower_prefix:
            used = getattr(self, "_weight_conversions", None) or []
            used = [conversion for conversion in used if not isinstance(conversion, PrefixChange)]
            self._weight_conversions = [*used, *self._checkpoint_conversions]
        state_dict = dict(super().gather_sharded_state_dict_for_save(model_to_save, state_dict, *args, **kwargs))
        only_adapters = getattr(self, "_hf_peft_config_loaded", False)
        if state_dict and not only_adapters:  # empty: another process saves
            # A shared encoder is there twice, under CLIP's names, so that each tower loads alone
            tied = self.get_expanded_tied_weights_keys()
            require_one_encoder(state_dict, tied)
            state_dict |= {name: state_dict[source].clone() for name, source in tied.items() if source in state_dict}
            for name, module in model_to_save.named_modules():
                if isinstance(module, CLIPMoESparseMoeBlock):
                    state_dict[f"{name}.{SPARSE_LAYER_MARK}"] = torch.empty(0, dtype=self.dtype)
        return state_dict

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        # transformers' Trainer loads the files of its checkpoints as they are
        for name in [
            name for name in state_dict if name.endswith(f".mlp.{SPARSE_LAYER_MARK}") and state_dict[name].numel() == 0
        ]:
            del state_dict[name]
        in_file = f"{prefix}{self._tower_prefix}"
        for name in [name for name in state_dict if name.startswith(in_file) and in_file != prefix]:
            state_dict[prefix + name.removeprefix(in_file)] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def seed_router_noise(self, seed: int, process_index: int = 0) -> None:
        """
        Makes the `router_jitter_noise` of the next call the same for any number of processes, in towers with a
        `capacity_group_size`. To be called before every training step, on all processes.

        Args:
            seed: of the step.
            process_index: which share of the batch this process has. All have as many sequences.
        """
        routers = (module for module in self.modules() if isinstance(module, CLIPMoERouter))
        for number, router in enumerate(routers):
            router.noise_seed, router.process_index = hash((seed, number)), process_index

    @contextmanager
    def force_expert(self, expert: int, scale: float | Sequence[float] | None = None):
        """
        Within the block, every token goes through this expert alone, whatever its capacity, in all sparse layers: what
        one expert knows (CLIP-MoE Table 1). A fusion gate still mixes the base FFN in.

        It stands for the K experts of a token, so it has the weight that they have together. Then it computes what the
        routed model does where all experts are equal.

        Args:
            expert: its number, from 0.
            scale: its weight: a number, or one for each sparse layer, those of the text tower first. None: for each
                token the sum of the K weights that the router gives, which is 1 with `norm_topk_prob`.
        """
        blocks = [module for module in self.modules() if isinstance(module, CLIPMoESparseMoeBlock)]
        # A router that trains beside an adapter of peft is there twice
        routers = [[part for part in block.router.modules() if isinstance(part, CLIPMoERouter)] for block in blocks]
        num_experts = min((of_layer[0].config.num_experts for of_layer in routers), default=0)
        if not 0 <= expert < num_experts:
            choices = f"experts 0 to {num_experts - 1}" if routers else "no sparse layer"
            raise ValueError(f"expert={expert}, but the model has {choices}.")
        if isinstance(scale, Sequence) and len(scale) != len(routers):
            raise ValueError(f"scale has {len(scale)} numbers, but the model {len(routers)} sparse layers.")
        before = [(router, router.forced_expert, router.forced_scale) for router in itertools.chain(*routers)]
        try:
            for number, of_layer in enumerate(routers):
                for router in of_layer:
                    own = 1.0 if router.config.norm_topk_prob else None
                    router.forced_expert = expert
                    router.forced_scale = (
                        scale[number] if isinstance(scale, Sequence) else own if scale is None else scale
                    )
            yield
        finally:
            for router, *state in before:
                router.forced_expert, router.forced_scale = state

    @classmethod
    def is_custom_code(cls) -> bool:
        # In custom code, transformers does not call `_init_weights` on modules without weights of their own, such as
        # a family's FFN, lest it overwrite loaded weights. Ours respects them: it uses `transformers.initialization`
        return False

    def get_correct_experts_implementation(self, requested_experts: str | None) -> str:
        return super().get_correct_experts_implementation(requested_experts or "by_device")

    def _set_gradient_checkpointing(self, enable=True, gradient_checkpointing_func=None, **kwargs):
        if enable and gradient_checkpointing_func.keywords.get("use_reentrant") is not False:
            raise ValueError(
                "Reentrant gradient checkpointing loses the gradient of the router losses. Pass "
                '{"use_reentrant": False}, or no arguments.'
            )
        super()._set_gradient_checkpointing(enable, gradient_checkpointing_func, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        factor = getattr(self.config, "initializer_factor", 1.0)
        if isinstance(module, CLIPMoERouter):
            init.normal_(module.weight, std=module.config.hidden_size**-0.5 * factor)
        elif isinstance(module, CLIPMoEExperts):
            # As `CLIPMLP`
            config = module.config
            init.normal_(module.up_proj, std=(2 * config.hidden_size) ** -0.5 * factor)
            init.normal_(
                module.down_proj, std=config.hidden_size**-0.5 * (2 * config.num_hidden_layers) ** -0.5 * factor
            )
            init.zeros_(module.up_proj_bias)
            init.zeros_(module.down_proj_bias)
