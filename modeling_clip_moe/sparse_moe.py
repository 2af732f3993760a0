"""
The sparse block of CLIP-UP, CLIP-MoE and CLIP-FMoE, and the encoder layer around it.

Nothing here is CLIP's alone: every encoder of transformers takes the block whose layers have an FFN `mlp`, of `fc1` and
`fc2` or a gated one.

Axes of the tensors, as used in the comments:
    B  sequences of the batch (an image or a text)      E  experts of a layer
    S  tokens of a sequence, with its padding           K  experts per token
    T  all tokens, B * S                                L  sparse layers of a tower
    D  hidden size                                      I  intermediate size of an expert

Papers:
    CLIP-UP    Wang et al., arXiv:2502.00965          CLIP-FMoE  Tran et al., openreview.net/forum?id=RErUA45pI9
    CLIP-MoE   Zhang et al., arXiv:2409.19291         LIMoE      Mustafa et al., arXiv:2206.02770
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.clip.modeling_clip import CLIPMLP
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs

from .configuration_clip_moe import CLIPMoETowerConfig
from .dispatch import Dispatch, as_fraction, dispatch, dispatch_within_capacity
from .expert_kernels import compiled, fused
from .experts import TAKE_ROWS, CLIPMoEExperts
from .router_losses import choose_top_k, normalized, router_scores
from .transformers_internals import OutputRecorder, maybe_autocast


class CLIPMoERouter(nn.Module):
    """Scores the experts for each token, chooses K, drops what exceeds their capacity, weighs the rest, in float32. A
    subclass may replace each of these methods."""

    def __init__(self, config: CLIPMoETowerConfig):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        # Moved after each training step towards balanced load
        self.register_buffer("expert_bias", torch.zeros(config.num_experts) if config.use_expert_bias else None)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        bias = self.expert_bias
        super()._apply(fn, recurse)
        if bias is not None and self.expert_bias.dtype != bias.dtype:  # it moves by steps that bfloat16 would lose
            self.expert_bias = bias.to(self.expert_bias.device)
        return self

    def forward(self, hidden_states: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Dispatch]:
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

    def score(self, logits: Tensor) -> Tensor:
        """The scores (B, S, E) of all experts."""
        return router_scores(logits, self.config.scoring_func)

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The scores of the K experts of each token, and their ids, (B, S, K), best first. A bias counts only for which
        they are (arXiv:2408.15664, eq. 3)."""
        if self.expert_bias is None:
            return choose_top_k(scores, self.config.num_experts_per_tok)
        ids = choose_top_k(scores + self.expert_bias.float(), self.config.num_experts_per_tok)[1]
        return scores.gather(-1, ids), ids

    def drop(self, scores: Tensor, ids: Tensor, factor: tuple[int, int] | None) -> tuple[Tensor, Dispatch]:
        """The ids, E for a choice that exceeds the capacity of its expert, and the rows of the experts. Scores and ids
        are those of `choose`, with id E for padding; a factor of None is no capacity."""
        num_experts = self.config.num_experts
        if factor is None:
            return ids, dispatch(ids.flatten(0, 1), num_experts)
        batch_size, group_size = ids.shape[0], self.config.capacity_group_size or ids.shape[0]
        if batch_size % group_size != 0:
            raise ValueError(
                f"capacity_group_size={group_size} does not divide the batch of {batch_size} sequences. Change either."
            )
        rows, kept = dispatch_within_capacity(ids.flatten(0, 1), num_experts, factor, batch_size // group_size)
        return ids.masked_fill(~kept.view_as(ids), num_experts), rows

    def weigh(self, scores: Tensor, ids: Tensor) -> Tensor:
        """The weights (B, S, K) of the choices that `drop` kept."""
        config = self.config
        if config.norm_topk_prob and config.norm_before_capacity:
            scores = normalized(scores)
        weights = scores * (ids < config.num_experts)
        if config.norm_topk_prob and not config.norm_before_capacity:
            # The kept choices sum to 1 "even when some tokens are dropped" (CLIP-UP, "Normalize gating weights before
            # or after routing")
            weights = normalized(weights)
        return weights if config.routed_scaling_factor == 1 else weights * config.routed_scaling_factor


@fused
def _route(
    hidden_states: Tensor, router: CLIPMoERouter, mask: Tensor | None, factor: tuple[int, int] | None
) -> tuple[Tensor, Tensor, Tensor, Dispatch]:
    with maybe_autocast(device_type=hidden_states.device.type, enabled=False):
        logits = F.linear(hidden_states.float(), router.weight.float())  # (B, S, E)
    scores, ids = router.choose(router.score(logits))  # (B, S, K)
    if mask is not None:
        ids = ids.masked_fill(~mask.bool()[..., None], router.config.num_experts)
    ids, rows = router.drop(scores, ids, factor)
    return logits, router.weigh(scores, ids), ids, rows


class CLIPMoEFusionGate(nn.Module):
    """How much of each output channel comes from the base FFN and how much from the experts (CLIP-FMoE sec. 4.3). Its
    Linear has no bias, as the parameter counts in the paper's Table 5 imply."""

    def __init__(self, config: CLIPMoETowerConfig):
        super().__init__()
        self.proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor, base: Tensor, moe: Tensor) -> Tensor:
        gate = self.proj(hidden_states).sigmoid()  # (B, S, D)
        # G * base + (1 - G) * moe, written so that it is exact where the two are equal: at the start
        return moe + gate * (base - moe)


class CLIPMoEGatedMLP(nn.Module):
    """A gated FFN, see `use_gated_mlp`. The width is `intermediate_size` if none is given."""

    def __init__(self, config: CLIPMoETowerConfig, width: int | None = None, bias: bool = True):
        super().__init__()
        self.config, width = config, width or config.intermediate_size
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=bias)
        self.up_proj = nn.Linear(config.hidden_size, width, bias=bias)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


def _shared_experts(config: CLIPMoETowerConfig) -> nn.Module:
    """The experts that compute every token, as one FFN of all their hidden units (DeepSeekMoE, arXiv:2401.06066)."""
    width = config.num_shared_experts * config.expert_size
    if config.use_gated_mlp:
        return CLIPMoEGatedMLP(config, width, config.moe_mlp_bias)
    ffn = CLIPMLP(config)
    ffn.fc1 = nn.Linear(config.hidden_size, width, bias=config.moe_mlp_bias)
    ffn.fc2 = nn.Linear(width, config.hidden_size, bias=config.moe_mlp_bias)
    return ffn


class CLIPMoESparseMoeBlock(nn.Module):
    """Stands where CLIP has its FFN: router and experts, shared experts, and with `fusion_gate` the FFN beside them."""

    def __init__(self, config: CLIPMoETowerConfig):
        super().__init__()
        self.config, self.num_experts = config, config.num_experts
        self.router = (config.router_class or CLIPMoERouter)(config)
        self.experts = (config.experts_class or CLIPMoEExperts)(config)
        # What transformers' implementations ask for. They know id E from expert parallelism
        self.experts._is_expert_parallel = True
        self.experts.has_gate, self.experts.has_bias = config.use_gated_mlp, config.moe_mlp_bias
        self.shared_experts = _shared_experts(config) if config.num_shared_experts else None
        dense_ffn = CLIPMoEGatedMLP if config.use_gated_mlp else CLIPMLP
        self.base = dense_ffn(config) if config.fusion_gate else None
        self.fusion_gate = CLIPMoEFusionGate(config) if config.fusion_gate else None

    def forward(self, hidden_states: Tensor, mask: Tensor | None = None) -> Tensor:
        _, weights, ids, rows = self.router(hidden_states, mask)
        num_experts = self.num_experts
        if self.experts.num_experts < num_experts:
            # Expert parallelism sends every choice to some process and knows no id E. What is dropped has weight 0, so
            # any expert will do: a different one for each
            anywhere = torch.arange(ids.numel(), device=ids.device).view_as(ids) % num_experts
            ids, rows = torch.where(ids < num_experts, ids, anywhere), None
        tokens, ids, weights = hidden_states.flatten(0, 1), ids.flatten(0, 1), weights.flatten(0, 1)
        if rows is not None and self.config._experts_implementation in TAKE_ROWS:
            output = self.experts(tokens, ids, weights, rows)
        else:
            output = self.experts(tokens, ids, weights)
        output = output.view_as(hidden_states)
        if self.shared_experts is not None:
            output = output + self.shared_experts(hidden_states)
        if self.fusion_gate is not None:
            output = self.fusion_gate(hidden_states, self.base(hidden_states), output)
        return output


@dataclass
class RouterFields:
    """
    Outputs of towers beside those of dense ones.

    Args:
        router_logits: with `output_router_logits=True`, one tensor (B, S, E) a sparse layer.
        expert_ids: with `output_expert_ids=True`, one tensor (B, S, K) a sparse layer: the experts that computed each
            token, best first, and E for a choice that capacity dropped and for padding.
    """

    router_logits: tuple[Tensor, ...] | None = None
    expert_ids: tuple[Tensor, ...] | None = None


@dataclass
class RouterLossFields:
    """
    Outputs of whole models beside those of dense ones, with `output_router_logits=True`.

    Args:
        aux_loss: scalar, the weighted router losses of all towers with sparse layers, which `loss` includes.
        text_router_logits, vision_router_logits: one tensor (B, S, E) a sparse layer. None for a dense tower.
    """

    aux_loss: Tensor | None = None
    text_router_logits: tuple[Tensor, ...] | None = None
    vision_router_logits: tuple[Tensor, ...] | None = None


class SparseEncoderLayer:
    """An encoder layer with a sparse block instead of the FFN in the layers of `config.moe_layers`. It stands before
    the family's own layer, whose attention, norms and dense FFN it takes."""

    # Set by `compile_parts`
    is_compiled = False

    def __init__(self, config, layer_idx: int):
        super().__init__(config)
        self.is_sparse = layer_idx in config.moe_layers
        if self.is_sparse:
            self.mlp = CLIPMoESparseMoeBlock(config)
        elif config.use_gated_mlp:
            self.mlp = CLIPMoEGatedMLP(config)

    def compile_parts(self) -> None:
        """Compiles a dense layer, and all of a sparse one but router and experts: transformers records the router by a
        hook, at which a compiled layer would break, and both are fused by themselves. Hooks of the attention are called
        for eager attention alone, whose weights they record."""
        self.is_compiled = True
        dense_parts = (self.mlp.shared_experts, self.mlp.base, self.mlp.fusion_gate) if self.is_sparse else ()
        for module in dense_parts:
            if module is not None:
                module.compile()

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        mask: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Tensor:
        """
        Args:
            hidden_states: (B, S, D).
            attention_mask: in the form of the attention implementation.
            mask: (B, S), 1 for a token and 0 for padding, which no expert computes.
        """
        part = _attend if self.is_sparse else _dense_layer
        part = compiled(part) if self.is_compiled else part
        if not self.is_sparse:
            return part(self, hidden_states, attention_mask, **kwargs)
        hidden_states, normed = part(self, hidden_states, attention_mask, **kwargs)
        return hidden_states + self.mlp(normed, mask)


def _attend(
    layer: SparseEncoderLayer, hidden_states: Tensor, attention_mask: Tensor | None, **kwargs
) -> tuple[Tensor, Tensor]:
    """A layer up to its FFN: the residual and the input of the FFN. Layers share the compiled function."""
    has_weights = layer.self_attn.config._attn_implementation == "eager"
    attention = layer.self_attn.forward if layer.is_compiled and not has_weights else layer.self_attn
    update, _ = attention(hidden_states=layer.layer_norm1(hidden_states), attention_mask=attention_mask, **kwargs)
    hidden_states = hidden_states + update
    return hidden_states, layer.layer_norm2(hidden_states)


def _dense_layer(layer: SparseEncoderLayer, hidden_states: Tensor, attention_mask: Tensor | None, **kwargs) -> Tensor:
    hidden_states, normed = _attend(layer, hidden_states, attention_mask, **kwargs)
    return hidden_states + layer.mlp(normed)


# Further outputs of a model with routers
ROUTER_OUTPUTS = {
    "router_logits": OutputRecorder(CLIPMoERouter, index=0),
    "expert_ids": OutputRecorder(CLIPMoERouter, index=2),
}
