"""MetaCLIP 2 with sparse Mixture-of-Experts layers. It is CLIP but for the token that it pools at."""

import torch
from torch import Tensor

from .configuration_metaclip_2_moe import MetaClip2MoEConfig, MetaClip2MoETextConfig
from .modeling_clip_moe import CLIPMoEModel, CLIPMoETextModel


class MetaClip2MoETextModel(CLIPMoETextModel):
    """The text tower, without projection."""

    config: MetaClip2MoETextConfig

    def pooled_positions(self, input_ids: Tensor) -> Tensor:
        """(B,), which token of each text (B, S) is pooled: the first end-of-text token, whatever its id."""
        return (input_ids == self.config.eos_token_id).to(torch.int).argmax(dim=-1)


class MetaClip2MoEModel(CLIPMoEModel):
    """Both towers and their projections into one space."""

    config: MetaClip2MoEConfig
    base_model_prefix = "metaclip_2_moe"
    text_model_class = MetaClip2MoETextModel
