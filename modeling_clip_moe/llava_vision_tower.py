"""CLIP-MoE as the vision tower of the original LLaVA (https://github.com/haotian-liu/LLaVA), which has to be installed.

    from modeling_clip_moe.llava_vision_tower import patch_llava

    patch_llava()  # before LLaVA builds a model; then mm_vision_tower may name a CLIP-MoE

LLaVA's own builder loads every folder as a dense CLIP, which our folders refuse. transformers' own LLaVA needs none of
this.
"""

from llava.model import llava_arch
from llava.model.multimodal_encoder import builder
from llava.model.multimodal_encoder.clip_encoder import CLIPVisionTower
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from .configuration_clip_moe import CLIPMoEConfig, CLIPMoEVisionConfig
from .modeling_clip_moe import CLIPMoEVisionModel


class CLIPMoEVisionTower(CLIPVisionTower):
    """LLaVA's tower around a `CLIPMoEVisionModel`: frozen, features (B, patches, D) of `args.mm_vision_select_layer`.

    Args:
        vision_tower: folder or hub name of a whole model or of a vision tower, with its image processor.
        args: LLaVA's settings.
        delay_load: leave the weights for a later `load_model()`.
    """

    def __init__(self, vision_tower, args, delay_load=False):
        super().__init__(vision_tower, args, delay_load)
        self.cfg_only = CLIPMoEVisionConfig.from_pretrained(vision_tower)

    def load_model(self, device_map=None):
        if self.is_loaded:  # LLaVA asks again; what was trained since must stay
            return
        self.image_processor = AutoImageProcessor.from_pretrained(self.vision_tower_name)
        self.vision_tower = CLIPMoEVisionModel.from_pretrained(self.vision_tower_name, device_map=device_map)
        self.vision_tower.requires_grad_(False)
        self.is_loaded = True


def patch_llava() -> None:
    """Teaches LLaVA's builder this tower; any other one is built as before.

    Raises, when such a tower is built:
        ValueError: with LLaVA's `s2`, features of several scales, which this tower does not have.
    """
    build_other = builder.build_vision_tower

    def build_vision_tower(vision_tower_cfg, **kwargs) -> nn.Module:
        name = getattr(vision_tower_cfg, "mm_vision_tower", getattr(vision_tower_cfg, "vision_tower", None))
        config, _ = PreTrainedConfig.get_config_dict(name)
        if config.get("model_type") not in (CLIPMoEConfig.model_type, CLIPMoEVisionConfig.model_type):
            return build_other(vision_tower_cfg, **kwargs)
        if getattr(vision_tower_cfg, "s2", False):
            raise ValueError(f"{name} is a CLIP-MoE, for which there is no s2=True: build it without")
        return CLIPMoEVisionTower(name, args=vision_tower_cfg, **kwargs)

    # llava_arch imported the function by its name
    builder.build_vision_tower = llava_arch.build_vision_tower = build_vision_tower
