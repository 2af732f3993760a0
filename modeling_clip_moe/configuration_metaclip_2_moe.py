"""Configuration of a sparse MetaCLIP 2. Its layers are CLIP's, and so are the fields."""

from huggingface_hub.dataclasses import strict

from .configuration_clip_moe import CLIPMoEConfig, CLIPMoETextConfig, CLIPMoEVisionConfig


@strict
class MetaClip2MoETextConfig(CLIPMoETextConfig):
    """Text tower: the fields of `CLIPMoETextConfig`. Pools at the first `eos_token_id`, also if that is 2."""

    model_type = "metaclip_2_moe_text_model"


@strict
class MetaClip2MoEConfig(CLIPMoEConfig):
    """Both towers of a MetaCLIP 2, and the losses of their routers: the fields of `CLIPMoEConfig`."""

    model_type = "metaclip_2_moe"
    sub_configs = {"text_config": MetaClip2MoETextConfig, "vision_config": CLIPMoEVisionConfig}
