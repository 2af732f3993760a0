"""Sparse upcycling: a dense CLIP becomes a CLIP-MoE whose experts are copies of its FFNs."""

if __name__ == "__main__":
    from conversion.commands import upcycle

    upcycle.main()

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import CLIPConfig, CLIPModel, CLIPTextConfig

from conversion.checkpoints import architecture, check_equal, load_dense, load_model, model_outputs, sample_inputs
from conversion.presets import (
    TOWERS,
    Preset,
    require_towers,
    sparse_layers,
)
from conversion.processors import copy_processor
from conversion.rules import Rule, apply_rules
from modeling_clip_moe import CLIPMoEConfig, CLIPMoEModel, CLIPMoETextConfig, CLIPMoEVisionConfig

# The tensors of a dense FFN (CLIPMLP), and those that hold them for all experts, one expert after the other
FFN_TO_EXPERTS = {
    "fc1.weight": "up_proj",
    "fc1.bias": "up_proj_bias",
    "fc2.weight": "down_proj",
    "fc2.bias": "down_proj_bias",
}
# What can be set of an upcycled tower's configuration: fields that say how tokens are routed and that no weight depends
# on, and a setting of training. All others follow from the dense model and the preset
ROUTING_FIELDS = {field.name for field in dataclasses.fields(CLIPMoETextConfig)} - {
    *(field.name for field in dataclasses.fields(CLIPTextConfig)),
    *("num_experts", "moe_layers", "fusion_gate"),
} | {"attention_dropout"}


def sparse_config(dense: CLIPConfig | CLIPMoEConfig, preset: Preset, towers: Sequence[str] = TOWERS) -> CLIPMoEConfig:
    """The config of the upcycled model; a tower not in `towers` stays dense."""
    require_towers(preset.sparse_layers, towers)
    routing = {
        "num_experts": preset.num_experts,
        "num_experts_per_tok": preset.num_experts_per_tok,
        "norm_topk_prob": preset.norm_topk_prob,
        "fusion_gate": preset.fusion_gate,
        "capacity_factor": preset.capacity_factor,
    }
    layers = {"text": dense.text_config.num_hidden_layers, "vision": dense.vision_config.num_hidden_layers}
    changes = {
        tower: routing | {"moe_layers": sparse_layers(preset.sparse_layers, tower, layers[tower])} for tower in towers
    }
    return _clip_moe_config(
        dense,
        changes,
        shared_encoder=getattr(dense, "shared_encoder", False),
        router_aux_loss_coef=preset.router_aux_loss_coef,
        router_z_loss_coef=preset.router_z_loss_coef,
    )


def shared_config(dense: CLIPConfig) -> CLIPMoEConfig:
    """The config of a dense CLIP with one encoder for images and texts, in place of two."""
    return _clip_moe_config(dense, {}, shared_encoder=True)


def _clip_moe_config(
    dense: CLIPConfig | CLIPMoEConfig, changes: Mapping[str, Mapping[str, Any]], **settings: Any
) -> CLIPMoEConfig:
    """The configuration with other fields in its towers (tower -> fields) and on top."""
    towers = {
        f"{tower}_config": config_class(**architecture(config, config_class) | changes.get(tower, {}))
        for tower, config, config_class in (
            ("text", dense.text_config, CLIPMoETextConfig),
            ("vision", dense.vision_config, CLIPMoEVisionConfig),
        )
    }
    kept = ("projection_dim", "logit_scale_init_value", "initializer_factor")
    return CLIPMoEConfig(**towers, **{name: getattr(dense, name) for name in kept}, **settings)


def sparse_ffns(config: CLIPMoEConfig) -> dict[str, CLIPMoETextConfig | CLIPMoEVisionConfig]:
    """Regular expressions of the module names of each tower's sparse FFNs, with the tower's config."""
    towers = {"text_model": config.text_config, "vision_model": config.vision_config}
    return {
        rf"{tower}\.encoder\.layers\.(?:{'|'.join(map(str, tower_config.moe_layers))})\.mlp": tower_config
        for tower, tower_config in towers.items()
        if tower_config.moe_layers
    }


def kept_rules(config: CLIPMoEConfig, logit_scale_shape: tuple[int, ...]) -> list[Rule]:
    """Rules, in both directions, for all that upcycling does not touch."""
    sparse = "|".join(rf"{ffn}\." for ffn in sparse_ffns(config))
    return [
        Rule(rf"(?!logit_scale$|{sparse})(.*)", r"\1"),
        Rule("logit_scale", "logit_scale", lambda scale: scale.reshape(logit_scale_shape)),
    ]


def upcycling_rules(config: CLIPMoEConfig) -> list[Rule]:
    """Rules from `CLIPModel` to `CLIPMoEModel`: each dense FFN becomes E experts and, with a fusion gate, the base."""
    rules = kept_rules(config, (1,))
    for ffn, tower in sparse_ffns(config).items():

        def tile(tensor, number=tower.num_experts):
            return tensor.expand(number, *tensor.shape), tensor

        for name, expert_tensor in FFN_TO_EXPERTS.items():
            targets = rf"\1.experts.{expert_tensor}", rf"\1.base.{name}"
            source = rf"({ffn})\.{name}"
            rules.append(
                Rule(source, targets, tile)
                if tower.fusion_gate
                else Rule(source, targets[0], lambda t, tile=tile: tile(t)[0])
            )
    return rules


def check_memory(config: CLIPMoEConfig) -> None:
    """Refuses a model whose experts do not fit into memory, before any of it is taken."""
    ffns = list(sparse_ffns(config).values())
    parameters = sum(
        len(tower.moe_layers) * tower.num_experts * (2 * tower.intermediate_size + 2) * tower.hidden_size
        for tower in ffns[: 1 if config.shared_encoder else None]
    )  # biases are left out
    needed, free = 4 * parameters, psutil.virtual_memory().available  # built in float32
    if needed > free:
        numbers = " and ".join(sorted({str(tower.num_experts) for tower in ffns}))
        raise ValueError(
            f"{numbers} experts a layer need {needed / 2**30:,.1f} GiB of memory, of which {free / 2**30:,.1f} are "
            "free: choose a smaller num_experts"
        )


def build_sparse(
    config: CLIPMoEConfig,
    source: Mapping[str, Tensor],
    rules: Iterable[Rule],
    dtype: torch.dtype,
    seed: int,
    new_parts: tuple[str, ...] = ("router", "fusion_gate"),
) -> CLIPMoEModel:
    """The sparse model of a table of rules, in evaluation mode, with new routers and fusion gates.

    Args:
        source, rules: give all tensors but those of `new_parts`.
        seed: of those, drawn from a normal distribution with the tower's `initializer_range` as its standard deviation.
            A fusion gate starts near 1/2.
    """
    check_memory(config)
    with torch.random.fork_rng(devices=[]):  # building the model draws weights that are all replaced below
        sparse = CLIPMoEModel(config)
    state = sparse.state_dict()
    new = {key: tensor for key, tensor in state.items() if any(f".mlp.{part}." in key for part in new_parts)}
    generator = torch.Generator().manual_seed(seed)
    for key, tensor in new.items():
        tower_config = config.text_config if key.startswith("text_model.") else config.vision_config
        tensor.normal_(std=tower_config.initializer_range, generator=generator)
    shapes = {key: tensor.shape for key, tensor in state.items() if key not in new}
    sparse.load_state_dict(new | apply_rules(source, shapes, rules))
    return sparse.to(dtype).eval()


def upcycle(
    dense: CLIPModel | CLIPMoEModel, preset: Preset, towers: Sequence[str] = TOWERS, seed: int = 0
) -> CLIPMoEModel:
    """Makes a dense CLIP sparse: experts (and base FFN) are copies of its FFNs, routers and fusion gates are new.

    Args:
        dense: one of the class `CLIPMoEModel` has no sparse layers.
        preset: which layers, how many experts, which routing; change one with `dataclasses.replace`.
        towers: "text", "vision" or both; the other tower stays dense (CLIP-UP, appendix B.1).
        seed: of the new weights, see `build_sparse`.

    Returns:
        The model in evaluation mode and the dense model's dtype.
    """
    config = sparse_config(dense.config, preset, towers)
    return build_sparse(config, dense.state_dict(), upcycling_rules(config), dense.dtype, seed)


def require_routing(changes: Iterable[str]) -> None:
    """Raises `ValueError` for fields that are none of `ROUTING_FIELDS`."""
    unknown = sorted(set(changes) - ROUTING_FIELDS)
    if unknown:
        raise ValueError(
            f"an upcycled tower has no field {', '.join(map(repr, unknown))} to set here, only "
            f"{', '.join(sorted(ROUTING_FIELDS))}; the dense model, the preset and its changes settle the others"
        )


def change_routing(config: CLIPMoETextConfig | CLIPMoEVisionConfig, changes: Mapping[str, Any]) -> None:
    """Sets some of `ROUTING_FIELDS` of an upcycled tower."""
    require_routing(changes)
    try:
        for name, value in changes.items():
            setattr(config, name, value)
        config.validate_moe()
    except StrictDataclassError as error:
        raise ValueError(str(error)) from error


def verify(source: str | Path, folder: Path) -> dict[str, float]:
    """Compares a saved upcycled model with its dense source, both in float32, with routing weights that sum to 1."""
    config = CLIPMoEConfig.from_pretrained(folder)
    for tower_config in sparse_ffns(config).values():
        if not tower_config.norm_topk_prob:
            print(
                f"{tower_config.base_config_key}: routing weights do not sum to 1, so the model starts below the dense "
                "one; for the comparison alone they are renormalized"
            )
            tower_config.norm_topk_prob = True
    inputs = sample_inputs(config)
    expected = model_outputs(load_dense(source, dtype=torch.float32), inputs)
    converted = model_outputs(load_model(CLIPMoEModel, folder, config=config, dtype=torch.float32), inputs)
    return check_equal(expected, converted)


def convert(source: str | Path, folder: Path, preset: Preset, towers: Sequence[str] = TOWERS, seed: int = 0) -> None:
    """Save a dense CLIP as a sparse one, with its processor, and verify it."""
    upcycle(load_dense(source), preset, towers, seed).save_pretrained(folder)
    copy_processor(source, folder)
    verify(source, folder)
