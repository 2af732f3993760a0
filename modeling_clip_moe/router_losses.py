"""
Scores of routers, and the losses of what they choose.

The axes of tensors and the papers are named in `sparse_moe`.
"""

import inspect
import math
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.utils import ModelOutput

from .transformers_internals import can_return_tuple

Reduce = Callable[[Tensor], Tensor]


def _stack_layers(router_logits: tuple[Tensor, ...]) -> Tensor:
    """Router logits of the L layers, each (B, S, E) or (T, E), as one float32 tensor (L, T, E)."""
    device = router_logits[0].device
    return torch.stack([logits.flatten(0, -2).to(device) for logits in router_logits]).float()


def choose_top_k(probabilities: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
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


def router_scores(logits: Tensor, scoring_func: str) -> Tensor:
    """The scores of experts, in the shape of their logits: "softmax" sums to 1, "sigmoid" is between 0 and 1 for each
    expert on its own (DeepSeek-V3, arXiv:2412.19437, eq. 15)."""
    return logits.sigmoid() if scoring_func == "sigmoid" else logits.softmax(dim=-1)


def router_probabilities(logits: Tensor, scoring_func: str) -> Tensor:
    """The scores, divided by their sum (DeepSeek-V3 eq. 18)."""
    scores = router_scores(logits, scoring_func)
    return scores if scoring_func == "softmax" else normalized(scores)


def normalized(weights: Tensor) -> Tensor:
    """Weights whose last axis sums to 1, or is 0 as before."""
    total = weights.sum(dim=-1, keepdim=True)
    return weights / total.masked_fill(total == 0, 1.0)


def mean_over_tokens(values: Tensor, mask: Tensor | None, reduce: Reduce | None) -> Tensor:
    """Mean (L, N) of `values` (L, T, N) over all tokens but padding, of all processes if `reduce` sums over them."""
    num_layers, num_tokens, num_values = values.shape
    mask = values.new_ones(num_tokens) if mask is None else mask.flatten().to(values)
    sums = (values * mask[:, None]).sum(dim=1)
    sums = torch.cat([sums.flatten(), mask.sum(dim=0, keepdim=True)])
    if reduce is not None:
        sums = reduce(sums)
    return sums[:-1].view(num_layers, num_values) / sums[-1]


def load_balancing_loss(
    router_logits: tuple[Tensor, ...],
    top_k: int,
    mask: Tensor | None = None,
    reduce: Reduce | None = None,
    scoring_func: str = "softmax",
) -> Tensor:
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
        a scalar.
    """
    probabilities = router_probabilities(_stack_layers(router_logits), scoring_func)  # (L, T, E)
    num_experts = probabilities.shape[-1]
    ids = choose_top_k(probabilities, top_k)[1][..., None]  # (L, T, K, 1)
    # Not torch's `one_hot`, which looks at the values: a recorded program cannot
    choices = (ids == torch.arange(num_experts, device=ids.device)).sum(dim=-2)  # (L, T, E)
    means = mean_over_tokens(torch.cat([choices, probabilities], dim=-1), mask, reduce)  # (L, 2 * E)
    chosen, probability = means.split(num_experts, dim=-1)
    return (num_experts / top_k * chosen * probability).sum(dim=-1).mean()


def router_z_loss(
    router_logits: tuple[Tensor, ...], mask: Tensor | None = None, reduce: Reduce | None = None
) -> Tensor:
    """
    Router z-loss: mean over tokens and layers of logsumexp(logits)^2, which keeps the logits small (CLIP-UP eq. 6,
    where G means the logits).

    Args and result as of `load_balancing_loss`.
    """
    z = _stack_layers(router_logits).logsumexp(dim=-1, keepdim=True)  # (L, T, 1)
    return mean_over_tokens(z.square(), mask, reduce).mean()


def router_losses(
    config: PreTrainedConfig, device: torch.device, **towers: tuple[tuple[Tensor, ...] | None, Tensor | None]
) -> Tensor | None:
    """
    The weighted router losses of all towers together, or None if no router was recorded.

    Args:
        config: configuration of the whole model.
        device: of the result.
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


def with_router_losses(
    dense_forward: Callable[..., ModelOutput],
    output_class: type[ModelOutput],
    text_mask: str | None = None,
    vision_mask: str | None = None,
) -> Callable[..., ModelOutput]:
    """
    The `forward` of a whole sparse model: that of its dense class, with router logits and losses.

    Args:
        dense_forward: `forward` of the dense class.
        output_class: the dense outputs and `sparse_moe.RouterLossFields`.
        text_mask, vision_mask: names of the arguments (B, S) that are 1 for a token and 0 for padding, which goes to no
            expert. None: every place is a token.
    """
    signature = inspect.signature(dense_forward)
    *parameters, others = signature.parameters.values()
    flag = inspect.Parameter("output_router_logits", inspect.Parameter.KEYWORD_ONLY, default=None)
    names = [parameter.name for parameter in parameters[1:]]

    @can_return_tuple
    def forward(self, *arguments, output_router_logits: bool | None = None, **inputs) -> output_class:
        """
        The dense model's `forward`, with router logits and router losses.

        Args:
            input_ids: (B, S), tokens of texts.
            pixel_values: (B, channels, height, width), or patches (B, S, values) of a SigLIP 2 with NaFlex, which takes
                `pixel_attention_mask` (B, S) and `spatial_shapes` (B, 2) beside them.
            attention_mask: (B, S), 1 for a token and 0 for padding.
            position_ids: (B, S).
            return_loss: whether to output the contrastive loss.
            interpolate_pos_encoding: whether images may have another size than those of the configuration.
            output_router_logits: whether to output router logits and `aux_loss`, and to add the latter to the loss.
                None: as in the configuration.

        Returns:
            `logits_per_image` (B images, B texts) and its transpose `logits_per_text`, `image_embeds` and `text_embeds`
            (B, D) of norm 1, `loss`, `aux_loss`, and router logits of each sparse layer (B, S, E).
        """
        # sentence-transformers reads the annotation of the outputs
        if output_router_logits is None:
            output_router_logits = self.config.output_router_logits
        options = {"output_router_logits": output_router_logits, "return_dict": True}
        outputs = dense_forward(self, *arguments, **inputs, **options)
        inputs |= dict(zip(names, arguments, strict=False))
        text_logits = outputs.text_model_output.get("router_logits") or None
        vision_logits = outputs.vision_model_output.get("router_logits") or None
        aux_loss = router_losses(
            self.config,
            outputs.text_embeds.device,
            text=(text_logits, inputs.get(text_mask)),
            vision=(vision_logits, inputs.get(vision_mask)),
        )
        if outputs.loss is not None and aux_loss is not None:
            outputs.loss = outputs.loss + aux_loss
        return output_class(
            **outputs, aux_loss=aux_loss, text_router_logits=text_logits, vision_router_logits=vision_logits
        )

    # transformers' Trainer drops columns that no argument is called like
    forward.__signature__ = signature.replace(parameters=[*parameters, flag, others], return_annotation=output_class)
    return forward
