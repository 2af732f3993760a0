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

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig
from transformers import __version__ as transformers_version
from transformers import initialization as init
from transformers.models.clip.modeling_clip import CLIPMLP
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, logging

from .configuration_clip_moe import CLIPMoETowerConfig
from .dispatch import Dispatch, as_fraction, dispatch, dispatch_within_capacity
from .experts import TAKE_ROWS, CLIPMoEExperts, compiled, fused
from .own_code import OWN_CLASSES, write_own_code
from .self_test import self_test
from .transformers_internals import (
    ConversionOps,
    OutputRecorder,
    PrefixChange,
    WeightConverter,
    maybe_autocast,
    register_checkpoint_conversion_mapping,
)

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


def _top_k(probabilities: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of the last axis, best first, and where they are."""
    if not probabilities.is_cuda:
        return probabilities.topk(top_k, dim=-1)
    # torch's kernel takes as long as the router's product; this becomes a part of the pass that has the probabilities.
    # The balance loss chooses here, too, so that it counts the same choices
    left, ids = probabilities.detach(), []
    for _ in range(top_k):
        ids.append(left.argmax(dim=-1, keepdim=True))
        left = left.masked_fill(torch.arange(left.shape[-1], device=left.device) == ids[-1], -math.inf)
    ids = torch.cat(ids, dim=-1)
    return probabilities.gather(-1, ids), ids


def router_scores(logits: torch.Tensor, scoring_func: str) -> torch.Tensor:
    """The scores of experts, in the shape of their logits: "softmax" sums to 1, "sigmoid" is between 0 and 1 for each
    expert on its own (DeepSeek-V3, arXiv:2412.19437, eq. 15)."""
    return logits.sigmoid() if scoring_func == "sigmoid" else logits.softmax(dim=-1)


def router_probabilities(logits: torch.Tensor, scoring_func: str) -> torch.Tensor:
    """The scores, divided by their sum (DeepSeek-V3 eq. 18)."""
    scores = router_scores(logits, scoring_func)
    return scores if scoring_func == "softmax" else _normalized(scores)


def _normalized(weights: torch.Tensor) -> torch.Tensor:
    """Weights whose last axis sums to 1, or is 0 as before."""
    total = weights.sum(dim=-1, keepdim=True)
    return weights / total.masked_fill(total == 0, 1.0)


def mean_over_tokens(values: torch.Tensor, mask: torch.Tensor | None, reduce: Reduce | None) -> torch.Tensor:
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
    scoring_func: str = "softmax",
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
        scoring_func: of the routers, see `router_probabilities`.

    Returns:
        `torch.Tensor`: a scalar.
    """
    probabilities = router_probabilities(_stack_layers(router_logits), scoring_func)  # (L, T, E)
    num_experts = probabilities.shape[-1]
    choices = _one_hot(_top_k(probabilities, top_k)[1], num_experts).sum(dim=-2)  # (L, T, E)
    means = mean_over_tokens(torch.cat([choices, probabilities], dim=-1), mask, reduce)  # (L, 2 * E)
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
    return mean_over_tokens(z.square(), mask, reduce).mean()


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
    return mean_over_tokens(entropy, mask, reduce).mean()


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
    probabilities = mean_over_tokens(_stack_layers(router_logits).softmax(dim=-1), mask, reduce)  # (L, E)
    logarithms = probabilities.clamp(min=torch.finfo(probabilities.dtype).tiny).log()
    return (math.log(min_experts) - _entropy(probabilities, logarithms)).clamp(min=0).mean()


def _count_groups(batch_size: int, group_size: int | None) -> int:
    group_size = group_size or batch_size
    if batch_size % group_size != 0:
        raise ValueError(
            f"capacity_group_size={group_size} does not divide the batch of {batch_size} sequences. Change either."
        )
    return batch_size // group_size


class CLIPMoERouter(nn.Module):
    """
    Scores the experts for each token, chooses K, drops what exceeds their capacity, weighs the rest. In float32.

    Each of the four is a method, which a subclass may replace: `score`, `choose`, `drop` and `weigh`.
    """

    def __init__(self, config: CLIPMoETowerConfig):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        # Training moves it, see `training.expert_bias`
        self.register_buffer("expert_bias", torch.zeros(config.num_experts) if config.use_expert_bias else None)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        bias = self.expert_bias
        super()._apply(fn, recurse)
        if bias is not None and self.expert_bias.dtype != bias.dtype:  # it moves by steps that bfloat16 would lose
            self.expert_bias = bias.to(self.expert_bias.device)
        return self

    def extra_repr(self) -> str:
        num_experts, hidden_size = self.weight.shape
        return f"{hidden_size=}, {num_experts=}, num_experts_per_tok={self.config.num_experts_per_tok}"

    def forward(
        self, hidden_states: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Dispatch]:
        """
        Args:
            hidden_states: (B, S, D).
            mask: (B, S), 1 for a token and 0 for padding, which goes to no expert.

        Returns:
            logits (B, S, E), weights (B, S, K), expert ids (B, S, K), best first, and the rows of the experts. A choice
            that capacity drops, and those of padding, have weight 0 and id E.
        """
        noise = self.config.router_jitter_noise if self.training else 0.0
        if noise > 0:
            hidden_states = hidden_states * torch.empty_like(hidden_states).uniform_(1 - noise, 1 + noise)
        factor = self.config.capacity_factor if self.training else self.config.eval_capacity_factor
        return _route(hidden_states, self, mask, None if factor is None else as_fraction(factor))

    def score(self, logits: torch.Tensor) -> torch.Tensor:
        """The scores (B, S, E) of all experts."""
        return router_scores(logits, self.config.scoring_func)

    def choose(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The scores of the K experts of each token, and their ids, (B, S, K), best first. A bias counts only for which
        they are (arXiv:2408.15664, eq. 3)."""
        if self.expert_bias is None:
            return _top_k(scores, self.config.num_experts_per_tok)
        ids = _top_k(scores + self.expert_bias.float(), self.config.num_experts_per_tok)[1]
        return scores.gather(-1, ids), ids

    def drop(
        self, scores: torch.Tensor, ids: torch.Tensor, factor: tuple[int, int] | None
    ) -> tuple[torch.Tensor, Dispatch]:
        """The ids, E for a choice that exceeds the capacity of its expert, and the rows of the experts.

        Args:
            scores, ids: of `choose`; ids are E for padding.
            factor: the capacity's; None: there is none.
        """
        num_experts = self.config.num_experts
        if factor is None:
            return ids, dispatch(ids.flatten(0, 1), num_experts)
        priorities = scores.flatten(0, 1) if self.config.token_drop_policy == "probs" else None
        num_groups = _count_groups(ids.shape[0], self.config.capacity_group_size)
        rows, kept = dispatch_within_capacity(ids.flatten(0, 1), num_experts, factor, num_groups, priorities)
        return ids.masked_fill(~kept.view_as(ids), num_experts), rows

    def weigh(self, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The weights (B, S, K) of the choices that `drop` kept."""
        config = self.config
        if config.norm_topk_prob and config.norm_before_capacity:
            scores = _normalized(scores)
        weights = scores * (ids < config.num_experts)
        if config.norm_topk_prob and not config.norm_before_capacity:
            # The kept choices sum to 1 "even when some tokens are dropped" (CLIP-UP, "Normalize gating weights before
            # or after routing")
            weights = _normalized(weights)
        return weights if config.routed_scaling_factor == 1 else weights * config.routed_scaling_factor


@fused
def _route(
    hidden_states: torch.Tensor, router: CLIPMoERouter, mask: torch.Tensor | None, factor: tuple[int, int] | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Dispatch]:
    with maybe_autocast(device_type=hidden_states.device.type, enabled=False):
        logits = F.linear(hidden_states.float(), router.weight.float())  # (B, S, E)
    scores, ids = router.choose(router.score(logits))  # (B, S, K)
    if mask is not None:
        ids = ids.masked_fill(~mask.bool()[..., None], router.config.num_experts)
    ids, rows = router.drop(scores, ids, factor)
    return logits, router.weigh(scores, ids), ids, rows


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


class CLIPMoESharedExperts(CLIPMLP):
    """The experts that compute every token, as one FFN of all their hidden units (DeepSeekMoE, arXiv:2401.06066)."""

    def __init__(self, config: CLIPMoETowerConfig):
        super().__init__(config)
        width = config.num_shared_experts * config.expert_size
        self.fc1 = nn.Linear(config.hidden_size, width)
        self.fc2 = nn.Linear(width, config.hidden_size)


class CLIPMoESparseMoeBlock(nn.Module):
    """Stands where CLIP has its FFN: router and experts, shared experts, and with `fusion_gate` the FFN beside them."""

    def __init__(self, config: CLIPMoETowerConfig):
        super().__init__()
        self.config, self.num_experts = config, config.num_experts
        self.router = (config.router_class or CLIPMoERouter)(config)
        self.experts = (config.experts_class or CLIPMoEExperts)(config)
        # Lets transformers' implementations accept id E, which they know from expert parallelism
        self.experts._is_expert_parallel = True
        self.shared_experts = CLIPMoESharedExperts(config) if config.num_shared_experts else None
        self.base = CLIPMLP(config) if config.fusion_gate else None
        self.fusion_gate = CLIPMoEFusionGate(config) if config.fusion_gate else None

    def forward(self, hidden_states: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        _, weights, ids, rows = self.router(hidden_states, mask)
        num_experts = self.num_experts
        if self.experts.num_experts < num_experts:
            # Expert parallelism sends every choice to some process and knows no id E. What is dropped has weight 0, so
            # any expert will do: a different one for each
            anywhere = torch.arange(ids.numel(), device=ids.device).view_as(ids) % num_experts
            ids, rows = torch.where(ids < num_experts, ids, anywhere), None
        arguments = hidden_states.flatten(0, 1), ids.flatten(0, 1), weights.flatten(0, 1)
        if rows is not None and self.config._experts_implementation in TAKE_ROWS:
            arguments += (rows,)
        output = self.experts(*arguments)
        output = output.view_as(hidden_states)
        if self.shared_experts is not None:
            output = output + self.shared_experts(hidden_states)
        if self.fusion_gate is not None:
            output = self.fusion_gate(hidden_states, self.base(hidden_states), output)
        return output


@dataclass
class RouterFields:
    """
    What the outputs of towers have beside those of dense ones.

    Args:
        router_logits: with `output_router_logits=True`, one tensor (B, S, E) a sparse layer.
        expert_ids: with `output_expert_ids=True`, one tensor (B, S, K) a sparse layer: the experts that computed each
            token, best first, and E for a choice that capacity dropped and for padding.
    """

    router_logits: tuple[torch.Tensor, ...] | None = None
    expert_ids: tuple[torch.Tensor, ...] | None = None


@dataclass
class RouterLossFields:
    """
    What the outputs of whole models have beside those of dense ones, with `output_router_logits=True`.

    Args:
        aux_loss: scalar, the weighted router losses of all towers with sparse layers, which `loss` includes.
        text_router_logits, vision_router_logits: one tensor (B, S, E) a sparse layer. None for a dense tower.
    """

    aux_loss: torch.Tensor | None = None
    text_router_logits: tuple[torch.Tensor, ...] | None = None
    vision_router_logits: tuple[torch.Tensor, ...] | None = None


class SparseEncoderLayer:
    """An encoder layer of a family, with a sparse block instead of the FFN in the layers of `config.moe_layers`.

    It stands before the family's own layer, of which it takes the attention, the norms and the FFN of dense layers.
    """

    # Set by `compile_parts`
    is_compiled = False

    def __init__(self, config, layer_idx: int):
        super().__init__(config)
        self.is_sparse = layer_idx in config.moe_layers
        if self.is_sparse:
            self.mlp = CLIPMoESparseMoeBlock(config)

    def compile_parts(self) -> None:
        """
        Compiles a dense layer, and all of a sparse one but router and experts: transformers records the router by a
        hook, at which a compiled layer would break, and both are fused by themselves. Hooks of the attention are no
        longer called, but for eager attention, whose weights they record.
        """
        self.is_compiled = True
        dense_parts = (self.mlp.shared_experts, self.mlp.base, self.mlp.fusion_gate) if self.is_sparse else ()
        for module in dense_parts:
            if module is not None:
                module.compile()

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
        part = _attend if self.is_sparse else _dense_layer
        part = compiled(part) if self.is_compiled else part
        if not self.is_sparse:
            return part(self, hidden_states, attention_mask, **kwargs)
        hidden_states, normed = part(self, hidden_states, attention_mask, **kwargs)
        return hidden_states + self.mlp(normed, mask)


def _attend(
    layer: SparseEncoderLayer, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, **kwargs
) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer up to its FFN: what that is added to, and what it takes. Layers share the compiled function."""
    has_weights = layer.self_attn.config._attn_implementation == "eager"
    attention = layer.self_attn.forward if layer.is_compiled and not has_weights else layer.self_attn
    update, _ = attention(hidden_states=layer.layer_norm1(hidden_states), attention_mask=attention_mask, **kwargs)
    hidden_states = hidden_states + update
    return hidden_states, layer.layer_norm2(hidden_states)


def _dense_layer(layer: SparseEncoderLayer, *inputs: torch.Tensor | None, **kwargs) -> torch.Tensor:
    hidden_states, normed = _attend(layer, *inputs, **kwargs)
    return hidden_states + layer.mlp(normed)


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
    config: PreTrainedConfig,
    device: torch.device,
    **towers: tuple[tuple[torch.Tensor, ...] | None, torch.Tensor | None],
) -> torch.Tensor | None:
    """
    The weighted router losses of all towers together, or None if no router was recorded.

    Args:
        config: configuration of the whole model.
        device: where the result lies.
        towers: by name, "text" or "vision": router logits of each layer, and the mask of padding.
    """
    losses = []
    for tower, (router_logits, mask) in towers.items():
        if router_logits:
            tower_config = getattr(config, f"{tower}_config")
            top_k, scoring_func = tower_config.num_experts_per_tok, tower_config.scoring_func
            balance = load_balancing_loss(router_logits, top_k, mask, scoring_func=scoring_func)
            z = router_z_loss(router_logits, mask)
            losses.append((config.router_aux_loss_coef * balance + config.router_z_loss_coef * z).to(device))
    return sum(losses) if losses else None


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


class EncodeMixin:
    """What whole models have: embeddings as tensors, where `get_text_features` and `get_image_features` give outputs of
    transformers, and the self-test of a published folder."""

    # What CLIP's files hold without an axis
    _scalars = ("logit_scale",)

    def self_test(self, revision: str | None = None) -> dict[str, float]:
        """Raises ValueError where this does not compute what it did when it was published; see `self_test.py`."""
        return self_test(self, revision=revision)

    def encode_text(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Embeddings (B, D) of texts (B, S), see `get_text_features`."""
        return self.get_text_features(input_ids, attention_mask, return_dict=True).pooler_output

    def encode_image(self, pixel_values: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        """Embeddings (B, D) of images, see `get_image_features`."""
        return self.get_image_features(pixel_values, return_dict=True, **kwargs).pooler_output


# What the names of a whole model's weights start with in files; a tower's own classes ignore the rest
PARTS = ("text_model.", "vision_model.", "text_projection.", "visual_projection.", "classifier.", "logit_")


class OneAxis(ConversionOps):
    """Gives a scalar one axis: CLIP's files hold `logit_scale` without one."""

    def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
        (tensor,) = input_dict.values()
        tensor = tensor[0] if isinstance(tensor, list) else tensor
        return {target_patterns[0]: tensor.reshape(-1)}

    @property
    def reverse_op(self):
        return self


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
    _scalars = ()
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
        if any(name.endswith("expert_bias") for name, _ in self.named_buffers()):
            # It moves by steps that lower precision would lose
            self._keep_in_fp32_modules_strict = {*(self._keep_in_fp32_modules_strict or ()), "expert_bias"}
        # Not those of its towers, which transformers adds: each ignores the other one
        ignored = type(self)._keys_to_ignore_on_load_unexpected or []
        if self._tower_prefix:
            ignored = [f"^{re.escape(part)}" for part in PARTS if part != self._tower_prefix]
        self._keys_to_ignore_on_load_unexpected = {*ignored, rf"\.mlp\.{re.escape(SPARSE_LAYER_MARK)}$"}

    def _register_conversions(self):
        # transformers looks conversions up by class name: without this, a subclass would load random weights. Not when
        # a class is made, since the first registration builds the table of all models
        changes = self._prefix_changes()
        changes += [WeightConverter([name], [name], [OneAxis()]) for name in self._scalars]
        register_checkpoint_conversion_mapping(type(self).__name__, changes, overwrite=True)

    def _prefix_changes(self) -> list[PrefixChange]:
        """How this class's weights differ from those in a file."""
        return [PrefixChange(prefix_to_remove=self._tower_prefix[:-1])] if self._tower_prefix else []

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, output_loading_info=False, **kwargs):
        """
        Loads a model as `PreTrainedModel.from_pretrained` does, but never a partly random one.

        Raises:
            ValueError: if the checkpoint lacks weights of this model or holds weights that are no part of a CLIP; if
                it is split in a way that this transformers gets wrong; if it is to have a shared encoder, but its
                towers differ or it is split, over processes or by a device map.
        """
        split = kwargs.get("distributed_config")
        if getattr(split, "enable_expert_parallel", False) and not hasattr(split, "ep_size"):
            raise ValueError(
                f"transformers {transformers_version} splits experts in a way of its own. Leave out "
                "enable_expert_parallel, or use transformers 5.19 or newer."
            )
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
        except (IndexError, RuntimeError) as error:  # of accelerate and torch, where a device map splits tied weights
            known = {name: kwargs[name] for name in ("revision", "subfolder", "cache_dir", "token") if name in kwargs}
            config = kwargs.get("config") or cls.config_class.from_pretrained(pretrained_model_name_or_path, **known)
            if kwargs.get("device_map") is None or not getattr(config, "shared_encoder", False):
                raise
            raise ValueError(
                f"{pretrained_model_name_or_path} has shared_encoder=True, which has to fit into one device, but "
                f"device_map={kwargs['device_map']!r} failed ({type(error).__name__}). Raise max_memory, or name one "
                "device."
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

    def save_pretrained(self, save_directory, *args, **kwargs):
        """As transformers', and writes the code of a registered class so that it loads without this package."""
        super().save_pretrained(save_directory, *args, **kwargs)
        own = next((OWN_CLASSES[parent] for parent in type(self).__mro__ if parent in OWN_CLASSES), None)
        if own is not None and kwargs.get("is_main_process", True):
            write_own_code(own, Path(save_directory))

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
            self._weight_conversions = [*used, *self._prefix_changes()]
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
        for name in (f"{prefix}{scalar}" for scalar in self._scalars):
            if name in state_dict:
                state_dict[name] = state_dict[name].reshape(-1)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

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
            if module.expert_bias is not None:
                init.zeros_(module.expert_bias)
        elif isinstance(module, CLIPMoEExperts):
            # As `CLIPMLP`
            config = module.config
            init.normal_(module.up_proj, std=(2 * config.hidden_size) ** -0.5 * factor)
            init.normal_(
                module.down_proj, std=config.hidden_size**-0.5 * (2 * config.num_hidden_layers) ** -0.5 * factor
            )
            init.zeros_(module.up_proj_bias)
            init.zeros_(module.down_proj_bias)
