"""CLIP with ReLU routing (ReMoE, arXiv:2412.14711): a token meets every expert of a positive score.

    clip-moe run --config lab/recipes/relu_routing.yaml --import lab.methods.relu_router

This file is published with weights, so it imports nothing but the model's code; `relu_routing.py` trains it.
"""

from typing import ClassVar

import torch
from huggingface_hub.dataclasses import strict

from modeling_clip_moe.configuration_clip_moe import CLIPMoEConfig, CLIPMoETextConfig, CLIPMoEVisionConfig
from modeling_clip_moe.modeling_clip_moe import CLIPMoEModel
from modeling_clip_moe.sparse_moe import CLIPMoERouter


class ReluRouter(CLIPMoERouter):
    """Scores at or above 0 (ReMoE eq. 5), which are the weights; a token may have none.

    `num_experts_per_tok` is the average number of positive scores that training aims at. With `norm_topk_prob`, which
    the comparison with the dense model sets, it is the library's router: weights that have to sum to 1 cannot be 0.
    """

    def score(self, logits: torch.Tensor) -> torch.Tensor:
        return super().score(logits) if self.config.norm_topk_prob else logits.relu()

    def choose(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All E scores, best first, and their ids; the id of a score of 0 is E."""
        if self.config.norm_topk_prob:
            return super().choose(scores)
        scores, ids = scores.sort(dim=-1, descending=True, stable=True)
        return scores, ids.masked_fill(scores == 0, self.config.num_experts)


class ReluTowerConfig:
    """The fields of a tower that ReLU routing leaves no choice."""

    router_class: ClassVar[type] = ReluRouter

    def validate_moe(self):
        super().validate_moe()
        needless = ("norm_topk_prob", "use_expert_bias", "capacity_factor", "eval_capacity_factor")
        if self.moe_layers and (wrong := [name for name in needless if getattr(self, name)]):
            raise ValueError(
                f"ReLU routing goes without {', '.join(wrong)}: its scores are the weights, and all experts of a "
                "positive score compute. Set norm_topk_prob and use_expert_bias to false and both capacities to null"
            )


@strict
class ReluTextConfig(ReluTowerConfig, CLIPMoETextConfig):
    model_type = "relu_clip_text_model"


@strict
class ReluVisionConfig(ReluTowerConfig, CLIPMoEVisionConfig):
    model_type = "relu_clip_vision_model"


@strict
class ReluCLIPConfig(CLIPMoEConfig):
    model_type = "relu_clip"
    sub_configs = {"text_config": ReluTextConfig, "vision_config": ReluVisionConfig}


class ReluCLIPModel(CLIPMoEModel):
    config: ReluCLIPConfig
