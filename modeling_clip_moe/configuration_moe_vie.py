"""Configurations of MoE-ViE (arXiv:2608.17402): of ViE, its dense model, and of the sparse one."""

from typing import ClassVar

from huggingface_hub.dataclasses import strict
from transformers import CLIPTextConfig, CLIPVisionConfig, PreTrainedConfig

from .configuration_clip_moe import CLIPMoEConfig, CLIPMoETowerConfig, PublishedConfig


class ViETowerConfig(PublishedConfig):
    """What a dense tower says where `CLIPMoETowerConfig` has fields: its FFNs are gated, and none is sparse."""

    use_gated_mlp: ClassVar[bool] = True
    moe_layers: ClassVar[tuple[int, ...]] = ()
    num_shared_experts: ClassVar[int] = 0
    fusion_gate: ClassVar[bool] = False
    base_model_fsdp_plan = CLIPMoETowerConfig.base_model_fsdp_plan
    base_model_tp_plan = CLIPMoETowerConfig.base_model_tp_plan
    output_size = CLIPMoETowerConfig.output_size

    def __post_init__(self, **kwargs):
        # Those that the dictionary of a sparse tower carries beside
        foreign = {"model_type", *CLIPMoETowerConfig.__annotations__}
        super().__post_init__(**{name: value for name, value in kwargs.items() if name not in foreign})


@strict
class ViETextConfig(ViETowerConfig, CLIPTextConfig):
    """Text tower: the fields of `CLIPTextConfig`, by default as in MoE-ViE-B/16."""

    model_type = "vie_text_model"

    hidden_size: int = 1024
    intermediate_size: int = 2730
    projection_dim: int | None = 1024
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    max_position_embeddings: int = 144
    hidden_act: str = "silu"


@strict
class ViEVisionConfig(ViETowerConfig, CLIPVisionConfig):
    """
    Vision tower: the fields of `CLIPVisionConfig`, by default as in MoE-ViE-B/16, and these.

    Args:
        image_size (`int`): that of training images. Others may have any sides that are multiples of `patch_size`.
        num_pooling_heads (`int`): heads of the attention that pools the patches.
        rope_theta (`float`): base of the frequencies by which places rotate queries and keys.
    """

    model_type = "vie_vision_model"

    intermediate_size: int = 2048
    projection_dim: int = 1024
    image_size: int = 224
    patch_size: int = 16
    hidden_act: str = "silu"
    num_pooling_heads: int = 8
    rope_theta: float | int = 10000.0

    def validate_architecture(self):
        """Part of `@strict`-powered validation. Refuses sizes that the heads do not divide."""
        super().validate_architecture()
        if self.hidden_size % (4 * self.num_attention_heads) or self.hidden_size % self.num_pooling_heads:
            raise ValueError(
                f"hidden_size must be a multiple of num_pooling_heads ({self.num_pooling_heads}) and of 4 times "
                f"num_attention_heads ({self.num_attention_heads}), since rows and columns each rotate pairs of half a "
                f"head; got {self.hidden_size}."
            )


@strict
class ViEConfig(PublishedConfig):
    """
    Both towers of a dense ViE.

    Args:
        text_config, vision_config (`dict` or configuration, *optional*): the towers, of the classes in `sub_configs`.
        projection_dim (`int`): size of the embeddings that images and texts share.
        logit_scale_init_value (`float`): logarithm of the initial scale of the similarities.
        initializer_factor (`float`): scale of the initial projections.
    """

    is_whole = True
    model_type = "vie"
    sub_configs = {"text_config": ViETextConfig, "vision_config": ViEVisionConfig}
    base_model_fsdp_plan = {}  # the towers have theirs; the default is a language model's
    shared_encoder: ClassVar[bool] = False

    text_config: dict | PreTrainedConfig | None = None
    vision_config: dict | PreTrainedConfig | None = None
    projection_dim: int = 1024
    logit_scale_init_value: float | int = 2.6592
    initializer_factor: float | int = 1.0

    def __post_init__(self, **kwargs):
        for name, config_class in self.sub_configs.items():
            tower = getattr(self, name)
            if tower is None or isinstance(tower, dict):
                setattr(self, name, config_class(**(tower or {})))
            getattr(self, name).projection_dim = self.projection_dim
        super().__post_init__(**kwargs)


@strict
class MoEViETextConfig(CLIPMoETowerConfig, ViETextConfig):
    """Text tower: the fields of `ViETextConfig` and of `CLIPMoETowerConfig`. Released ones are dense."""

    model_type = "moe_vie_text_model"

    use_gated_mlp: bool = True


@strict
class MoEViEVisionConfig(CLIPMoETowerConfig, ViEVisionConfig):
    """Vision tower: the fields of `ViEVisionConfig` and of `CLIPMoETowerConfig`. In released ones, every layer but the
    first is sparse."""

    model_type = "moe_vie_vision_model"

    use_gated_mlp: bool = True


@strict
class MoEViEConfig(CLIPMoEConfig):
    """Both towers of a MoE-ViE, and the losses of their routers: the fields of `CLIPMoEConfig`."""

    model_type = "moe_vie"
    sub_configs = {"text_config": MoEViETextConfig, "vision_config": MoEViEVisionConfig}

    projection_dim: int = 1024
