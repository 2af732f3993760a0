"""Configurations of families whose image tower alone is sparse: Chinese-CLIP, AltCLIP and MLCD."""

from huggingface_hub.dataclasses import strict
from transformers import AltCLIPTextConfig, ChineseCLIPTextConfig, MLCDVisionConfig

from .configuration_clip_moe import CLIPMoEConfig, CLIPMoETowerConfig, CLIPMoEVisionConfig


@strict
class DenseTextConfig(CLIPMoETowerConfig):
    """A text tower that stays dense, since its layers have no `mlp` of `fc1` and `fc2`: `moe_layers` is empty."""

    base_model_ep_plan = {}
    base_model_tp_plan = {}

    def validate_moe(self):
        """Part of `@strict`-powered validation. Refuses sparse layers."""
        super().validate_moe()
        if self.moe_layers:
            raise ValueError(f"moe_layers must be empty: this text tower stays dense, got {self.moe_layers}.")


@strict
class ChineseCLIPMoETextConfig(DenseTextConfig, ChineseCLIPTextConfig):
    """Text tower: the fields of `ChineseCLIPTextConfig` and of `DenseTextConfig`."""

    model_type = "chinese_clip_moe_text_model"
    base_model_fsdp_plan = {"embeddings": "free_full_weight", "encoder.layer.*": "free_full_weight"}


@strict
class ChineseCLIPMoEConfig(CLIPMoEConfig):
    """Both towers of a Chinese-CLIP, and the losses of the image tower's routers: the fields of `CLIPMoEConfig`."""

    model_type = "chinese_clip_moe"
    sub_configs = {"text_config": ChineseCLIPMoETextConfig, "vision_config": CLIPMoEVisionConfig}


@strict
class AltCLIPMoETextConfig(DenseTextConfig, AltCLIPTextConfig):
    """Text tower: the fields of `AltCLIPTextConfig` and of `DenseTextConfig`."""

    model_type = "altclip_moe_text_model"
    base_model_fsdp_plan = {"roberta.embeddings": "free_full_weight", "roberta.encoder.layers.*": "free_full_weight"}

    @property
    def output_size(self) -> int:
        """The size of what the tower pools, after its transformation."""
        return self.project_dim


@strict
class AltCLIPMoEConfig(CLIPMoEConfig):
    """Both towers of an AltCLIP, and the losses of the image tower's routers: the fields of `CLIPMoEConfig`."""

    model_type = "altclip_moe"
    sub_configs = {"text_config": AltCLIPMoETextConfig, "vision_config": CLIPMoEVisionConfig}

    projection_dim: int = 768


@strict
class MLCDMoEVisionConfig(CLIPMoETowerConfig, MLCDVisionConfig):
    """Vision tower: the fields of `MLCDVisionConfig` and of `CLIPMoETowerConfig`."""

    model_type = "mlcd_moe_vision_model"
