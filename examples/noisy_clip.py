"""CLIP-UP with noise on the router's scores while it trains (arXiv:1701.06538, eq. 4, with one deviation for all)."""

from typing import ClassVar

import torch
from huggingface_hub.dataclasses import strict

from modeling_clip_moe.configuration_clip_moe import CLIPMoEConfig, CLIPMoETextConfig, CLIPMoEVisionConfig
from modeling_clip_moe.modeling_clip_moe import CLIPMoEModel
from modeling_clip_moe.sparse_moe import CLIPMoERouter


class NoisyRouter(CLIPMoERouter):
    def score(self, logits):
        if self.training:
            logits = logits + torch.randn_like(logits)
        return super().score(logits)


@strict
class NoisyTextConfig(CLIPMoETextConfig):
    model_type = "noisy_clip_text_model"
    router_class: ClassVar[type] = NoisyRouter


@strict
class NoisyVisionConfig(CLIPMoEVisionConfig):
    model_type = "noisy_clip_vision_model"
    router_class: ClassVar[type] = NoisyRouter


@strict
class NoisyCLIPConfig(CLIPMoEConfig):
    model_type = "noisy_clip"
    sub_configs = {"text_config": NoisyTextConfig, "vision_config": NoisyVisionConfig}


class NoisyCLIPModel(CLIPMoEModel):
    config: NoisyCLIPConfig
