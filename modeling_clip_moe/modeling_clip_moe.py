"""CLIP with sparse Mixture-of-Experts layers: CLIP-UP, CLIP-MoE and CLIP-FMoE. The axes of tensors are named in
`sparse_moe`."""

import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel  # noqa: F401  diffusers looks up the base class in a text encoder's module
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.models.clip.modeling_clip import (
    CLIPAttention,
    CLIPEncoder,
    CLIPEncoderLayer,
    CLIPModel,
    CLIPOutput,
    CLIPPreTrainedModel,
    CLIPTextEmbeddings,
    CLIPTextModelOutput,
    CLIPVisionEmbeddings,
    CLIPVisionModelOutput,
)
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs

from .configuration_clip_moe import CLIPMoEConfig, CLIPMoETextConfig, CLIPMoEVisionConfig
from .dispatch import dispatch  # noqa: F401  diffusers copies the modules that a text encoder's own names
from .expert_kernels import compiled  # noqa: F401
from .experts import CLIPMoEExperts  # noqa: F401
from .loading import SparseMoEMixin, WholeModelMixin
from .router_losses import router_losses, with_router_losses
from .self_test import self_test  # noqa: F401
from .sparse_moe import ROUTER_OUTPUTS, RouterFields, RouterLossFields, SparseEncoderLayer
from .torch_internals import FakeTensor  # noqa: F401
from .transformers_internals import can_return_tuple, capture_outputs, create_causal_mask


@dataclass
class CLIPMoEModelOutputWithPooling(RouterFields, BaseModelOutputWithPooling):
    """Output of a tower."""


@dataclass
class CLIPMoETextModelOutput(RouterFields, CLIPTextModelOutput):
    """Output of the text tower with its projection."""


@dataclass
class CLIPMoEVisionModelOutput(RouterFields, CLIPVisionModelOutput):
    """Output of the vision tower with its projection."""


@dataclass
class CLIPMoEOutput(RouterLossFields, CLIPOutput):
    """Output of `CLIPMoEModel`."""


@dataclass
class CLIPMoEImageClassifierOutput(ImageClassifierOutput):
    """Output of `CLIPMoEForImageClassification`, with `aux_loss` and `router_logits` as in the other outputs."""

    aux_loss: Tensor | None = None
    router_logits: tuple[Tensor, ...] | None = None


class CLIPMoEEncoderLayer(SparseEncoderLayer, CLIPEncoderLayer):
    """CLIP's layer, with a sparse block instead of the FFN in the layers of `config.moe_layers`."""


class CLIPMoEEncoder(CLIPEncoder):
    """CLIP's encoder with these layers."""

    layer_class = CLIPMoEEncoderLayer

    def __init__(self, config: CLIPMoETextConfig | CLIPMoEVisionConfig):
        nn.Module.__init__(self)  # not CLIP's own, which builds dense layers
        self.layers = nn.ModuleList([self.layer_class(config, i) for i in range(config.num_hidden_layers)])


class CLIPMoEPreTrainedModel(SparseMoEMixin, CLIPPreTrainedModel):
    """Base of all models: initialization, recorded outputs, and loading that refuses incomplete checkpoints."""

    config: CLIPMoEConfig
    base_model_prefix = "clip_moe"
    _no_split_modules = ["CLIPTextEmbeddings", "CLIPVisionEmbeddings", "CLIPMoEEncoderLayer"]
    _can_record_outputs = {
        # CLIP's class, not ours: diffusers runs remote code once a text encoder, and of classes of one name
        # transformers remembers the last
        "hidden_states": CLIPEncoderLayer,
        "attentions": CLIPAttention,
        **ROUTER_OUTPUTS,
    }

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        factor = self.config.initializer_factor
        if isinstance(module, CLIPMoEModel):
            init.constant_(module.logit_scale, module.config.logit_scale_init_value)
        elif isinstance(module, (CLIPMoETextModelWithProjection, CLIPMoEVisionModelWithProjection)):
            projection = getattr(module, "text_projection", None) or module.visual_projection
            init.normal_(projection.weight, std=module.config.hidden_size**-0.5 * factor)
        elif isinstance(module, CLIPMoEForImageClassification) and module.config.num_labels > 0:
            init.normal_(module.classifier.weight, std=module.config.vision_config.hidden_size**-0.5 * factor)


class CLIPMoETextModel(CLIPMoEPreTrainedModel):
    """The text tower, without projection."""

    config: CLIPMoETextConfig
    input_modalities = ("text",)
    _input_embed_layer = "token_embedding"
    _tower_prefix = "text_model."

    def __init__(self, config: CLIPMoETextConfig):
        super().__init__(config)
        self.embeddings = CLIPTextEmbeddings(config)
        self.encoder = CLIPMoEEncoder(config)
        self.final_layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.post_init()

    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CLIPMoEModelOutputWithPooling:
        """
        Args:
            input_ids: (B, S).
            attention_mask: (B, S), 1 for a token and 0 for padding, on the right as in CLIP, which no expert computes.
            position_ids: (B, S).
        """
        if attention_mask is not None and attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask must have the shape of input_ids, {tuple(input_ids.shape)}, "
                f"got {tuple(attention_mask.shape)}."
            )
        hidden_states = self.embeddings(input_ids=input_ids, position_ids=position_ids)
        causal_mask = self._causal_mask(hidden_states, attention_mask)
        kwargs.pop("is_causal", None)
        outputs = self.encoder(hidden_states, causal_mask, mask=attention_mask, is_causal=True, **kwargs)
        hidden_states = self.final_layer_norm(outputs.last_hidden_state)

        end = self.pooled_positions(input_ids).to(hidden_states.device)
        pooled = hidden_states[torch.arange(end.shape[0], device=hidden_states.device), end]
        return CLIPMoEModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=pooled)

    def _causal_mask(self, hidden_states: Tensor, attention_mask: Tensor | None) -> Tensor | None:
        """The mask in the form of the attention implementation."""
        is_sdpa = self.config._attn_implementation == "sdpa" and not torch.compiler.is_compiling()
        if is_sdpa and attention_mask is not None and attention_mask.is_cuda:
            # transformers would look whether there is padding, for which it waits for the GPU
            causal = attention_mask.new_ones(attention_mask.shape[1:] * 2, dtype=bool).tril()
            return causal & attention_mask.bool()[:, None, None]  # (B, 1, S, S)
        return create_causal_mask(
            config=self.config, inputs_embeds=hidden_states, attention_mask=attention_mask, past_key_values=None
        )

    def pooled_positions(self, input_ids: Tensor) -> Tensor:
        """(B,), which token of each text (B, S) is pooled: the first end-of-text token."""
        # Configurations from before transformers 4.31 say 2 and mean the token with the highest id
        is_end = input_ids if self.config.eos_token_id == 2 else input_ids == self.config.eos_token_id
        return is_end.to(torch.int).argmax(dim=-1)


class CLIPMoEVisionModel(CLIPMoEPreTrainedModel):
    """The vision tower, without projection."""

    config: CLIPMoEVisionConfig
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    _input_embed_layer = "patch_embedding"
    _tower_prefix = "vision_model."

    def __init__(self, config: CLIPMoEVisionConfig):
        super().__init__(config)
        self.embeddings = CLIPVisionEmbeddings(config)
        # The misspelling is in every CLIP checkpoint
        self.pre_layrnorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.encoder = CLIPMoEEncoder(config)
        self.post_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.post_init()

    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self, pixel_values: Tensor, interpolate_pos_encoding: bool = False, **kwargs: Unpack[TransformersKwargs]
    ) -> CLIPMoEModelOutputWithPooling:
        """
        Args:
            pixel_values: (B, channels, height, width).
            interpolate_pos_encoding: whether to accept images of another size than the configured one.
        """
        hidden_states = self.embeddings(pixel_values, interpolate_pos_encoding=interpolate_pos_encoding)
        hidden_states = self.encoder(self.pre_layrnorm(hidden_states), **kwargs).last_hidden_state
        return CLIPMoEModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=self.pool(hidden_states))

    def pool(self, hidden_states: Tensor) -> Tensor:
        """(B, D), of the last hidden states (B, S, D)."""
        return self.post_layernorm(hidden_states[:, 0])


class CLIPMoETextModelWithProjection(CLIPMoEPreTrainedModel):
    """The text tower with the projection into the space shared with images."""

    config: CLIPMoETextConfig
    base_model_prefix = "text_model"
    input_modalities = ("text",)

    def __init__(self, config: CLIPMoETextConfig):
        super().__init__(config)
        self.text_model = CLIPMoETextModel._from_config(config)
        self.text_projection = nn.Linear(config.hidden_size, config.projection_dim, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CLIPMoETextModelOutput:
        """See `CLIPMoETextModel.forward`. `text_embeds` is (B, projection_dim), not normalized."""
        outputs = self.text_model(input_ids, attention_mask, position_ids, **kwargs)
        fields = dict(outputs)
        return CLIPMoETextModelOutput(text_embeds=self.text_projection(fields.pop("pooler_output")), **fields)


class CLIPMoEVisionModelWithProjection(CLIPMoEPreTrainedModel):
    """The vision tower with the projection into the space shared with texts."""

    config: CLIPMoEVisionConfig
    base_model_prefix = "vision_model"
    main_input_name = "pixel_values"
    input_modalities = ("image",)

    def __init__(self, config: CLIPMoEVisionConfig):
        super().__init__(config)
        self.vision_model = CLIPMoEVisionModel._from_config(config)
        self.visual_projection = nn.Linear(config.hidden_size, config.projection_dim, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self, pixel_values: Tensor, interpolate_pos_encoding: bool = False, **kwargs: Unpack[TransformersKwargs]
    ) -> CLIPMoEVisionModelOutput:
        """See `CLIPMoEVisionModel.forward`. `image_embeds` is (B, projection_dim), not normalized."""
        outputs = self.vision_model(pixel_values, interpolate_pos_encoding, **kwargs)
        fields = dict(outputs)
        return CLIPMoEVisionModelOutput(image_embeds=self.visual_projection(fields.pop("pooler_output")), **fields)


class CLIPMoEModel(WholeModelMixin, CLIPMoEPreTrainedModel, CLIPModel):
    """Both towers and their projections into one space."""

    config: CLIPMoEConfig
    dense_class = CLIPModel
    text_model_class = CLIPMoETextModel
    vision_model_class = CLIPMoEVisionModel
    forward = with_router_losses(CLIPModel.forward, CLIPMoEOutput, text_mask="attention_mask")

    def __init__(self, config: CLIPMoEConfig):
        super().__init__(config)
        # The widths by which CLIP initializes its projections
        self.text_embed_dim, self.vision_embed_dim = config.text_config.output_size, config.vision_config.hidden_size
        self.text_projection = nn.Linear(self.text_embed_dim, config.projection_dim, bias=False)
        self.visual_projection = nn.Linear(self.vision_embed_dim, config.projection_dim, bias=False)
        # FSDP2 does not shard scalars, so the scale has one axis, where CLIP's has none
        self.logit_scale = nn.Parameter(torch.tensor([config.logit_scale_init_value]))
        if config.shared_encoder:
            self._tied_weights_keys = {r"vision_model\.encoder\.": r"text_model\.encoder\."}
            self._encoder_names = frozenset(name for name, _ in self.text_model.encoder.named_parameters())
        self.post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """
        Part of `tie_weights`: of a shared encoder, the vision tower's parameters -> the text tower's.

        transformers' own asks for `tie_word_embeddings`. It reads `_tied_weights_keys` elsewhere, in saving. Peft's
        adapters, which wrap modules, are each tower's own.
        """
        if not self.config.shared_encoder:
            return {}
        names = [name for name, _ in self.text_model.encoder.named_parameters()]
        names = [name for name in names if re.sub(r"\.(base_layer|original_module)\b", "", name) in self._encoder_names]
        return {f"vision_model.encoder.{name}": f"text_model.encoder.{name}" for name in names}

    def get_input_embeddings(self) -> nn.Module:
        return self.text_model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module):
        self.text_model.set_input_embeddings(value)


class CLIPMoEForImageClassification(CLIPMoEPreTrainedModel):
    """The vision tower with a linear classifier on the mean of the patch tokens."""

    config: CLIPMoEConfig
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    _auto_class = "AutoModelForImageClassification"
    _optional_weights = ("classifier.",)

    def __init__(self, config: CLIPMoEConfig):
        super().__init__(config)
        self.vision_model = CLIPMoEVisionModel._from_config(config.vision_config)
        hidden_size = config.vision_config.hidden_size
        self.classifier = nn.Linear(hidden_size, config.num_labels) if config.num_labels > 0 else nn.Identity()
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.vision_model.get_input_embeddings()

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        output_router_logits: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CLIPMoEImageClassifierOutput:
        """
        Args:
            pixel_values: (B, channels, height, width).
            labels: (B,), the classes, or (B, num_labels) as `config.problem_type` says.
            output_router_logits: see `CLIPMoEModel.forward`.
        """
        if output_router_logits is None:
            output_router_logits = self.config.output_router_logits
        outputs = self.vision_model(pixel_values, output_router_logits=output_router_logits, **kwargs)
        logits = self.classifier(outputs.last_hidden_state[:, 1:].mean(dim=1))
        aux_loss = router_losses(self.config, logits.device, vision=(outputs.router_logits, None))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels, logits, self.config)
            if aux_loss is not None:
                loss = loss + aux_loss
        return CLIPMoEImageClassifierOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            aux_loss=aux_loss,
            router_logits=outputs.router_logits or None,
        )
