"""Configurations of MoE-ViE (arXiv:2608.17402), and of ViE, its dense model: a MoE-ViE without sparse layers."""

from huggingface_hub.dataclasses import strict
from transformers import CLIPTextConfig, CLIPVisionConfig

from .configuration_clip_moe import CLIPMoEConfig, CLIPMoETowerConfig


@strict
class MoEViETextConfig(CLIPMoETowerConfig, CLIPTextConfig):
    """Text tower: the fields of `CLIPTextConfig` and of `CLIPMoETowerConfig`, by default as in MoE-ViE-B/16. Released
    ones are dense."""

    model_type = "moe_vie_text_model"

    use_gated_mlp: bool = True
    hidden_size: int = 1024
    intermediate_size: int = 2730
    projection_dim: int | None = 1024
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    max_position_embeddings: int = 144
    hidden_act: str = "silu"


@strict
class MoEViEVisionConfig(CLIPMoETowerConfig, CLIPVisionConfig):
    """
    Vision tower: the fields of `CLIPVisionConfig` and of `CLIPMoETowerConfig`, by default those of MoE-ViE-B/16 without
    its sparse layers, which are all but the first, and these.

    Args:
        image_size (`int`): that of training images. Others may have any sides that are multiples of `patch_size`.
        num_pooling_heads (`int`): heads of the attention that pools the patches.
        rope_theta (`float`): base of the frequencies by which places rotate queries and keys.
    """

    model_type = "moe_vie_vision_model"

    use_gated_mlp: bool = True
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
class MoEViEConfig(CLIPMoEConfig):
    """Both towers of a MoE-ViE, and the losses of their routers: the fields of `CLIPMoEConfig`."""

    model_type = "moe_vie"
    sub_configs = {"text_config": MoEViETextConfig, "vision_config": MoEViEVisionConfig}

    projection_dim: int = 1024


@strict
class ViEConfig(MoEViEConfig):
    """Both towers of a ViE: the fields of `MoEViEConfig`, with empty `moe_layers` in both towers."""

    model_type = "vie"

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if self.text_config.moe_layers or self.vision_config.moe_layers:
            raise ValueError("moe_layers must be empty: a ViE is dense. Take a MoEViEConfig.")
