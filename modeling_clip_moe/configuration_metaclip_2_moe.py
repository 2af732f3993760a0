"""Configuration of a sparse MetaCLIP 2. Its layers are CLIP's, and so are the fields."""

from huggingface_hub.dataclasses import strict

from .configuration_clip_moe import CLIPMoEConfig, CLIPMoETextConfig, CLIPMoEVisionConfig, auto_map


@strict
class MetaClip2MoETextConfig(CLIPMoETextConfig):
    """Text tower: the fields of `CLIPMoETextConfig`. Pools at the first `eos_token_id`, also if that is 2."""

    model_type = "metaclip_2_moe_text_model"

    def __post_init__(self, **kwargs):
        models = {"AutoModel": "MetaClip2MoETextModel"}
        kwargs.setdefault("auto_map", auto_map("metaclip_2_moe", "MetaClip2MoETextConfig", **models))
        super().__post_init__(**kwargs)


@strict
class MetaClip2MoEConfig(CLIPMoEConfig):
    """Both towers of a MetaCLIP 2, and the losses of their routers: the fields of `CLIPMoEConfig`."""

    model_type = "metaclip_2_moe"
    sub_configs = {"text_config": MetaClip2MoETextConfig, "vision_config": CLIPMoEVisionConfig}

    def __post_init__(self, **kwargs):
        models = dict.fromkeys(("AutoModel", "AutoModelForZeroShotImageClassification"), "MetaClip2MoEModel")
        kwargs.setdefault("auto_map", auto_map("metaclip_2_moe", "MetaClip2MoEConfig", **models))
        super().__post_init__(**kwargs)


__all__ = ["MetaClip2MoEConfig", "MetaClip2MoETextConfig"]
