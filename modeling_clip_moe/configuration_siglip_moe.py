"""Configurations of sparse SigLIP and SigLIP 2: transformers' own, and each tower's sparse layers."""

from huggingface_hub.dataclasses import strict
from transformers import Siglip2TextConfig, Siglip2VisionConfig, SiglipTextConfig, SiglipVisionConfig

from .configuration_clip_moe import CLIPMoETowerConfig, SparseMoEConfig


@strict
class SiglipMoETextConfig(CLIPMoETowerConfig, SiglipTextConfig):
    """Text tower: the fields of `SiglipTextConfig` and of `CLIPMoETowerConfig`."""

    model_type = "siglip_moe_text_model"


@strict
class SiglipMoEVisionConfig(CLIPMoETowerConfig, SiglipVisionConfig):
    """Vision tower: the fields of `SiglipVisionConfig` and of `CLIPMoETowerConfig`."""

    model_type = "siglip_moe_vision_model"


@strict
class SiglipMoEConfig(SparseMoEConfig):
    """Both towers of a SigLIP, or of a SigLIP 2 of one image size, which has its classes: see `SparseMoEConfig`."""

    model_type = "siglip_moe"
    sub_configs = {"text_config": SiglipMoETextConfig, "vision_config": SiglipMoEVisionConfig}


@strict
class Siglip2MoETextConfig(CLIPMoETowerConfig, Siglip2TextConfig):
    """Text tower: the fields of `Siglip2TextConfig` and of `CLIPMoETowerConfig`."""

    model_type = "siglip2_moe_text_model"


@strict
class Siglip2MoEVisionConfig(CLIPMoETowerConfig, Siglip2VisionConfig):
    """Vision tower: the fields of `Siglip2VisionConfig` and of `CLIPMoETowerConfig`."""

    model_type = "siglip2_moe_vision_model"


@strict
class Siglip2MoEConfig(SparseMoEConfig):
    """Both towers of a SigLIP 2 that takes images of any shape (NaFlex): see `SparseMoEConfig`."""

    model_type = "siglip2_moe"
    sub_configs = {"text_config": Siglip2MoETextConfig, "vision_config": Siglip2MoEVisionConfig}
