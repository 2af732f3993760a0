"""Configurations of sparse SigLIP and SigLIP 2: transformers' own, and each tower's sparse layers."""

from huggingface_hub.dataclasses import strict
from transformers import Siglip2TextConfig, Siglip2VisionConfig, SiglipTextConfig, SiglipVisionConfig

from .configuration_clip_moe import CLIPMoETowerConfig, SparseMoEConfig


@strict
class SiglipMoETextConfig(CLIPMoETowerConfig, SiglipTextConfig):
    """Text tower: the fields of `SiglipTextConfig` and of `CLIPMoETowerConfig`."""

    model_type = "siglip_moe_text_model"
    base_config_key = "text_config"
    auto_classes = {
        "AutoConfig": "configuration_siglip_moe.SiglipMoETextConfig",
        "AutoModel": "modeling_siglip_moe.SiglipMoETextModel",
    }


@strict
class SiglipMoEVisionConfig(CLIPMoETowerConfig, SiglipVisionConfig):
    """Vision tower: the fields of `SiglipVisionConfig` and of `CLIPMoETowerConfig`."""

    model_type = "siglip_moe_vision_model"
    base_config_key = "vision_config"
    auto_classes = {
        "AutoConfig": "configuration_siglip_moe.SiglipMoEVisionConfig",
        "AutoModel": "modeling_siglip_moe.SiglipMoEVisionModel",
    }


@strict
class SiglipMoEConfig(SparseMoEConfig):
    """Both towers of a SigLIP, or of a SigLIP 2 of one image size, which has its classes: see `SparseMoEConfig`."""

    model_type = "siglip_moe"
    sub_configs = {"text_config": SiglipMoETextConfig, "vision_config": SiglipMoEVisionConfig}
    auto_classes = {
        "AutoConfig": "configuration_siglip_moe.SiglipMoEConfig",
        "AutoModel": "modeling_siglip_moe.SiglipMoEModel",
        "AutoModelForZeroShotImageClassification": "modeling_siglip_moe.SiglipMoEModel",
    }


@strict
class Siglip2MoETextConfig(CLIPMoETowerConfig, Siglip2TextConfig):
    """Text tower: the fields of `Siglip2TextConfig` and of `CLIPMoETowerConfig`."""

    model_type = "siglip2_moe_text_model"
    base_config_key = "text_config"
    auto_classes = {
        "AutoConfig": "configuration_siglip_moe.Siglip2MoETextConfig",
        "AutoModel": "modeling_siglip_moe.Siglip2MoETextModel",
    }


@strict
class Siglip2MoEVisionConfig(CLIPMoETowerConfig, Siglip2VisionConfig):
    """Vision tower: the fields of `Siglip2VisionConfig` and of `CLIPMoETowerConfig`."""

    model_type = "siglip2_moe_vision_model"
    base_config_key = "vision_config"
    auto_classes = {
        "AutoConfig": "configuration_siglip_moe.Siglip2MoEVisionConfig",
        "AutoModel": "modeling_siglip_moe.Siglip2MoEVisionModel",
    }


@strict
class Siglip2MoEConfig(SparseMoEConfig):
    """Both towers of a SigLIP 2 that takes images of any shape (NaFlex): see `SparseMoEConfig`."""

    model_type = "siglip2_moe"
    sub_configs = {"text_config": Siglip2MoETextConfig, "vision_config": Siglip2MoEVisionConfig}
    auto_classes = {
        "AutoConfig": "configuration_siglip_moe.Siglip2MoEConfig",
        "AutoModel": "modeling_siglip_moe.Siglip2MoEModel",
        "AutoModelForZeroShotImageClassification": "modeling_siglip_moe.Siglip2MoEModel",
    }


__all__ = [
    "Siglip2MoEConfig",
    "Siglip2MoETextConfig",
    "Siglip2MoEVisionConfig",
    "SiglipMoEConfig",
    "SiglipMoETextConfig",
    "SiglipMoEVisionConfig",
]
