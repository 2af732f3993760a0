"""Families whose image tower alone is sparse: Chinese-CLIP and AltCLIP, which have CLIP's, and MLCD, which reads no
texts."""

from torch import Tensor
from transformers import AltCLIPTextModel, ChineseCLIPTextModel, MLCDVisionModel
from transformers.models.mlcd.modeling_mlcd import MLCDEncoderLayer

from .configuration_vision_moe import (
    AltCLIPMoEConfig,
    AltCLIPMoETextConfig,
    ChineseCLIPMoEConfig,
    ChineseCLIPMoETextConfig,
    MLCDMoEVisionConfig,
)
from .loading import SparseMoEMixin
from .modeling_clip_moe import CLIPMoEModel, CLIPMoEModelOutputWithPooling
from .sparse_moe import ROUTER_OUTPUTS, SparseEncoderLayer
from .transformers_internals import can_return_tuple


class _DenseTextModel(SparseMoEMixin):
    """Stands before a family's text tower, which stays dense. It pools the first token of a text."""

    _tower_prefix = "text_model."

    @can_return_tuple
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs):
        """See `CLIPMoETextModel.forward`."""
        outputs = super().forward(input_ids, attention_mask, return_dict=True, **kwargs)
        return CLIPMoEModelOutputWithPooling(**{**outputs, "pooler_output": outputs.last_hidden_state[:, 0]})


class ChineseCLIPMoETextModel(_DenseTextModel, ChineseCLIPTextModel):
    """The text tower, without projection."""

    config: ChineseCLIPMoETextConfig

    def __init__(self, config: ChineseCLIPMoETextConfig):
        super().__init__(config, add_pooling_layer=False)


class ChineseCLIPMoEModel(CLIPMoEModel):
    """Both towers and their projections into one space."""

    config: ChineseCLIPMoEConfig
    base_model_prefix = "chinese_clip_moe"
    text_model_class = ChineseCLIPMoETextModel


class AltCLIPMoETextModel(_DenseTextModel, AltCLIPTextModel):
    """The text tower, without projection."""

    config: AltCLIPMoETextConfig


class AltCLIPMoEModel(CLIPMoEModel):
    """Both towers and their projections into one space."""

    config: AltCLIPMoEConfig
    base_model_prefix = "altclip_moe"
    text_model_class = AltCLIPMoETextModel


class MLCDMoEEncoderLayer(SparseEncoderLayer, MLCDEncoderLayer):
    """MLCD's layer, with a sparse block instead of the FFN in the layers of `config.moe_layers`."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **kwargs,
    ) -> Tensor:
        """See `SparseEncoderLayer.forward`. The position embeddings (S, D / heads) rotate queries and keys."""
        return super().forward(hidden_states, attention_mask, position_embeddings=position_embeddings, **kwargs)


class MLCDMoEVisionModel(SparseMoEMixin, MLCDVisionModel):
    """MLCD's vision tower, for LLaVA."""

    config: MLCDMoEVisionConfig
    layer_class = MLCDMoEEncoderLayer
    _no_split_modules = ["MLCDMoEEncoderLayer"]
    _can_record_outputs = {**MLCDVisionModel._can_record_outputs, **ROUTER_OUTPUTS}
