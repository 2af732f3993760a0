"""Takes one expert out of a CLIP-MoE: the dense CLIP in which every token goes through that expert."""

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from typing_extensions import TypedDict

from clip_moe.conversion import upcycle
from clip_moe.conversion.checkpoints import load_dense, load_sparse
from clip_moe.conversion.rules import Rule, apply_rules
from clip_moe.conversion.verification import TOLERANCE, compare
from clip_moe.engine.files import read_record
from clip_moe.engine.messages import join_names
from clip_moe.engine.provenance import weights_fingerprint
from modeling_clip_moe.configuration_clip_moe import CLIPMoETowerConfig, SparseMoEConfig
from modeling_clip_moe.dispatch import dispatch
from modeling_clip_moe.families import family_of
from modeling_clip_moe.loading import WholeModelMixin

BASE = "base"


def dense_class(config: SparseMoEConfig) -> type[PreTrainedModel]:
    """The class of the dense model: the family's own; for gated FFNs, which those of transformers lack, the sparse one
    without sparse layers."""
    family = family_of(config)
    is_gated = any(getattr(tower, "use_gated_mlp", False) for _, tower in upcycle.towers_of(config).values())
    return family.sparse if is_gated and not family.has_own_dense else family.dense


def dense_config(config: SparseMoEConfig) -> PreTrainedConfig:
    """The config of the dense model: its own fields of the sparse one."""
    config_class = dense_class(config).config_class
    left_out = upcycle.SPARSE_FIELDS - ({"use_gated_mlp"} if isinstance(config, config_class) else set())
    fields = upcycle.architecture(config, config_class)
    for name in config.sub_configs:
        tower_fields = upcycle.architecture(getattr(config, name), type(getattr(config, name)))
        fields[name] = {field: value for field, value in tower_fields.items() if field not in left_out}
    return config_class(**fields)


# Factors of an expert's last layer: one number, or tower ("text", "vision") -> layer, from 0 -> number
Scale = float | Mapping[str, Mapping[str, float]]


def layer_scales(config: SparseMoEConfig, expert: int | str, scale: Scale | None) -> dict[str, float]:
    """Regular expression of each sparse FFN -> its scale, text tower first: 1 for the base FFN; with normalized weights
    the `routed_scaling_factor` that an FFN's experts share, whatever `scale` says."""
    scales = {}
    for tower, (prefix, tower_config) in upcycle.towers_of(config).items():
        for layer in sorted(tower_config.moe_layers):
            value = 1.0 if expert == BASE else float(tower_config.routed_scaling_factor)
            if expert != BASE and not tower_config.norm_topk_prob:
                value = scale.get(tower, {}).get(str(layer)) if isinstance(scale, Mapping) else scale
                if isinstance(scale, float | int):  # of each expert of an FFN
                    value = scale * upcycle.counted_as_one(tower_config)
                if value is None:
                    raise ValueError(
                        "the weights of a token's experts do not sum to 1 (norm_topk_prob is False), and layer "
                        f"{layer} of the {tower} tower has no scale: set scale to an analyze stage of this model, or "
                        "to 1 right after upcycling"
                    )
            scales[rf"{prefix}encoder\.layers\.{layer}\.mlp"] = value
    return scales


def extraction_rules(config: SparseMoEConfig, expert: int | str, scale: Scale | None = None) -> list[Rule]:
    """Rules from a sparse model to the dense one that keep one expert, or the base FFN, of every sparse layer."""
    is_scalar = not family_of(config).sigmoid and not issubclass(dense_class(config), WholeModelMixin)
    rules = upcycle.kept_rules(config, () if is_scalar else (1,))
    for ffn, layer_scale in layer_scales(config, expert, scale).items():
        rules.append(Rule(rf"{ffn}\.(router|fusion_gate)\..*", (), reason="a dense FFN has no routing"))
        if expert == BASE:
            rules.append(Rule(rf"({ffn})\.base\.(.*)", r"\1.\2"))
            rules.append(Rule(rf"{ffn}\.(shared_)?experts\..*", (), reason="the base FFN was chosen"))
            continue
        rules.append(Rule(rf"{ffn}\.base\..*", (), reason="an expert was chosen"))
        (tower,) = (tower for prefix, tower in upcycle.towers_of(config).values() if ffn.startswith(prefix))
        experts_per_ffn = upcycle.counted_as_one(tower)
        if experts_per_ffn < (parts := upcycle.experts_of_ffn(tower)):
            raise ValueError(
                f"{tower.base_config_key or 'vision_config'}: {parts} experts make an FFN, but tokens have "
                f"{tower.num_experts_per_tok} of {tower.num_experts}, whose weights sum to "
                f"{tower.routed_scaling_factor:g}, not {parts} as after upcycling: use the sparse model as it is"
            )
        chosen = slice(expert * experts_per_ffn, (expert + 1) * experts_per_ffn)
        for expert_tensor, names in upcycle.expert_tensors(tower).items():
            if expert_tensor.endswith("_bias") and not tower.moe_mlp_bias:
                continue
            factor = layer_scale / experts_per_ffn if expert_tensor.startswith("down_") else 1.0
            join = functools.partial(_whole_ffn, expert_tensor, chosen, factor, len(names), tower)
            sources = rf"({ffn})\.(?:experts\.{expert_tensor}|shared_experts\.(?:{'|'.join(map(re.escape, names))}))"
            targets = [rf"\1.{name}" for name in names]
            targets += [] if tower.moe_mlp_bias else [target.replace(".weight", ".bias") for target in targets]
            rules.append(Rule(sources, tuple(targets), join, merges=True))
    return rules


def _whole_ffn(
    expert_tensor: str, chosen: slice, factor: float, number: int, tower: CLIPMoETowerConfig, tensors: list[Tensor]
) -> list[Tensor]:
    """The `number` tensors of a dense FFN that the `chosen` experts and the shared ones, if any, are together, and
    biases of zero where these have none. `tensors`: that of the experts, then the shared ones'."""
    (experts, *shared), size = tensors, tower.intermediate_size
    stacks, axis = (experts[chosen] * factor).chunk(number, dim=1), 1 if expert_tensor == "down_proj" else 0
    whole = []
    for index, stack in enumerate(stacks):
        parts = [*shared[index : index + 1], *stack]
        if expert_tensor == "down_proj_bias":
            whole.append(sum(parts))
            continue
        units = torch.cat(parts, dim=axis)
        units, filled = units.split([size, units.shape[axis] - size], dim=axis)
        if filled.any():
            raise ValueError(
                f"{filled.shape[axis]} hidden units that filled up the last expert are no longer zero, so that an FFN "
                f"of {size} lacks them: use the sparse model as it is"
            )
        whole.append(units)
    return whole if tower.moe_mlp_bias else [*whole, *(weight.new_zeros(len(weight)) for weight in whole)]


def extract(sparse: PreTrainedModel, expert: int | str, scale: Scale | None = None) -> PreTrainedModel:
    """Builds the dense CLIP of one expert (from 0), or of the base FFN ("base"), in the sparse model's dtype; for
    `scale` see `layer_scales`. Of narrow experts, those that make an FFN count as one, with the shared ones."""
    require_expert([block.config for block in upcycle.sparse_blocks(sparse).values()], expert)
    rules = extraction_rules(sparse.config, expert, scale)
    dense = dense_class(sparse.config)(dense_config(sparse.config)).to(sparse.dtype)
    dense.load_state_dict(apply_rules(sparse.state_dict(), dense.state_dict(), rules))
    return dense.eval()


def require_expert(towers: Sequence[CLIPMoETowerConfig], expert: int | str) -> None:
    """Raises a ValueError where a sparse tower has no such expert."""
    for tower in towers:
        parts = upcycle.counted_as_one(tower)
        known = [*map(str, range(tower.num_experts // parts)), *([BASE] if tower.fusion_gate else [])]
        if str(expert) not in known:
            narrow = f", since {parts} narrow experts count as one" if parts > 1 else ""
            raise ValueError(f"{tower.base_config_key}: there is no expert {expert}, only {join_names(known)}{narrow}")


# Logits of fusion gates whose sigmoid is 1, only the base, and 0, only the experts
ONLY_BASE, ONLY_EXPERTS = 100.0, -100.0


def set_fusion_gates(sparse: PreTrainedModel, logit: float) -> None:
    """Makes all fusion gates of this model give sigmoid(logit) from now on, whatever the token. No weight changes."""
    for name, module in sparse.named_modules():
        if name.endswith(".mlp.fusion_gate.proj"):
            module.register_forward_hook(lambda _, inputs, logits: torch.full_like(logits, logit))


@contextlib.contextmanager
def force_expert(sparse: PreTrainedModel, expert: int, scale: float | Sequence[float] | None = None) -> Iterator[None]:
    """Within the block, every token goes through this expert alone, whatever its capacity, in all sparse layers
    (CLIP-MoE Table 1). Narrow experts that make an FFN count as one. A fusion gate still mixes the base FFN in.

    The expert gets the weight that the K experts of a token have together: with equal experts, nothing changes.

    Args:
        sparse: a whole model, or a tower.
        expert: its number, from 0.
        scale: its weight: a number, or one for each sparse layer, those of the text tower first. None: for each token
            the sum of the K weights that the router gives before any is dropped, which is `routed_scaling_factor` with
            `norm_topk_prob`.
    """
    blocks = upcycle.sparse_blocks(sparse).values()
    require_expert([block.config for block in blocks], expert)
    scales = scale if isinstance(scale, Sequence) else [scale] * len(blocks)

    def force(router, inputs, outputs, weight):
        config = router.config
        logits, (_, mask) = outputs[0], inputs
        experts_per_ffn = upcycle.counted_as_one(config)
        ids = torch.arange(expert * experts_per_ffn, (expert + 1) * experts_per_ffn, device=logits.device)
        ids = ids.expand(len(logits), logits.shape[1], experts_per_ffn)
        if mask is not None:
            ids = ids.masked_fill(~mask.bool()[..., None], config.num_experts)
        if weight is None:
            scores, chosen = router.choose(router.score(logits))
            weights = router.weigh(scores, chosen).sum(dim=-1, keepdim=True)
        else:
            weights = torch.full_like(logits[..., :1], weight)
        weights = weights / experts_per_ffn
        return logits, weights * (ids < config.num_experts), ids, dispatch(ids.flatten(0, 1), config.num_experts)

    with contextlib.ExitStack() as hooks:
        for block, weight in zip(blocks, scales, strict=True):
            hook = functools.partial(force, weight=weight)
            # Before the hooks that record the expert ids
            handle = block.router.register_forward_hook(hook, prepend=True)
            hooks.callback(handle.remove)
        yield


def verify(source: str | Path, folder: Path, expert: int | str, scale: Scale | None = None) -> None:
    """Compares the saved dense model with the sparse one in which every token goes through the expert, in float32."""
    sparse = load_sparse(source, dtype=torch.float32)
    set_fusion_gates(sparse, ONLY_BASE if expert == BASE else ONLY_EXPERTS)
    scales, dense = list(layer_scales(sparse.config, expert, scale).values()), load_dense(folder)
    # A scaled weight is rounded to the model's dtype
    rounding = torch.finfo(dense.dtype).eps if any(value != 1 for value in scales) else 0.0
    with force_expert(sparse, 0 if expert == BASE else expert, scales):
        compare(sparse, dense.float(), tolerance=max(TOLERANCE, rounding))


class Analysis(TypedDict):
    """The part of an analysis that has scales."""

    weights: str
    scales: dict[str, dict[str, float]]


def read_scale(analysis: str | Path, source: str | Path) -> Scale:
    """The scales that an analyze stage measured of the model `source`."""
    file = Path(analysis) / "experts.json"
    content = read_record(file, Analysis)
    if content["weights"] != weights_fingerprint(source):
        raise ValueError(f"{file} was made from another model than {source}, or from other weights")
    return content["scales"]
