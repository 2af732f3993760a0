"""The papers' architectures as data: which layers are sparse, how many experts they have and how they route."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from clip_moe.engine.messages import did_you_mean

TOWERS = ("text", "vision")
# Fields of an upcycled tower that can be set: how tokens are routed, and a setting of training. All others follow from
# the dense model and the preset
RoutingField = Literal[
    "attention_dropout",
    "capacity_factor",
    "capacity_group_size",
    "eval_capacity_factor",
    "norm_before_capacity",
    "norm_topk_prob",
    "num_experts_per_tok",
    "routed_scaling_factor",
    "router_jitter_noise",
    "scoring_func",
    "use_expert_bias",
]
# Choices of sparse layers, by name: a function from the number of layers to those that are sparse, from 0
LAYERS = {
    "all": lambda number: range(number),
    "all_but_first": lambda number: range(1, number),
    "every_second": lambda number: range(1, number, 2),
    "second_half_every_second": lambda number: [layer for layer in range(number // 2, number) if layer % 2],
}
LayersOfTower = str | Sequence[int]
SparseLayers = LayersOfTower | Mapping[str, LayersOfTower]
Width = int | str


@dataclass(frozen=True)
class Preset:
    """One paper's architecture.

    Args:
        sparse_layers: those of both towers, or tower ("text", "vision") -> its own: a name in `LAYERS`, or a list of
            layers, counted from 0.
        num_experts: E.
        moe_intermediate_size: that of both towers, tower -> its own, or None. A fraction of the FFN such as "1/4" is
            rounded up.
        towers: those that become sparse where nothing else is said.
        Other fields: see `CLIPMoETowerConfig` and `CLIPMoEConfig`.
    """

    sparse_layers: SparseLayers
    num_experts: int
    norm_topk_prob: bool
    num_experts_per_tok: int = 2
    moe_intermediate_size: Width | Mapping[str, Width] | None = None
    num_shared_experts: int = 0
    moe_mlp_bias: bool = True
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    use_expert_bias: bool = False
    capacity_factor: float | None = None
    fusion_gate: bool = False
    router_aux_loss_coef: float = 0.01
    router_z_loss_coef: float = 0.0
    towers: tuple[str, ...] = TOWERS


# Fields that follow from the experts where these are whole FFNs, trained one by one: their number, and these values
OF_EXPERTS = {"num_experts": None, "moe_intermediate_size": None, "num_shared_experts": 0, "moe_mlp_bias": True}
PresetField = Literal[tuple(field.name for field in dataclasses.fields(Preset) if field.name != "towers")]
PRESETS = {
    # CLIP-UP (https://arxiv.org/abs/2502.00965). z-loss: 0.001 in the text, 0.0001 in its Table 3.
    "clip_up": Preset(
        "every_second", num_experts=8, norm_topk_prob=False, capacity_factor=2.0, router_z_loss_coef=0.001
    ),
    # CLIP-UP with FFNs cut in four: four quarters a token cost as much as the dense FFN. Above CLIP-UP in three of four
    # worlds (lab/results/README.md, "At the dense model's price").
    "dense_price": Preset(
        "every_second",
        num_experts=32,
        norm_topk_prob=True,
        num_experts_per_tok=4,
        moe_intermediate_size="1/4",
        router_z_loss_coef=0.001,
    ),
    # CLIP-MoE, Diversified Multiplet Upcycling (https://arxiv.org/abs/2409.19291)
    "clip_moe": Preset("all", num_experts=4, norm_topk_prob=True),
    # CLIP-FMoE: layers 13, 15, ..., 23 of 24 and 7, 9, 11 of 12. Its balance loss (eq. 3) is K at perfect balance and
    # ours is 1, so its coefficient 0.01 is 0.02 here, for K = 2.
    "clip_fmoe": Preset(
        "second_half_every_second", num_experts=4, norm_topk_prob=True, fusion_gate=True, router_aux_loss_coef=0.02
    ),
    # MoE-ViE (https://arxiv.org/abs/2608.17402): four experts a token, one of them shared, cost as much as the dense
    # FFN. 31 + 1 are eight FFNs less one part for all, so that the start is not the dense model: see `inexact_starts`.
    # Its experts have no biases; these keep those of the dense FFN.
    "moe_vie": Preset(
        "all_but_first",
        num_experts=31,
        norm_topk_prob=True,
        num_experts_per_tok=3,
        moe_intermediate_size="1/4",
        num_shared_experts=1,
        scoring_func="sigmoid",
        use_expert_bias=True,
        router_aux_loss_coef=0.0,
        towers=("vision",),
    ),
}


def changed_preset(name: str, changes: Mapping[PresetField, Any]) -> Preset:
    """A preset with other values in some of its fields."""
    return dataclasses.replace(PRESETS[name], **changes)


def expert_width(width: Width | Mapping[str, Width] | None, tower: str, ffn: int) -> int | None:
    """The width of a tower's experts in hidden units; a fraction is one of the FFN's, rounded up."""
    width = width[tower] if isinstance(width, Mapping) else width
    if width is None or type(width) is int:
        return width
    if not isinstance(width, str) or not re.fullmatch(r"\d+(\.\d+|/0*[1-9]\d*)?", width):
        raise ValueError(
            f"moe_intermediate_size is {width!r}: it must be a number of hidden units, or a fraction of the FFN such "
            "as '1/4'"
        )
    return math.ceil(Fraction(width) * ffn)


def sparse_layers(chosen: SparseLayers, tower: str, num_layers: int) -> list[int]:
    """The sparse layers of a tower of `num_layers`, counted from 0, in their order; for `chosen` see `Preset`."""
    chosen = chosen[tower] if isinstance(chosen, Mapping) else chosen
    layers = list(LAYERS[chosen](num_layers)) if chosen in tuple(LAYERS) else chosen
    if not isinstance(layers, list | tuple) or not layers:
        hint = did_you_mean(chosen, LAYERS) if isinstance(chosen, str) else ""
        hint = ", which chooses none" if chosen in tuple(LAYERS) else hint
        raise ValueError(
            f"sparse_layers of the {tower} tower is {chosen!r}{hint}: it must be one of {', '.join(LAYERS)}, or a list "
            f"of layers, of the {num_layers} that the tower has"
        )
    return sorted(layers)
