"""
MoE-ViE (arXiv:2608.17402) and ViE, its dense model: a CLIP with gated FFNs, whose image tower has rotary positions and
pools by attention. The axes of tensors are named in `sparse_moe`.

In the authors' files a head's channels 2 i and 2 i + 1 rotate together. Here, as everywhere in transformers, channels i
and i + n / 2 of a head of n do. So row 2 i + j of each head of their queries and keys is row j n / 2 + i of ours:
`weight.view(heads, n // 2, 2, -1).transpose(1, 2).reshape(weight.shape)`, biases alike. Values keep their order.
"""

import torch
from torch import Tensor, nn
from transformers import SiglipVisionConfig
from transformers import initialization as init
from transformers.models.clip.modeling_clip import CLIPAttention
from transformers.models.siglip.modeling_siglip import SiglipMultiheadAttentionPoolingHead
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs

from .configuration_moe_vie import MoEViEConfig, MoEViETextConfig, MoEViEVisionConfig, ViEConfig
from .modeling_clip_moe import (
    CLIPMoEEncoder,
    CLIPMoEEncoderLayer,
    CLIPMoEModel,
    CLIPMoEModelOutputWithPooling,
    CLIPMoEPreTrainedModel,
    CLIPMoETextModel,
    CLIPMoEVisionModel,
)
from .transformers_internals import ALL_ATTENTION_FUNCTIONS, eager_attention_forward


class ViEVisionEmbeddings(nn.Module):
    """Patches row by row, without positions and class token. Images may have any size of whole patches."""

    def __init__(self, config: MoEViEVisionConfig):
        super().__init__()
        self.embed_dim, self.patch_size = config.hidden_size, config.patch_size
        self.patch_embedding = nn.Conv2d(
            config.num_channels, config.hidden_size, kernel_size=config.patch_size, stride=config.patch_size, bias=False
        )

    def forward(self, pixel_values: Tensor, interpolate_pos_encoding: bool = False) -> Tensor:
        """From (B, channels, height, width) to (B, S, D). There are no positions to interpolate."""
        height, width = pixel_values.shape[-2:]
        if height % self.patch_size or width % self.patch_size:
            raise ValueError(
                f"images of {height} x {width} pixels are not whole patches of {self.patch_size} x {self.patch_size}: "
                "resize or crop them to multiples of it, as the model's image processor does."
            )
        return self.patch_embedding(pixel_values.to(self.patch_embedding.weight.dtype)).flatten(2).transpose(1, 2)


def rotary_angles(rows: int, columns: int, head_size: int, theta: float, device: torch.device) -> Tensor:
    """Angles by which n / 2 pairs of channels of a head turn in each patch, (rows * columns, n / 2) in float32:
    the first half by its column, the second by its row, both counted from 1."""
    exponents = torch.arange(0, head_size // 2, 2, device=device, dtype=torch.float32) / (head_size // 2)
    frequencies = theta**-exponents  # (n / 4,)
    by_row = torch.arange(1, rows + 1, device=device)[:, None] * frequencies
    by_column = torch.arange(1, columns + 1, device=device)[:, None] * frequencies
    grid = rows, columns, len(frequencies)
    return torch.cat([by_column[None].expand(grid), by_row[:, None].expand(grid)], dim=-1).flatten(0, 1)


def _rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns pairs of channels (B, heads, S, n), in float32 or higher precision."""
    first, second = states.to(torch.promote_types(states.dtype, cos.dtype)).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(states.dtype)


class ViEVisionAttention(CLIPAttention):
    """CLIP's attention with rotary positions. MLCD's computes the same, but copies queries, keys and values, and knows
    no tensor parallelism."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[Tensor, Tensor | None]:
        """The position embeddings are cosine and sine (S, n / 2) of the angles by which places rotate heads of n."""
        heads = (*hidden_states.shape[:-1], -1, self.head_dim)
        queries, keys, values = (
            projection(hidden_states).view(heads).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attend(
            self,
            _rotate(queries, *position_embeddings),
            _rotate(keys, *position_embeddings),
            values,
            attention_mask,
            scaling=self.scale,
            dropout=self.dropout if self.training else 0.0,
            **kwargs,
        )
        return self.out_proj(output.flatten(2)), weights


class ViEVisionEncoderLayer(CLIPMoEEncoderLayer):
    """The layer of CLIP's sparse towers with this attention."""

    def __init__(self, config: MoEViEVisionConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.self_attn = ViEVisionAttention(config)


class ViEVisionEncoder(CLIPMoEEncoder):
    """CLIP's encoder with these layers."""

    layer_class = ViEVisionEncoderLayer


class ViEPoolingHead(SiglipMultiheadAttentionPoolingHead):
    """SigLIP's attention pooling, of its own number of heads, with an FFN of 4 D and the exact GELU."""

    def __init__(self, config: MoEViEVisionConfig):
        head_config = SiglipVisionConfig(
            hidden_size=config.hidden_size,
            intermediate_size=4 * config.hidden_size,
            num_attention_heads=config.num_pooling_heads,
            hidden_act="gelu",
            layer_norm_eps=config.layer_norm_eps,
        )
        super().__init__(head_config)


class ViEPreTrainedModel(CLIPMoEPreTrainedModel):
    """Base of the towers and models of both families."""

    _no_split_modules = ["CLIPTextEmbeddings", "ViEVisionEmbeddings", "CLIPMoEEncoderLayer", "ViEVisionEncoderLayer"]
    _no_split_modules += ["ViEPoolingHead"]

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, ViEPoolingHead):  # its attention and FFN have transformers' defaults
            init.xavier_uniform_(module.probe)


class MoEViETextModel(ViEPreTrainedModel, CLIPMoETextModel):
    """The text tower, without projection: CLIP's with gated FFNs and without a last norm."""

    config: MoEViETextConfig

    def __init__(self, config: MoEViETextConfig):
        super().__init__(config)
        self.final_layer_norm = nn.Identity()


class MoEViEVisionModel(ViEPreTrainedModel, CLIPMoEVisionModel):
    """The vision tower with its attention pooling, without projection."""

    config: MoEViEVisionConfig

    def __init__(self, config: MoEViEVisionConfig):
        super(CLIPMoEVisionModel, self).__init__(config)  # not CLIP's own, which builds its embeddings and layers
        self.embeddings = ViEVisionEmbeddings(config)
        self.pre_layrnorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)  # misspelled as CLIP's
        self.encoder = ViEVisionEncoder(config)
        self.head = ViEPoolingHead(config)
        self.post_init()

    def forward(
        self, pixel_values: Tensor, interpolate_pos_encoding: bool = False, **kwargs: Unpack[TransformersKwargs]
    ) -> CLIPMoEModelOutputWithPooling:
        """
        Args:
            pixel_values: (B, channels, height, width), of any size of whole patches.
            interpolate_pos_encoding: as CLIP's, without effect: rotary positions are not interpolated.
        """
        config = self.config
        rows, columns = (side // config.patch_size for side in pixel_values.shape[-2:])
        head_size = config.hidden_size // config.num_attention_heads
        angles = rotary_angles(rows, columns, head_size, config.rope_theta, pixel_values.device)
        return super().forward(pixel_values, position_embeddings=(angles.cos(), angles.sin()), **kwargs)

    def pool(self, hidden_states: Tensor) -> Tensor:
        """(B, D), of the last hidden states (B, S, D)."""
        return self.head(hidden_states)


class MoEViEModel(ViEPreTrainedModel, CLIPMoEModel):
    """Both towers and their projections into one space."""

    config: MoEViEConfig
    base_model_prefix = "moe_vie"
    text_model_class = MoEViETextModel
    vision_model_class = MoEViEVisionModel


class ViEModel(MoEViEModel):
    """The dense model: both towers without sparse layers."""

    config: ViEConfig
    base_model_prefix = "vie"
