"""Puts a CLIP-MoE into a LLaVA of transformers, in place of its vision tower."""

import logging
from pathlib import Path

import torch
from torch import Tensor
from transformers import MODEL_MAPPING, LlavaConfig, LlavaForConditionalGeneration, PreTrainedConfig, PreTrainedModel

from clip_moe.conversion.checkpoints import HINTS, has_file, load_config, load_model, load_weights
from clip_moe.conversion.processors import HALVES, load_image_processor, load_processor, require_fit
from clip_moe.conversion.verification import check_equal, sample_inputs
from clip_moe.engine.files import save
from modeling_clip_moe.configuration_clip_moe import CLIPMoETowerConfig

logger = logging.getLogger(__name__)

# Cosine of the features of towers that are the same but for rounding
SAME_FEATURES = 0.999


def load_tower(source: str | Path) -> PreTrainedModel:
    """Loads the sparse vision tower of a whole model or of a folder of its own."""
    config = load_config(source)
    vision = getattr(config, "vision_config", config)
    if not isinstance(vision, CLIPMoETowerConfig) or not hasattr(vision, "image_size"):
        hint = HINTS.get(config.model_type, "")
        raise ValueError(
            f"{source} has no sparse vision tower of one image size: its type is {config.model_type!r}{hint}"
        )
    return load_weights(MODEL_MAPPING[type(vision)], source)


def swap(llava: LlavaForConditionalGeneration, tower: PreTrainedModel) -> None:
    """Replaces the vision tower of a LLaVA, in place; the tower takes its dtype."""
    config, old, new = llava.config, llava.config.vision_config, tower.config
    if new.hidden_size != old.hidden_size:
        raise ValueError(
            f"the projector takes hidden states of width {old.hidden_size}, but the tower's have {new.hidden_size}: "
            "use a tower made from the CLIP that this LLaVA was trained with"
        )
    config.vision_config = new
    has_class_token = hasattr(tower.embeddings, "class_embedding")
    if not has_class_token:  # "default" drops it, and would drop a patch
        config.vision_feature_select_strategy = "full"
    config.image_seq_length = _patches(new) + has_class_token - _drops_first(config)
    llava.model.vision_tower = tower.to(llava.dtype)
    warn_without_experts(config)


def _patches(vision: CLIPMoETowerConfig) -> int:
    return (vision.image_size // vision.patch_size) ** 2


def _drops_first(config: LlavaConfig) -> bool:
    return config.vision_feature_select_strategy == "default"


@torch.no_grad()
def likeness(llava: LlavaForConditionalGeneration, tower: PreTrainedModel) -> float:
    """The cosine of a tower's features with those of the LLaVA's own, with which the projector was trained; 0 where the
    two take other images or give another number of tokens."""
    if llava.config.vision_config.image_size != tower.config.image_size:
        return 0.0
    inputs = sample_inputs(tower.config)["pixel_values"].to(llava.dtype)
    towers, layer = (llava.model.vision_tower, tower.to(llava.dtype)), feature_layers(llava.config)[-1]
    first, second = (model(inputs, output_hidden_states=True).hidden_states[layer].float() for model in towers)
    return torch.cosine_similarity(first, second, dim=-1).mean().item() if first.shape == second.shape else 0.0


def feature_layers(config: LlavaConfig) -> list[int]:
    """The hidden states of the vision tower that the projector sees."""
    layers = config.vision_feature_layer
    return [layers] if isinstance(layers, int) else list(layers)


def warn_without_experts(config: LlavaConfig) -> None:
    """Warns of a sparse tower whose experts compute nothing that the projector sees."""
    vision = config.vision_config
    sparse = getattr(vision, "moe_layers", ())  # a dense tower has none
    last = max(layer if layer >= 0 else vision.num_hidden_layers + 1 + layer for layer in feature_layers(config))
    if sparse and min(sparse) >= last:
        logger.warning(
            "the LLaVA uses no experts: it reads the first %d of %d layers (vision_feature_layer %s), but the sparse "
            "layers, counted from 0, are %s: use a tower with earlier sparse layers",
            last, vision.num_hidden_layers, config.vision_feature_layer, sorted(sparse),
        )  # fmt: skip


def sample_llava_inputs(vision_config: CLIPMoETowerConfig, text_config: PreTrainedConfig) -> dict[str, Tensor]:
    """Random images (2, channels, height, width) and token ids (1, at most 16)."""
    input_ids = torch.arange(min(16, text_config.vocab_size - 1))[None]
    return sample_inputs(vision_config) | {"input_ids": input_ids}


@torch.no_grad()
def expected_outputs(llava: LlavaForConditionalGeneration, tower: PreTrainedModel) -> dict[str, Tensor]:
    """The outputs that a LLaVA with this tower must have: the tower's hidden states, projected, and text as before."""
    config, tower = llava.config, tower.to(llava.dtype)
    inputs = sample_llava_inputs(tower.config, config.text_config)
    hidden_states = tower(inputs["pixel_values"].to(llava.dtype), output_hidden_states=True).hidden_states
    selected = torch.cat(
        [hidden_states[layer][:, int(_drops_first(config)) :] for layer in feature_layers(config)], dim=-1
    )
    projected = llava.model.multi_modal_projector(selected)
    return {"image features": projected, "text logits": llava(inputs["input_ids"]).logits}


@torch.no_grad()
def verify(folder: Path, expected: dict[str, Tensor]) -> None:
    """Compares a saved LLaVA with `expected_outputs`."""
    llava = load_model(LlavaForConditionalGeneration, folder)
    inputs = sample_llava_inputs(llava.config.vision_config, llava.config.text_config)
    features = llava.model.get_image_features(inputs["pixel_values"].to(llava.dtype)).pooler_output
    logits = llava(inputs["input_ids"]).logits
    check_equal(expected, {"image features": torch.stack(list(features)), "text logits": logits})


def write_processor(source: str | Path, tower_source: str | Path, folder: Path) -> None:
    """Saves LLaVA's processor with the tower's way to prepare images, if it has one."""
    processor, config, image_source = load_processor(source), load_config(folder), source
    if has_file(tower_source, HALVES["image processor"]):
        processor.image_processor, image_source = load_image_processor(tower_source), tower_source
    require_fit(config, tower_source, image_source, image_processor=processor.image_processor)
    processor.patch_size = config.vision_config.patch_size
    # The processor puts as many image tokens into a text as the model has features
    processor.vision_feature_select_strategy = config.vision_feature_select_strategy
    features = config.image_seq_length + _drops_first(config)
    processor.num_additional_image_tokens = features - _patches(config.vision_config)
    save(processor, folder)


def convert(source: str | Path, tower_source: str | Path, folder: Path) -> None:
    """Saves the LLaVA of `source` with another tower, and its processor. Warns of a tower that was not made from the
    LLaVA's own."""
    llava, tower = load_model(LlavaForConditionalGeneration, source), load_tower(tower_source)
    cosine = likeness(llava, tower)
    if not cosine > SAME_FEATURES:  # also NaN
        way_out = "train the projector again, or make the tower of the LLaVA's own, which may have been trained on"
        logger.warning("the features of %s have a cosine of %.2f with the LLaVA's: %s", tower_source, cosine, way_out)
    swap(llava, tower)
    save(llava, folder)
    write_processor(source, tower_source, folder)
    expected = expected_outputs(llava, tower)
    del llava, tower
    verify(folder, expected)
