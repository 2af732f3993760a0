"""Makes one CLIP-MoE of a CLIP and the experts trained from it."""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from clip_moe.conversion.checkpoints import load_clip, load_sparse
from clip_moe.conversion.dense import ONLY_EXPERTS, force_expert, set_fusion_gates
from clip_moe.conversion.presets import OF_EXPERTS, PRESETS, Preset
from clip_moe.conversion.rules import Rule, apply_rules
from clip_moe.conversion.upcycle import build_sparse, expert_tensors, sparse_config, sparse_ffns, upcycling_rules
from clip_moe.conversion.verification import compare
from clip_moe.engine.messages import join_names
from modeling_clip_moe.configuration_clip_moe import SparseMoEConfig
from modeling_clip_moe.families import sparse_towers

# The parts of a sparse FFN with one expert that stage 1 of CLIP-FMoE may train: a regular expression
TRAINED_PARTS = "(?:experts|fusion_gate|router)"


def unify(
    base: PreTrainedModel,
    experts: Sequence[PreTrainedModel],
    preset: Preset = PRESETS["clip_moe"],
    towers: Sequence[str] | None = None,
    seed: int = 0,
    base_expert: bool = True,
) -> PreTrainedModel:
    """Builds the sparse model of a base and the experts trained from it.

    Args:
        base: dense, or with one expert in each sparse layer.
        experts: models of the same kind, in order. Their fusion gates, if any, are averaged.
        preset: for a dense base, which layers are sparse and how they route; for a sparse one `num_experts_per_tok`
            and whether there are fusion gates. The fields in `OF_EXPERTS` follow from the experts.
        towers, seed: see `clip_moe.conversion.upcycle.upcycle`.
        base_expert: whether the FFNs of `base` are expert 0. With a fusion gate they stay beside the experts instead.

    Returns:
        The model in evaluation mode and the widest dtype of all: experts are trained in float32.
    """
    is_gated = any(tower.fusion_gate for tower in sparse_towers(base.config).values())
    fusion_gate = preset.fusion_gate or is_gated
    base_expert = base_expert and not fusion_gate
    number = len(experts) + base_expert
    if sparse_towers(base.config):
        routing = {"num_experts": number, "num_experts_per_tok": preset.num_experts_per_tok, "fusion_gate": fusion_gate}
        settings = base.config.to_dict()
        for tower in base.config.sub_configs:
            settings[tower] |= routing if settings[tower]["moe_layers"] else {}
        config, trained = type(base.config).from_dict(settings), rf"\.{TRAINED_PARTS}"
    else:
        preset = dataclasses.replace(preset, **OF_EXPERTS | {"num_experts": number})
        config, trained = sparse_config(base.config, preset, towers), ""
    base_state, parts = base.state_dict(), re.compile(rf"(?:{'|'.join(sparse_ffns(config))}){trained}\.")
    source = {}
    for number, model in enumerate((base, *experts)):
        state = model.state_dict()
        require_expert(f"expert {number}", base_state, state, parts)
        if not sparse_towers(base.config):
            state = apply_rules(state, None, upcycling_rules(config, single=True))
        source |= {f"{number}.{name}": tensor for name, tensor in state.items()}
    rules = stacking_rules(config, is_gated, base_expert)
    dtype = functools.reduce(torch.promote_types, (model.dtype for model in (base, *experts)))
    return build_sparse(config, source, rules, dtype, seed, ("router",) if is_gated else ("router", "fusion_gate"))


def stacking_rules(config: SparseMoEConfig, gated: bool, base_expert: bool) -> list[Rule]:
    """Rules from sparse models of one expert each, tensors named I.NAME for model I, to one model of all experts.

    Args:
        gated: whether the models have fusion gates already, and so base FFNs.
        base_expert: whether the expert of model 0 is stacked with the others.
    """
    ffns = sparse_ffns(config)
    ffn, new_gates = f"(?:{'|'.join(ffns)})", not gated and next(iter(ffns.values())).fusion_gate
    trained, stacked = rf"{ffn}\.{TRAINED_PARTS}", r"\d+" if base_expert else r"[1-9]\d*"
    rules = [
        Rule(rf"0\.(?!{trained}\.)(.*)", r"\1"),
        Rule(rf"[1-9]\d*\.(?!{trained}\.).*", (), reason="the same in all models"),
        Rule(rf"\d+\.{ffn}\.router\..*", (), reason="there was nothing to route"),
        Rule(rf"{stacked}\.({ffn}\.experts\..*)", r"\1", torch.cat, merges=True),
        Rule(rf"0\.{ffn}\.fusion_gate\..*", (), reason="the gates' initial weights"),
        Rule(rf"[1-9]\d*\.({ffn}\.fusion_gate\..*)", r"\1", lambda gates: torch.stack(gates).mean(0), merges=True),
    ]
    if new_gates:
        for one_ffn, tower in ffns.items():
            for expert_tensor, names in expert_tensors(tower).items():
                bases = tuple(rf"\1.base.{name}" for name in names)
                source = rf"0\.({one_ffn})\.experts\.{expert_tensor}"
                rules.append(Rule(source, bases, lambda experts, names=names: experts[0].chunk(len(names))))
    elif not base_expert:
        rules.append(Rule(rf"0\.{ffn}\.experts\..*", (), reason="the experts' initial weights"))
    return rules


def require_expert(name: str, base: Mapping[str, Tensor], expert: Mapping[str, Tensor], parts: re.Pattern[str]) -> None:
    """Raises ValueError if an expert differs from its base in tensors beside those whose names begin with `parts`."""
    differing = [
        key
        for key, tensor in base.items()
        if key not in expert
        or expert[key].shape != tensor.shape
        or (not parts.match(key) and not (expert[key] == tensor).all())
    ]
    if differing or expert.keys() - base.keys():
        raise ValueError(
            f"{name} was not trained from this base, or in more than its sparse layers (towers, sparse_layers): it "
            f"differs in {join_names(differing + sorted(expert.keys() - base.keys()))}"
        )


def verify(base: str | Path, experts: Sequence[str | Path], folder: Path) -> None:
    """Compares a saved sparse model, every token forced through expert i, with the i-th expert's model, in float32.
    Fusion gates, averaged or new, are closed in both models. The base is compared where it is expert 0."""
    sparse = load_sparse(folder, dtype=torch.float32)
    set_fusion_gates(sparse, ONLY_EXPERTS)
    num_experts = max(tower.num_experts for tower in sparse_ffns(sparse.config).values())
    for number, source in enumerate([base, *experts] if num_experts > len(experts) else experts):
        model = load_clip(source, dtype=torch.float32)
        if sparse_towers(model.config):
            set_fusion_gates(model, ONLY_EXPERTS)
        with force_expert(sparse, number, scale=1.0):
            compare(model, sparse, f"expert {number}: ")
