"""SigLIP and SigLIP 2 with sparse Mixture-of-Experts layers: transformers' classes with the block of `sparse_moe`."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import (
    PreTrainedConfig,
    Siglip2Model,
    Siglip2TextModel,
    Siglip2VisionModel,
    SiglipModel,
    SiglipTextModel,
    SiglipVisionModel,
)
from transformers import initialization as init
from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer, SiglipOutput, SiglipPreTrainedModel
from transformers.models.siglip2.modeling_siglip2 import Siglip2EncoderLayer, Siglip2PreTrainedModel

from .configuration_siglip_moe import (
    Siglip2MoEConfig,
    Siglip2MoETextConfig,
    Siglip2MoEVisionConfig,
    SiglipMoEConfig,
    SiglipMoETextConfig,
    SiglipMoEVisionConfig,
)
from .experts import CLIPMoEExperts
from .loading import SparseMoEMixin, WholeModelMixin
from .router_losses import with_router_losses
from .sparse_moe import ROUTER_OUTPUTS, RouterLossFields, SparseEncoderLayer


@dataclass
class SiglipMoEOutput(RouterLossFields, SiglipOutput):
    """Output of `SiglipMoEModel` and `Siglip2MoEModel`."""


class SiglipMoEEncoderLayer(SparseEncoderLayer, SiglipEncoderLayer):
    """SigLIP's layer, with a sparse block instead of the FFN in the layers of `config.moe_layers`."""


class Siglip2MoEEncoderLayer(SparseEncoderLayer, Siglip2EncoderLayer):
    """SigLIP 2's layer, with a sparse block instead of the FFN in the layers of `config.moe_layers`."""


class _SiglipMoEMixin(SparseMoEMixin):
    """Shared by sparse SigLIP and SigLIP 2, whose code in transformers differs in names and patches alone."""

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, CLIPMoEExperts):  # as the family's own FFN
            bound = (6 / sum(module.down_proj.shape[1:])) ** 0.5  # Xavier's, of each expert
            for weight in module.weights()[::2]:
                init.uniform_(weight, -bound, bound)
            for bias in module.weights()[1::2]:
                if bias is not None:
                    init.normal_(bias, std=1e-6)


def require_padded(input_ids: Tensor, text_config: PreTrainedConfig) -> None:
    """Raises ValueError if texts (B, S) for a SigLIP, which pools the last place, are not padded to
    `max_position_embeddings`."""
    length = text_config.max_position_embeddings
    if input_ids.shape[-1] != length:
        raise ValueError(
            f"input_ids have {input_ids.shape[-1]} tokens a text, but SigLIP needs {length}: pass "
            f'padding="max_length", max_length={length}, truncation=True to the processor.'
        )


class _SiglipMoETextModel:
    """Stands before a text tower of SigLIP. Its texts are padded, and every place is a token, padding too."""

    _tower_prefix = "text_model."

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs):
        """
        Args:
            input_ids: (B, S), padded to S = `max_position_embeddings`, or ValueError: the tower pools the last place.
            attention_mask: (B, S), 1 for a token and 0 for padding. Released models were trained without one.
        """
        require_padded(input_ids, self.config)
        return super().forward(input_ids, attention_mask, **kwargs)


class _SiglipMoEModel(WholeModelMixin):
    """Stands before a whole SigLIP."""

    _scalars = ("logit_scale", "logit_bias")

    def __init__(self, config: SiglipMoEConfig | Siglip2MoEConfig):
        super().__init__(config)
        self.logit_scale = nn.Parameter(torch.empty(1))
        self.logit_bias = nn.Parameter(torch.empty(1))
        self.post_init()


class SiglipMoEPreTrainedModel(_SiglipMoEMixin, SiglipPreTrainedModel):
    """Base of this family's models."""

    config: SiglipMoEConfig
    base_model_prefix = "siglip_moe"
    layer_class = SiglipMoEEncoderLayer
    _no_split_modules = [
        "SiglipMoEEncoderLayer" if n == "SiglipEncoderLayer" else n for n in SiglipPreTrainedModel._no_split_modules
    ]
    _can_record_outputs = {**SiglipPreTrainedModel._can_record_outputs, **ROUTER_OUTPUTS}


class SiglipMoETextModel(_SiglipMoETextModel, SiglipMoEPreTrainedModel, SiglipTextModel):
    """The text tower with its head."""

    config: SiglipMoETextConfig


class SiglipMoEVisionModel(SiglipMoEPreTrainedModel, SiglipVisionModel):
    """The vision tower with its attention pooling."""

    config: SiglipMoEVisionConfig
    _tower_prefix = "vision_model."


class SiglipMoEModel(_SiglipMoEModel, SiglipMoEPreTrainedModel, SiglipModel):
    """Both towers, with the scale and the bias of their similarities."""

    config: SiglipMoEConfig
    dense_class = SiglipModel
    text_model_class = SiglipMoETextModel
    vision_model_class = SiglipMoEVisionModel
    forward = with_router_losses(SiglipModel.forward, SiglipMoEOutput)


class Siglip2MoEPreTrainedModel(_SiglipMoEMixin, Siglip2PreTrainedModel):
    """Base of this family's models."""

    config: Siglip2MoEConfig
    base_model_prefix = "siglip2_moe"
    layer_class = Siglip2MoEEncoderLayer
    _no_split_modules = [
        "Siglip2MoEEncoderLayer" if n == "Siglip2EncoderLayer" else n for n in Siglip2PreTrainedModel._no_split_modules
    ]
    _can_record_outputs = {**Siglip2PreTrainedModel._can_record_outputs, **ROUTER_OUTPUTS}


class Siglip2MoETextModel(_SiglipMoETextModel, Siglip2MoEPreTrainedModel, Siglip2TextModel):
    """The text tower with its head."""

    config: Siglip2MoETextConfig


class Siglip2MoEVisionModel(Siglip2MoEPreTrainedModel, Siglip2VisionModel):
    """The vision tower with its attention pooling."""

    config: Siglip2MoEVisionConfig
    _tower_prefix = "vision_model."

    def forward(self, pixel_values: Tensor, pixel_attention_mask: Tensor, spatial_shapes: Tensor, **kwargs):
        """As `Siglip2VisionModel.forward`. Padding in `pixel_attention_mask` (B, S) goes to no expert."""
        return super().forward(pixel_values, pixel_attention_mask, spatial_shapes, mask=pixel_attention_mask, **kwargs)


class Siglip2MoEModel(_SiglipMoEModel, Siglip2MoEPreTrainedModel, Siglip2Model):
    """Both towers, with the scale and the bias of their similarities."""

    config: Siglip2MoEConfig
    dense_class = Siglip2Model
    text_model_class = Siglip2MoETextModel
    vision_model_class = Siglip2MoEVisionModel
    forward = with_router_losses(Siglip2Model.forward, SiglipMoEOutput, vision_mask="pixel_attention_mask")
