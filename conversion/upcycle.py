"""Sparse upcycling: a dense CLIP becomes a CLIP-MoE whose experts are copies of its FFNs."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers import CLIPConfig, PreTrainedConfig, PreTrainedModel

from conversion.checkpoints import load_dense, load_sparse
from conversion.expert_init import ExpertInit, init_experts
from conversion.presets import TOWERS, Preset, sparse_layers
from conversion.processors import copy_processor
from conversion.rules import Rule, apply_rules
from conversion.verification import compare
from modeling_clip_moe.configuration_clip_moe import CLIPMoEConfig, CLIPMoETowerConfig, SparseMoEConfig
from modeling_clip_moe.families import Family, family_of
from records.files import save

# The tensors of a dense FFN (CLIPMLP), and those that hold them for all experts, one expert after the other
FFN_TO_EXPERTS = {
    "fc1.weight": "up_proj",
    "fc1.bias": "up_proj_bias",
    "fc2.weight": "down_proj",
    "fc2.bias": "down_proj_bias",
}
# What the configuration of a sparse tower has beside that of a dense one
SPARSE_FIELDS = {field.name for field in dataclasses.fields(CLIPMoETowerConfig)} - {
    field.name for field in dataclasses.fields(PreTrainedConfig)
}
# What can be set of an upcycled tower's configuration: how tokens are routed, and a setting of training. All other
# fields follow from the dense model and the preset
ROUTING_FIELDS = SPARSE_FIELDS - {"num_experts", "moe_layers", "fusion_gate"} | {"attention_dropout"}


def architecture(config: PreTrainedConfig, config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """The fields of a config that differ from their defaults and that another config class has.

    Leaves out how the model was stored, and the generation settings that old files carry.
    """
    field_names = {field.name for field in dataclasses.fields(config_class)}
    field_names -= {"architectures", "dtype", "transformers_version"}
    return {name: value for name, value in config.to_diff_dict().items() if name in field_names}


def sparse_config(dense: PreTrainedConfig, preset: Preset, towers: Sequence[str] = TOWERS) -> SparseMoEConfig:
    """The config of the upcycled model; a tower not in `towers`, or that the family has dense alone, stays dense."""
    depths = {tower: config.num_hidden_layers for tower, (_, config) in towers_of(dense).items()}
    family, chosen = family_of(dense), preset.sparse_layers
    towers = [tower for tower in towers if tower in family.towers]
    if not towers:
        raise ValueError(f"of a {family.name} only the {' and '.join(family.towers)} tower becomes sparse: name it")
    if isinstance(chosen, Mapping) and set(chosen) != set(towers):
        raise ValueError(
            f"sparse_layers names layers of {', '.join(map(str, chosen)) or 'no tower'}, but the towers to make sparse "
            f"are {', '.join(towers)}: name layers of each, or change towers"
        )
    routing = {name: value for name, value in vars(preset).items() if name in SPARSE_FIELDS}
    changes = {tower: routing | {"moe_layers": sparse_layers(chosen, tower, depths[tower])} for tower in towers}
    config_class = family.sparse.config_class
    if not dense.sub_configs:  # an image tower alone
        return config_class(**architecture(dense, config_class), **changes["vision"])
    settings = {name: getattr(preset, name) for name in ("router_aux_loss_coef", "router_z_loss_coef")}
    if getattr(dense, "shared_encoder", False):
        settings["shared_encoder"] = True
    return _whole_config(family, dense, changes, settings)


def shared_config(dense: CLIPConfig) -> CLIPMoEConfig:
    """The config of a dense CLIP with one encoder for images and texts, in place of two."""
    return _whole_config(family_of(dense), dense, {}, {"shared_encoder": True})


def _whole_config(
    family: Family, dense: PreTrainedConfig, changes: Mapping[str, Mapping[str, Any]], settings: Mapping[str, Any]
) -> SparseMoEConfig:
    """The configuration with other fields in its towers (tower -> fields) and on top."""
    config_class = family.sparse.config_class
    fields = {name: getattr(dense, name) for name in family.whole_fields} | settings
    for name, tower_class in config_class.sub_configs.items():
        own = architecture(getattr(dense, name), tower_class)
        fields[name] = tower_class(**own | changes.get(name.removesuffix("_config"), {}))
    return config_class(**fields)


def towers_of(config: PreTrainedConfig) -> dict[str, tuple[str, PreTrainedConfig]]:
    """Tower, "text" or "vision" -> a regular expression of what the names of its modules start with, and its
    configuration. An image tower alone has no such prefix."""
    if not config.sub_configs:
        return {"vision": ("", config)}
    return {tower: (rf"{tower}_model\.", getattr(config, f"{tower}_config")) for tower in TOWERS}


def sparse_ffns(config: PreTrainedConfig) -> dict[str, CLIPMoETowerConfig]:
    """Regular expressions of the module names of each tower's sparse FFNs, with the tower's config."""
    return {
        rf"{prefix}encoder\.layers\.(?:{'|'.join(map(str, tower_config.moe_layers))})\.mlp": tower_config
        for prefix, tower_config in towers_of(config).values()
        if tower_config.moe_layers
    }


def kept_rules(config: SparseMoEConfig, logit_scale_shape: tuple[int, ...] = (1,)) -> list[Rule]:
    """Rules from a dense model to a sparse one, or back, for all that upcycling does not touch."""
    sparse = "|".join(rf"{ffn}\." for ffn in sparse_ffns(config))
    return [
        Rule(rf"(?!logit_scale$|{sparse})(.*)", r"\1"),
        Rule("logit_scale", "logit_scale", lambda scale: scale.reshape(logit_scale_shape)),
    ]


def upcycling_rules(config: SparseMoEConfig, single: bool = False) -> list[Rule]:
    """Rules from a dense model to a sparse one: each dense FFN becomes E experts and, with a fusion gate, the base; or
    a `single` expert."""
    rules = kept_rules(config)
    for ffn, tower in sparse_ffns(config).items():
        has_base = tower.fusion_gate and not single

        def tile(tensor, number=1 if single else tower.num_experts, has_base=has_base):
            experts = tensor.expand(number, *tensor.shape)
            return (experts, tensor) if has_base else experts

        for name, expert_tensor in FFN_TO_EXPERTS.items():
            targets = rf"\1.experts.{expert_tensor}", rf"\1.base.{name}"
            rules.append(Rule(rf"({ffn})\.{name}", targets if has_base else targets[0], tile))
    return rules


def check_memory(config: SparseMoEConfig) -> None:
    """Refuses a model whose experts do not fit into memory, before any of it is taken."""
    ffns = list(sparse_ffns(config).values())
    parameters = sum(
        len(tower.moe_layers) * tower.num_experts * (2 * tower.intermediate_size + 2) * tower.hidden_size
        for tower in ffns[: 1 if getattr(config, "shared_encoder", False) else None]
    )  # biases are left out
    needed, free = 4 * parameters, psutil.virtual_memory().available  # built in float32
    if needed > free:
        numbers = " and ".join(sorted({str(tower.num_experts) for tower in ffns}))
        raise ValueError(
            f"{numbers} experts a layer need {needed / 2**30:,.1f} GiB of memory, of which {free / 2**30:,.1f} are "
            "free: choose a smaller num_experts"
        )


def build_sparse(
    config: SparseMoEConfig,
    source: Mapping[str, Tensor],
    rules: Iterable[Rule],
    dtype: torch.dtype,
    seed: int,
    new_parts: tuple[str, ...] = ("router", "fusion_gate"),
) -> PreTrainedModel:
    """The sparse model of a table of rules, in evaluation mode, with new routers and fusion gates.

    Args:
        source, rules: give all tensors but those of `new_parts`.
        seed: draws those from a normal distribution with the tower's `initializer_range` as its standard deviation;
            0.02 where the family has none. A fusion gate starts near 1/2.
    """
    check_memory(config)
    deviations = {prefix: getattr(tower, "initializer_range", 0.02) for prefix, tower in towers_of(config).values()}
    with torch.random.fork_rng(devices=[]):  # building the model draws weights that are all replaced below
        sparse = family_of(config).sparse(config)
    state = sparse.state_dict()
    new = {key: tensor for key, tensor in state.items() if any(f".mlp.{part}." in key for part in new_parts)}
    generator = torch.Generator().manual_seed(seed)
    for key, tensor in new.items():
        (std,) = [deviation for prefix, deviation in deviations.items() if re.match(prefix, key)]
        if key.endswith(".expert_bias"):  # 0 before training
            continue
        tensor.normal_(std=std, generator=generator)
    shapes = {key: tensor.shape for key, tensor in state.items() if key not in new}
    sparse.load_state_dict(new | apply_rules(source, shapes, rules))
    return sparse.to(dtype).eval()


def upcycle(
    dense: PreTrainedModel,
    preset: Preset,
    towers: Sequence[str] = TOWERS,
    seed: int = 0,
    routing: Mapping[str, Mapping[str, Any]] | None = None,
    expert_init: ExpertInit | None = None,
) -> PreTrainedModel:
    """Makes a dense model sparse: experts (and base FFN) are copies of its FFNs, routers and fusion gates are new.

    Args:
        dense: a model of a family in `modeling_clip_moe.families`; if it is a `CLIPMoEModel`, without sparse layers.
        preset: which layers, how many experts, which routing; change one with `dataclasses.replace`.
        towers: "text", "vision" or both; the other tower stays dense (CLIP-UP, appendix B.1).
        seed: draws the new weights, see `build_sparse`.
        routing: see `change_routing`.
        expert_init: how the experts begin, drawn by the seed; None: as copies.

    Returns:
        The model in evaluation mode and the dense model's dtype.
    """
    config = change_routing(sparse_config(dense.config, preset, towers), routing or {})
    rules = upcycling_rules(config)
    sparse = build_sparse(config, dense.state_dict(), rules, dense.dtype, seed)
    init_experts(sparse, expert_init or ExpertInit(), seed)
    return sparse


def change_routing(config: SparseMoEConfig, routing: Mapping[str, Mapping[str, Any]]) -> SparseMoEConfig:
    """The configuration with others of its `ROUTING_FIELDS`.

    Args:
        routing: `text_config` or `vision_config` -> the fields of that tower.
    """
    for tower, changes in routing.items():
        if unknown := sorted(changes.keys() - ROUTING_FIELDS):
            raise ValueError(
                f"{tower}: a sparse tower has no field {', '.join(map(repr, unknown))} to set here, only "
                f"{', '.join(sorted(ROUTING_FIELDS))}"
            )
        for name, value in changes.items():
            setattr(getattr(config, tower), name, value)
        if changes:
            getattr(config, tower).validate_moe()
    if isinstance(config, CLIPMoEConfig):
        config.validate_shared_encoder()
    return config


def verify(source: str | Path, folder: Path) -> None:
    """Compares a saved upcycled model with its dense source, both in float32, with routing weights that sum to 1 and
    without a capacity."""
    sparse = load_sparse(folder, torch.float32)
    for tower_config in sparse_ffns(sparse.config).values():
        tower_config.eval_capacity_factor = None
        if not tower_config.norm_topk_prob or tower_config.routed_scaling_factor != 1:
            tower = tower_config.base_config_key
            print(f"{tower}: routing weights do not sum to 1, so the model starts unlike the dense one. Here they do:")
            tower_config.norm_topk_prob, tower_config.routed_scaling_factor = True, 1.0
    compare(load_dense(source, torch.float32), sparse)


def convert(
    source: str | Path,
    folder: Path,
    preset: Preset,
    towers: Sequence[str] = TOWERS,
    seed: int = 0,
    routing: Mapping[str, Mapping[str, Any]] | None = None,
    expert_init: ExpertInit | None = None,
) -> None:
    """Save a dense CLIP as a sparse one, with its processor, and verify it; for `routing` see `change_routing`."""
    model = upcycle(load_dense(source), preset, towers, seed, routing, expert_init)
    save(model, folder)
    copy_processor(source, folder)
    if expert_init is None or expert_init.kind == "copies":
        verify(source, folder)
