"""Sparse upcycling: a dense CLIP becomes a CLIP-MoE whose experts are copies of its FFNs."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import CLIPConfig, PreTrainedConfig, PreTrainedModel

from clip_moe.conversion.checkpoints import load_dense, load_sparse
from clip_moe.conversion.presets import TOWERS, Preset, RoutingField, expert_width, sparse_layers
from clip_moe.conversion.rules import Rule, apply_rules
from clip_moe.conversion.verification import compare, distances
from modeling_clip_moe.configuration_clip_moe import CLIPMoEConfig, CLIPMoETowerConfig, SparseMoEConfig
from modeling_clip_moe.families import family_of
from modeling_clip_moe.sparse_moe import CLIPMoESparseMoeBlock

# Tensors of all experts, one expert after the other, and the tensors of dense FFNs that they hold: of CLIP's, and of a
# gated one, of which each expert has the rows of the gate before those that it multiplies
PLAIN_TENSORS = {
    "up_proj": ("fc1.weight",),
    "up_proj_bias": ("fc1.bias",),
    "down_proj": ("fc2.weight",),
    "down_proj_bias": ("fc2.bias",),
}
GATED_TENSORS = {
    "gate_up_proj": ("gate_proj.weight", "up_proj.weight"),
    "gate_up_proj_bias": ("gate_proj.bias", "up_proj.bias"),
    "down_proj": ("down_proj.weight",),
    "down_proj_bias": ("down_proj.bias",),
}
# Fields of a sparse tower beside those of a dense one
SPARSE_FIELDS = {field.name for field in dataclasses.fields(CLIPMoETowerConfig)} - {
    field.name for field in dataclasses.fields(PreTrainedConfig)
}
ROUTING_FIELDS = {*get_args(RoutingField)}


def architecture(config: PreTrainedConfig, config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """The fields of a config that differ from their defaults and that another config class has, without how the model
    was stored."""
    field_names = {field.name for field in dataclasses.fields(config_class)}
    field_names -= {"architectures", "dtype", "transformers_version"}
    return {name: value for name, value in config.to_diff_dict().items() if name in field_names}


def sparse_config(dense: PreTrainedConfig, preset: Preset, towers: Sequence[str] | None = None) -> SparseMoEConfig:
    """The config of the upcycled model; a tower not in `towers`, those of the preset by default, or that the family has
    dense alone, stays dense."""
    family, width = family_of(dense), preset.moe_intermediate_size
    towers = [tower for tower in (preset.towers if towers is None else towers) if tower in family.towers]
    if not towers:
        raise ValueError(f"of a {family.name} only the {' and '.join(family.towers)} tower becomes sparse: name it")
    for name, value in (("sparse_layers", preset.sparse_layers), ("moe_intermediate_size", width)):
        if isinstance(value, Mapping) and set(value) != set(towers):
            raise ValueError(
                f"{name} names {', '.join(map(str, value)) or 'no tower'}, but the towers to make sparse are "
                f"{', '.join(towers)}: name each of them, or change towers"
            )
    routing = {name: value for name, value in vars(preset).items() if name in SPARSE_FIELDS}
    changes = {
        tower: routing
        | {
            "moe_layers": sparse_layers(preset.sparse_layers, tower, config.num_hidden_layers),
            "moe_intermediate_size": expert_width(width, tower, config.intermediate_size),
        }
        for tower, (_, config) in towers_of(dense).items()
        if tower in towers
    }
    config_class = family.sparse.config_class
    if not dense.sub_configs:  # an image tower alone
        return config_class(**architecture(dense, config_class), **changes["vision"])
    settings = {name: getattr(preset, name) for name in ("router_aux_loss_coef", "router_z_loss_coef")}
    if getattr(dense, "shared_encoder", False):
        settings["shared_encoder"] = True
    return whole_config(dense, changes, settings)


def shared_config(dense: CLIPConfig) -> CLIPMoEConfig:
    """The config of a dense CLIP with one encoder for images and texts, in place of two."""
    return whole_config(dense, {}, {"shared_encoder": True})


def whole_config(
    dense: PreTrainedConfig, changes: Mapping[str, Mapping[str, Any]], settings: Mapping[str, Any]
) -> SparseMoEConfig:
    """The sparse configuration of a dense one, with other fields in its towers (tower -> fields) and on top."""
    family = family_of(dense)
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


def sparse_blocks(module: nn.Module) -> dict[str, CLIPMoESparseMoeBlock]:
    """Sparse blocks of a model or a tower by name, in order. Those of a shared encoder are there for each tower."""
    return {name: block for name, block in module.named_modules() if isinstance(block, CLIPMoESparseMoeBlock)}


def experts_of_ffn(config: CLIPMoETowerConfig) -> int:
    """Number of parts that one dense FFN is cut into, each a routed expert; 1 for experts as wide as it. The last part
    may be short. Raises a ValueError where the experts do not hold a whole FFN."""
    size, width, shared = config.intermediate_size, config.expert_size, config.num_shared_experts
    number = math.ceil((size - shared * width) / width)
    if number < 1 or width > size:
        fault = (
            f"moe_intermediate_size: an FFN of {size} hidden units, less {shared} shared experts, cannot be split into "
            f"experts of {width}: choose at most {size // (shared + 1)}"
        )
    elif config.num_experts < number:
        fault = f"num_experts is {config.num_experts}, but {number} experts make an FFN: choose at least {number}"
    else:
        return number
    raise ValueError(f"{config.base_config_key or 'vision_config'}: {fault}")


def inexact_starts(config: CLIPMoETowerConfig) -> list[str]:
    """Why an upcycled tower does not start equal to its dense model, even with weights that sum to `experts_of_ffn`:
    each reason with the nearest numbers that would. Empty where it does."""
    parts, number, chosen = experts_of_ffn(config), config.num_experts, config.num_experts_per_tok
    shared, reasons = f" + {config.num_shared_experts}" if config.num_shared_experts else "", []
    for name, value, least, most, copy, beside in (
        ("num_experts", number, chosen, math.inf, "the last copy of the FFN", shared),
        ("num_experts_per_tok", chosen, 1, number, "a token's last copy of the FFN", ""),
    ):
        if rest := value % parts:
            exact = [f"{near}{beside}" for near in (value - rest, value - rest + parts) if least <= near <= most]
            lacks = f"{name} {value} leaves {copy} without {parts - rest} of its {parts} parts"
            reasons.append(f"{lacks} ({' or '.join(exact)} would be exact)")
    return reasons


def expert_tensors(config: CLIPMoETowerConfig) -> dict[str, tuple[str, ...]]:
    """Tensors of the experts of a tower -> those of its dense FFN that they hold. Biases are there even if experts have
    none."""
    return GATED_TENSORS if config.use_gated_mlp else PLAIN_TENSORS


def counted_as_one(config: CLIPMoETowerConfig) -> int:
    """How many experts count as one: `experts_of_ffn` where tokens are sent to whole FFNs, or the weights of a token
    sum to that number, as after upcycling. Else 1: each counts for itself."""
    try:
        number = experts_of_ffn(config)
    except ValueError:
        return 1
    is_whole = config.num_experts % number == 0 and config.num_experts_per_tok % number == 0
    return number if is_whole or config.routed_scaling_factor == number else 1


def kept_rules(config: SparseMoEConfig, logit_scale_shape: tuple[int, ...] = (1,)) -> list[Rule]:
    """Rules from a dense model to a sparse one, or back, for all that upcycling does not touch."""
    sparse = "|".join(rf"{ffn}\." for ffn in sparse_ffns(config))
    return [
        Rule(rf"(?!logit_scale$|{sparse})(.*)", r"\1"),
        Rule("logit_scale", "logit_scale", lambda scale: scale.reshape(logit_scale_shape)),
    ]


def upcycling_rules(config: SparseMoEConfig, single: bool = False) -> list[Rule]:
    """Rules from a dense model to a sparse one: each dense FFN becomes E experts, shared experts and, with a fusion
    gate, the base; or a `single` expert.

    Narrow experts are cut out of it: the first hidden units are those of the shared experts, then each expert has the
    next ones, and so again from copy to copy. So all experts of a copy sum to the FFN. Units that the last of them
    lacks are zero, and what is left of `num_experts` begins one more copy.
    """
    rules = kept_rules(config)
    for ffn, tower in sparse_ffns(config).items():
        has_base, size = tower.fusion_gate and not single, tower.intermediate_size
        shared = 0 if single else tower.num_shared_experts * tower.expert_size
        parts, number, width = (1, 1, size) if single else (experts_of_ffn(tower), tower.num_experts, tower.expert_size)
        sizes = {"parts": parts, "number": number, "width": width, "shared": shared}
        for expert_tensor, names in expert_tensors(tower).items():
            source = rf"({ffn})\.({'|'.join(map(re.escape, names))})"
            if expert_tensor.endswith("_bias") and not tower.moe_mlp_bias:
                rules.append(Rule(source, r"\1.base.\2" if has_base else (), reason="experts have none"))
                continue
            targets = [rf"\1.experts.{expert_tensor}"]
            targets += [rf"\1.shared_experts.{name}" for name in names] if shared else []
            targets += [rf"\1.base.{name}" for name in names] if has_base else []
            cut = functools.partial(_cut, expert_tensor, has_base=has_base, **sizes)
            rules.append(Rule(source, tuple(targets), cut, merges=True))
    return rules


def _cut(
    expert_tensor: str, tensors: list[Tensor], parts: int, number: int, width: int, shared: int, has_base: bool
) -> tuple[Tensor, ...]:
    """Tensors of a dense FFN as one of all its experts, those of shared experts with `shared` hidden units, and the
    base's."""
    common, cut = [], []
    for tensor in tensors:
        if expert_tensor == "down_proj_bias":  # the shared experts have it, else each expert its part
            common.append(tensor)
            cut.append((torch.zeros_like(tensor) if shared else tensor / parts).expand(parts, -1))
            continue
        units = tensor.T if expert_tensor == "down_proj" else tensor
        first, rest = units[:shared], units[shared:]
        missing = [0, 0] * (rest.ndim - 1) + [0, parts * width - len(rest)]
        rest = F.pad(rest, missing).unflatten(0, (parts, width))
        common.append(first.T if expert_tensor == "down_proj" else first)
        cut.append(rest.mT if expert_tensor == "down_proj" else rest)
    experts = torch.cat(cut, dim=1)[torch.arange(number) % parts]
    return (experts, *(common if shared else []), *(tensors if has_base else []))


def check_memory(config: SparseMoEConfig) -> None:
    """Refuses a model whose experts do not fit into memory, before any of it is taken."""
    ffns = list(sparse_ffns(config).values())
    parameters = sum(
        len(tower.moe_layers)
        * tower.num_experts
        * ((2 + tower.use_gated_mlp) * tower.expert_size + 2)
        * tower.hidden_size
        for tower in ffns[: 1 if getattr(config, "shared_encoder", False) else None]
    )  # biases are left out
    needed, free = 4 * parameters, psutil.virtual_memory().available  # built in float32
    if needed > free:
        numbers = " and ".join(sorted({str(tower.num_experts) for tower in ffns}))
        raise ValueError(
            f"{numbers} experts a layer need {needed / 2**30:,.1f} GiB of memory, but {free / 2**30:,.1f} are free: "
            "choose a smaller num_experts"
        )


@torch.no_grad()
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
    with torch.random.fork_rng(devices=[]):  # building the model draws weights that are all replaced below
        sparse = family_of(config).sparse(config)
    generator = torch.Generator().manual_seed(seed)
    for block in sparse_blocks(sparse).values():
        for part in filter(None, (getattr(block, name) for name in new_parts)):
            for weight in part.parameters():  # an expert bias, which is none of them, is 0 before training
                weight.normal_(std=getattr(block.config, "initializer_range", 0.02), generator=generator)
        parts, weight = experts_of_ffn(block.config), block.router.weight
        copies = weight[: math.ceil(len(weight) / parts)]  # the experts of a copy are chosen together
        weight.copy_(copies.repeat_interleave(parts, dim=0)[: len(weight)])
    drawn = tuple(f".mlp.{part}." for part in new_parts)
    old = {key: tensor for key, tensor in sparse.state_dict().items() if not any(part in key for part in drawn)}
    sparse.load_state_dict(apply_rules(source, old, rules), strict=False)
    return sparse.to(dtype).eval()


def upcycle(
    dense: PreTrainedModel,
    preset: Preset,
    towers: Sequence[str] | None = None,
    seed: int = 0,
    routing: Mapping[str, Mapping[str, Any]] | None = None,
) -> PreTrainedModel:
    """Makes a dense model sparse: experts (and base FFN) are copies of its FFNs, routers and fusion gates are new.

    Args:
        dense: a model of a family in `modeling_clip_moe.families`; if it is a `CLIPMoEModel`, without sparse layers.
        preset: which layers, how many experts, which routing.
        towers: "text", "vision" or both; the other tower stays dense (CLIP-UP, appendix B.1). None: the preset's.
        seed: draws the new weights, see `build_sparse`.
        routing: see `change_routing`.

    Returns:
        The model in evaluation mode and the dense model's dtype.
    """
    config = change_routing(sparse_config(dense.config, preset, towers), routing or {})
    state = dense.state_dict()
    for ffn, tower in sparse_ffns(config).items():
        biases = [key for key, tensor in state.items() if re.match(rf"{ffn}\..*bias$", key) and tensor.any()]
        if biases and not tower.moe_mlp_bias:
            raise ValueError(
                f"moe_mlp_bias is False, but {biases[0]} is not zero in the dense model: leave moe_mlp_bias out, and "
                "experts keep their parts of it"
            )
        experts_per_ffn, is_shared = experts_of_ffn(tower), tower.norm_topk_prob or tower.scoring_func == "softmax"
        # Weights that sum to 1 are shared out among the experts of an FFN, which have to sum to it
        if is_shared and "routed_scaling_factor" not in (routing or {}).get(tower.base_config_key, {}):
            tower.routed_scaling_factor = float(experts_per_ffn)
    return build_sparse(config, state, upcycling_rules(config), dense.dtype, seed)


def change_routing(config: SparseMoEConfig, routing: Mapping[str, Mapping[str, Any]]) -> SparseMoEConfig:
    """Sets some of a configuration's `ROUTING_FIELDS`; `routing`: `text_config` or `vision_config` -> its fields."""
    towers = {f"{name}_config": tower for name, (_, tower) in towers_of(config).items()}
    for tower, changes in routing.items():
        if changes and tower not in towers:
            raise ValueError(f"{tower}: the model has an image tower alone; set vision_config")
        if unknown := sorted(changes.keys() - ROUTING_FIELDS):
            raise ValueError(
                f"{tower}: a sparse tower has no field {', '.join(map(repr, unknown))} to set here, only "
                f"{', '.join(sorted(ROUTING_FIELDS))}"
            )
        for name, value in changes.items():
            setattr(towers[tower], name, value)
        if changes:
            towers[tower].validate_moe()
    if isinstance(config, CLIPMoEConfig):
        config.validate_shared_encoder()
    return config


def verify(source: str | Path, folder: Path) -> None:
    """Compares a saved upcycled model with its dense source, both in float32, with routing weights that sum to 1 and
    without a capacity. Of one that does not start equal to it, prints why and how far it is, and compares the
    copies."""
    sparse, dense = load_sparse(folder, torch.float32), load_dense(source, torch.float32)
    towers, inexact = sparse_ffns(sparse.config).values(), []
    for tower_config in towers:
        tower, scale = tower_config.base_config_key or "vision_config", float(experts_of_ffn(tower_config))
        tower_config.eval_capacity_factor = None
        if not tower_config.norm_topk_prob or tower_config.routed_scaling_factor != scale:
            print(
                f"{tower}: routing weights do not sum to {scale:g}, so outputs differ from the dense model's. It is "
                "compared with weights that do"
            )
            tower_config.norm_topk_prob, tower_config.routed_scaling_factor = True, scale
        inexact += [f"{tower}.{reason}" for reason in inexact_starts(tower_config)]
    if inexact:
        off = distances(dense, sparse)
        print(f"before training, embeddings differ from the dense model's {off}, since {' and '.join(inexact)}")
        print("compared with tokens sent to whole copies alone:")
        send_to_copies(sparse)
    compare(dense, sparse)


def send_to_copies(sparse: PreTrainedModel) -> None:
    """Makes the routers of this model send tokens to the whole copies of an FFN in turn from now on."""
    for block in sparse_blocks(sparse).values():
        parts = experts_of_ffn(block.config)
        block.router.choose = functools.partial(_next_copy, parts=parts, copies=block.num_experts // parts)


def _next_copy(scores: Tensor, parts: int, copies: int) -> tuple[Tensor, Tensor]:
    first = torch.arange(scores.shape[1], device=scores.device) % copies * parts
    ids = (first[:, None] + torch.arange(parts, device=scores.device)).expand(len(scores), -1, -1)
    return scores.gather(-1, ids), ids
