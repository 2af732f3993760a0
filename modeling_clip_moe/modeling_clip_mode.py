"""
MoDE: a mixture of whole CLIPs, the data experts, with one routing for a whole task.

Axes of the tensors, as used in the comments:
    n  data experts                        L  metadata of a task: class names, captions, one query
    m  fine-grained cluster centers        B  images or texts of the batch
    d  size of the metadata's embeddings   D  size of an expert's embeddings

Paper:
    MoDE  Ma et al., "MoDE: CLIP Data Experts via Clustering"
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils import ModelOutput

from .configuration_clip_mode import CLIPMoDEConfig
from .expert_kernels import is_recorded
from .families import pooled_token
from .loading import EncodeMixin
from .mode_experts import DataExperts
from .mode_routing import routing_weights, side_by_side
from .modeling_siglip_moe import require_padded
from .transformers_internals import can_return_tuple, image_text_contrastive_loss


def sigmoid_loss(logits_per_text: Tensor) -> Tensor:
    """SigLIP's loss of logits (B, B) whose diagonal are the pairs (arXiv:2303.15343): a scalar."""
    signs = 2 * torch.eye(len(logits_per_text), device=logits_per_text.device) - 1
    return -F.logsigmoid(signs * logits_per_text).sum(dim=-1).mean()


@dataclass
class CLIPMoDEOutput(ModelOutput):
    """
    Output of `CLIPMoDEModel`.

    Args:
        loss: with `return_loss=True`, the contrastive loss of the ensemble, SigLIP's where all experts are SigLIPs.
        logits_per_image: (images, texts), the sum of the experts' similarities with their weights (MoDE eq. 4).
        logits_per_text: its transpose.
        routing_weights: (n,) or (texts, n), the weights.
        expert_outputs: one for each expert; None for one whose weights are all 0, which is not computed.
    """

    loss: Tensor | None = None
    logits_per_image: Tensor | None = None
    logits_per_text: Tensor | None = None
    routing_weights: Tensor | None = None
    expert_outputs: tuple[ModelOutput | None, ...] | None = None


class CLIPMoDEModel(DataExperts, EncodeMixin, PreTrainedModel):
    """
    Data experts, each a whole model in a folder of its own and `model.expert(i)` here, and the weights that a task
    gives them. A task is set once, from embeddings of its metadata, and holds until another is set:

        model.set_task(embeddings)          # (L, d) of the class names
        model(**inputs).logits_per_image

    With `config.own_processors`, experts read different inputs, which the processor in each one's folder makes:

        model(expert_inputs=[inputs_of_first, inputs_of_second]).logits_per_image

    Attributes:
        centers: (m, d) float32, the fine-grained cluster centers, or None. They and `expert_of_center` (m,) stay on the
            CPU, where routing is computed.
        task_weights: (n,), as `set_task` or `set_equal_weights` left them, or None.
    """

    config: CLIPMoDEConfig
    accepts_loss_kwargs = False  # losses are means over the batch
    base_model_prefix = "clip_mode"
    main_input_name = "pixel_values"
    input_modalities = ("image", "text")
    supports_gradient_checkpointing = True
    _auto_class = "AutoModel"
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: CLIPMoDEConfig):
        super().__init__(config)
        self.experts = nn.ModuleDict()
        self.centers: Tensor | None = None
        self.expert_of_center: Tensor | None = None
        self.task_weights: Tensor | None = None
        self.post_init()

    def route(self, metadata_embeds: Tensor, metadata_encoder: str | None = None) -> Tensor:
        """
        The weights of the experts for a task (n,), or for each of several (tasks, n).

        Args:
            metadata_embeds: (L, d) of one task, (tasks, L, d) of several, see `routing_weights`.
            metadata_encoder: the encoder that made them, compared with that of the centers. None: not compared.
        """
        if self.centers is None:
            raise ValueError("The model has no centers to compare metadata with: call set_equal_weights().")
        if metadata_encoder is not None and metadata_encoder != self.config.metadata_encoder:
            expected = self.config.metadata_encoder
            raise ValueError(f"The centers were made with {expected!r}, the metadata with {metadata_encoder!r}.")
        return routing_weights(
            torch.as_tensor(metadata_embeds).cpu(),
            self.centers,
            self.expert_of_center,
            self.num_experts,
            self.config.routing_temperature,
            self.config.nearest_center_only,
            self.config.routing,
        )

    def set_task(self, metadata_embeds: Tensor, metadata_encoder: str | None = None) -> Tensor:
        """Routes all that follows by the metadata (L, d) of a task; see `route`, whose weights (n,) it returns."""
        shape = tuple(getattr(metadata_embeds, "shape", ()))
        if len(shape) != 2:
            found = shape or type(metadata_embeds).__name__
            raise ValueError(f"The metadata of one task are embeddings (L, d), not {found}: encode them.")
        self.task_weights = self.route(metadata_embeds, metadata_encoder)
        return self.task_weights

    def set_equal_weights(self) -> Tensor:
        """Gives all experts the same weight in all that follows; returns the weights (n,)."""
        self.task_weights = torch.full((self.num_experts,), 1 / self.num_experts)
        return self.task_weights

    @can_return_tuple
    def get_text_features(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        expert_inputs: Sequence[Mapping[str, Any]] | None = None,
        **kwargs,
    ) -> tuple | BaseModelOutputWithPooling:
        """`pooler_output` (B, n * D): the embeddings of all experts one after the other, each of length 1; or (B, D),
        their sum, with `feature_ensemble="sum"`. `expert_inputs`: see `forward`."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        return self._features("get_text_features", self._inputs(inputs, expert_inputs), kwargs)

    @can_return_tuple
    def get_image_features(
        self, pixel_values: Tensor | None = None, expert_inputs: Sequence[Mapping[str, Any]] | None = None, **kwargs
    ) -> tuple | BaseModelOutputWithPooling:
        """As `get_text_features`, of images. A linear probe takes the embeddings one after the other (MoDE section
        5.4), or their sum (appendix D)."""
        return self._features("get_image_features", self._inputs({"pixel_values": pixel_values}, expert_inputs), kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        attention_mask: Tensor | None = None,
        return_loss: bool | None = None,
        routing_weights: Tensor | None = None,
        expert_inputs: Sequence[Mapping[str, Any]] | None = None,
        **kwargs,
    ) -> CLIPMoDEOutput:
        """
        Args:
            input_ids, pixel_values, attention_mask: see the experts' `forward`, which gets other arguments, too.
            expert_inputs: the inputs of each expert, in place of these, where experts have processors of their own.
            return_loss: whether to compute the contrastive loss of the pairs in this batch.
            routing_weights: (n,); (texts, n) where each text is a task of its own, as in image retrieval; or
                (images, 1, n) where each image is. None: those of the task that was set; in a model without centers,
                equal ones.
        """
        if routing_weights is None and self.task_weights is None and self.centers is None:
            self.set_equal_weights()
        weights = self.task_weights if routing_weights is None else routing_weights
        if weights is None:
            raise ValueError(
                "There is no task to route: call set_task with embeddings of its metadata, set_equal_weights, or pass "
                "routing_weights."
            )
        for name in ("output_hidden_states", "output_attentions"):
            kwargs.setdefault(name, getattr(self.config, name))
        inputs = {"input_ids": input_ids, "pixel_values": pixel_values, "attention_mask": attention_mask}
        expert_inputs = self._inputs(inputs, expert_inputs)
        n, texts, images = self.num_experts, len(expert_inputs[0]["input_ids"]), len(expert_inputs[0]["pixel_values"])
        if weights.shape not in ((n,), (texts, n), (images, 1, n)):
            raise ValueError(
                f"routing_weights must be (experts,), (texts, experts) or (images, 1, experts), here ({n},), "
                f"({texts}, {n}) or ({images}, 1, {n}), got {tuple(weights.shape)}."
            )
        is_used = [True] * n
        if not (torch.compiler.is_compiling() or is_recorded(weights)):  # a graph cannot depend on values
            is_used = (weights != 0).reshape(-1, n).any(0).tolist()
        logits, expert_outputs = [], [None] * n
        for number in (number for number in range(n) if is_used[number]):
            outputs = self.expert(number)(**{**expert_inputs[number], **kwargs, "return_dict": True})
            weight = weights[..., number].to(outputs.logits_per_text)
            weight = weight.t() if weight.dim() == 2 else weight.reshape(-1, 1)  # (1, images), (texts, 1) or (1, 1)
            logits.append((weight * outputs.logits_per_text).to(logits[0].device if logits else None))
            expert_outputs[number] = outputs
        logits_per_text = sum(logits)
        loss = None
        if return_loss:
            all_sigmoid = all(hasattr(self.expert(number), "logit_bias") for number in range(n) if is_used[number])
            loss = (sigmoid_loss if all_sigmoid else image_text_contrastive_loss)(logits_per_text)
        return CLIPMoDEOutput(
            loss=loss,
            logits_per_image=logits_per_text.t(),
            logits_per_text=logits_per_text,
            routing_weights=weights,
            expert_outputs=tuple(expert_outputs),
        )

    def _inputs(
        self, inputs: Mapping[str, Any], expert_inputs: Sequence[Mapping[str, Any]] | None
    ) -> Sequence[Mapping[str, Any]]:
        """The inputs of each expert."""
        if expert_inputs is None and not self.config.own_processors:
            expert_inputs = [inputs] * self.num_experts
        if expert_inputs is None or len(expert_inputs) != self.num_experts:
            raise ValueError(
                f"The {self.num_experts} experts read different inputs: pass expert_inputs, a dictionary for each, "
                f"made by the processor in its folder ({', '.join(self.config.experts)})."
            )
        for number, given in enumerate(expert_inputs):
            text_config = self.expert(number).config.text_config
            if "input_ids" in given and pooled_token(text_config) == "last":
                require_padded(given["input_ids"], text_config)
        return expert_inputs

    def _features(
        self, method: str, expert_inputs: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]
    ) -> BaseModelOutputWithPooling:
        parts = []
        for number, inputs in enumerate(expert_inputs):
            features = getattr(self.expert(number), method)(**{**inputs, **kwargs, "return_dict": True}).pooler_output
            parts.append(F.normalize(features, dim=-1).to(parts[0].device if parts else None))
        return BaseModelOutputWithPooling(pooler_output=self.combine_features(parts))

    def combine_features(self, embeds: Sequence[Tensor]) -> Tensor:
        """One embedding (..., n * D) or (..., D) of those of all experts (..., D), which have length 1, as
        `config.feature_ensemble` says."""
        return sum(embeds) if self.config.feature_ensemble == "sum" else side_by_side(embeds)

    def _set_gradient_checkpointing(self, enable=True, gradient_checkpointing_func=None, **kwargs):
        for expert in self.experts.values():
            expert._set_gradient_checkpointing(enable, gradient_checkpointing_func, **kwargs)
