"""Costs of models without computing anything: parameters and multiply-adds, at a paper's size or of any model."""

import copy
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPConfig, MetaClip2Config, PreTrainedConfig, PreTrainedModel, SiglipConfig

from clip_moe.conversion.presets import PRESETS
from clip_moe.conversion.upcycle import sparse_config
from clip_moe.engine.messages import did_you_mean
from modeling_clip_moe.configuration_clip_moe import SparseMoEConfig
from modeling_clip_moe.configuration_moe_vie import ViEConfig
from modeling_clip_moe.families import longest_text, model_class


def _tower(width: int, layers: int, heads: int, **more: int) -> dict[str, int]:
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
    return sizes | {"num_attention_heads": heads, **more}


def _vie(vision: dict[str, int], text: dict[str, int]) -> tuple[type, dict, dict, dict]:
    return ViEConfig, vision, text, {"projection_dim": 1024}


def _siglip_2(
    width: int, layers: int, heads: int, vision: dict[str, int], **more: int
) -> tuple[type, dict, dict, dict]:
    sizes = _tower(width, layers, heads, **more)
    return SiglipConfig, sizes | vision, sizes | {"vocab_size": 256_000}, {}


# Class of the configuration, vision tower, text tower, and what they share. Images have 224 pixels, if nothing else is
# said; OpenAI's texts have 77 tokens
SIZES = {
    "ViT-B/32": (CLIPConfig, _tower(768, 12, 12, patch_size=32), _tower(512, 12, 8), {"projection_dim": 512}),
    "ViT-B/16": (CLIPConfig, _tower(768, 12, 12, patch_size=16), _tower(512, 12, 8), {"projection_dim": 512}),
    "ViT-L/14": (CLIPConfig, _tower(1024, 24, 16, patch_size=14), _tower(768, 12, 12), {"projection_dim": 768}),
    # google/siglip2-*
    "SigLIP2-B/16": _siglip_2(768, 12, 12, vision={"patch_size": 16}),
    "SigLIP2-L/16": _siglip_2(1024, 24, 16, vision={"patch_size": 16, "image_size": 256}),
    "SigLIP2-So400m/14": _siglip_2(1152, 27, 16, vision={"patch_size": 14}, intermediate_size=4304),
    # facebook/metaclip-2-worldwide-huge-quickgelu
    "MetaCLIP2-H/14": (
        MetaClip2Config,
        _tower(1280, 32, 16, patch_size=14),
        _tower(1024, 24, 16, vocab_size=901_629),
        {"projection_dim": 1024},
    ),
    # The dense models of facebook/MoEViE-*
    "ViE-B/16": _vie(_tower(768, 12, 12, intermediate_size=2048), _tower(1024, 24, 16, intermediate_size=2730)),
    "ViE-L/16": _vie(
        _tower(1024, 24, 16, intermediate_size=2736, image_size=384), _tower(1024, 24, 16, intermediate_size=2736)
    ),
    "ViE-H/14": _vie(
        _tower(1280, 32, 16, intermediate_size=3413, image_size=448, patch_size=14, num_pooling_heads=16),
        _tower(1408, 34, 16, intermediate_size=3754),
    ),
}
# "Up-Cycling" in CLIP-FMoE's tables
FIVE_EXPERTS = dataclasses.replace(PRESETS["clip_fmoe"], num_experts=5, num_experts_per_tok=3, fusion_gate=False)
ARCHITECTURES = {**PRESETS, "5_experts": FIVE_EXPERTS}


def paper_config(name: str) -> PreTrainedConfig | None:
    """The configuration at a paper's size that a name such as ViT-L/14:clip_moe stands for; None for other names.

    Raises:
        ValueError: there is no such architecture.
    """
    size, colon, architecture = name.partition(":")
    if size not in SIZES:
        return None
    config_class, vision, text, shared = SIZES[size]
    vision_config = {"image_size": 224, **vision, **shared}
    dense = config_class(text_config=text | shared, vision_config=vision_config, **shared)
    if not colon:
        return dense
    if architecture not in ARCHITECTURES:
        hint = did_you_mean(architecture, ARCHITECTURES)
        raise ValueError(f"{name}: unknown architecture {architecture!r}{hint}, only {', '.join(ARCHITECTURES)}")
    return sparse_config(dense, ARCHITECTURES[architecture])


def meta_model(config: PreTrainedConfig) -> PreTrainedModel:
    """A dense or sparse CLIP without storage, whose every matrix product can be counted."""
    # One product for each token and chosen expert, so that counts do not depend on the data
    experts = {"experts_implementation": "batched_mm"} if isinstance(config, SparseMoEConfig) else {}
    config = copy.deepcopy(config)  # transformers writes the implementations into it
    with torch.device("meta"):
        return model_class(config)._from_config(config, attn_implementation="eager", **experts).eval()


def count_parameters(model: PreTrainedModel) -> dict[str, int]:
    """Numbers of parameters.

    Returns:
        `total`; `activated`, those that one token meets: K of the E experts of each sparse layer; both also of each
        tower with its projection (`text`, `text_activated`, `vision`, `vision_activated`), of which a shared encoder is
        a part in both; those of one expert in all layers (`expert`, 0 if dense), of all `routers` and fusion gates,
        and of the towers' layers, without embeddings and projections (`layers`).
    """
    named = list(model.named_parameters(remove_duplicate=False))  # a shared encoder is a part of both towers

    def of(pattern: str) -> int:
        return sum(parameter.numel() for parameter in {p for name, p in named if re.search(pattern, name)})

    counts = {"total": of(""), "activated": of(""), "expert": 0}
    shared, idle_of_tower = getattr(model.config, "shared_encoder", False), {}
    for tower, prefixes in (("text", "text_(model|projection)"), ("vision", "(vision_model|visual_projection)")):
        config = getattr(model.config, f"{tower}_config")
        experts = of(rf"^{tower}_model\..*\.experts\.")
        idle = experts * (config.num_experts - config.num_experts_per_tok) // config.num_experts if experts else 0
        counts[tower] = of(rf"^{prefixes}\.")
        counts[f"{tower}_activated"] = counts[tower] - idle
        idle_of_tower[tower] = idle
        if not (shared and tower == "vision"):  # counted already
            counts["expert"] += experts // config.num_experts if experts else 0
    # Experts of a shared encoder are idle where the tokens of neither tower meet them
    counts["activated"] -= min(idle_of_tower.values()) if shared else sum(idle_of_tower.values())
    counts["routers"] = of(r"\.(router|fusion_gate)\.")
    # AltCLIP's text tower is a RoBERTa
    encoders = [getattr(tower, "roberta", tower).encoder for tower in (model.text_model, model.vision_model)]
    in_layers = {parameter for encoder in encoders for parameter in encoder.parameters()}
    counts["layers"] = sum(parameter.numel() for parameter in in_layers)
    return counts


def count_multiply_adds(model: nn.Module, patches: int | None = None) -> dict[str, int]:
    """Multiply-adds of the forward pass of one image and one text of full length, as torch counts them.

    Args:
        model: what `meta_model` returns.
        patches: those of the image, for a model that takes images of any shape; None: as many as it has positions.

    Returns:
        Of a tower with its projection, `image` and `text`; and `attention_scores`, the part of both that multiplies
        queries with keys and the result with values. A FLOP count is twice the sum of `image` and `text`.
    """
    text, vision = model.config.text_config, model.config.vision_config
    if hasattr(vision, "image_size"):
        shape = 1, vision.num_channels, vision.image_size, vision.image_size
        images = {"pixel_values": torch.zeros(shape, device="meta")}
    else:
        shape = 1, patches or vision.num_patches, vision.num_channels * vision.patch_size**2
        images = {"pixel_values": torch.zeros(shape, device="meta")}  # without padding, hence without a mask
        images["spatial_shapes"] = torch.tensor([[1, shape[1]]])  # not on the meta device: the model reads it
    tokens = torch.zeros(1, longest_text(text), dtype=torch.long, device="meta")
    image, image_scores = _multiply_adds(model, lambda: model.get_image_features(**images))
    caption, caption_scores = _multiply_adds(model, lambda: model.get_text_features(input_ids=tokens))
    return {"image": image, "text": caption, "attention_scores": image_scores + caption_scores}


def _multiply_adds(model: nn.Module, forward: Callable[[], Any]) -> tuple[int, int]:
    """All of them, and those of attention scores."""
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        forward()
    counts = counter.get_flop_counts()
    # Counts are by paths within a tower, and a module's have those of its parts: what pools by attention has some
    heads = [
        f".{name.partition('.')[2]}"
        for name, module in model.named_modules()
        if {"num_heads", "num_attention_heads"} & {*vars(module)}
    ]
    heads = [name for name in heads if not name.startswith(tuple(f"{other}." for other in heads))]
    scores = sum(
        flops
        for module, operations in counts.items()
        if module.endswith(tuple(heads))
        for operation, flops in operations.items()
        if operation == torch.ops.aten.bmm
    )
    return sum(counts["Global"].values()) // 2, scores // 2
