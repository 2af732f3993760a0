"""
MoDE: a mixture of whole CLIPs, the data experts, with one routing for a whole task.

Axes of the tensors, as used in the comments:
    n  data experts                        L  metadata of a task: class names, captions, one query
    m  fine-grained cluster centers        B  images or texts of the batch
    d  size of the metadata's embeddings   D  size of an expert's embeddings

Paper:
    MoDE  Ma et al., "MoDE: CLIP Data Experts via Clustering"
"""

import functools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils import ModelOutput, cached_file

from .configuration_clip_mode import DEFAULT_ROUTING, ROUTINGS, CLIPMoDEConfig
from .configuration_clip_moe import embedding_size
from .families import CLASS_OF_TYPE, pooled_token
from .kernels import is_recorded
from .loading import EncodeMixin
from .modeling_siglip_moe import require_padded
from .transformers_internals import can_return_tuple, image_text_contrastive_loss

# This file lies beside config.json and holds the centers and the expert of each
ROUTING_FILE = "routing.safetensors"
# Arguments of `push_to_hub`, and those of `from_pretrained` that say where files come from
UPLOAD_ARGUMENTS = ("token", "private", "revision", "create_pr", "commit_message", "commit_description", "tags")
HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "token", "revision")


def sigmoid_loss(logits_per_text: torch.Tensor) -> torch.Tensor:
    """SigLIP's loss of logits (B, B) whose diagonal are the pairs (arXiv:2303.15343): a scalar."""
    signs = 2 * torch.eye(len(logits_per_text), device=logits_per_text.device) - 1
    return -F.logsigmoid(signs * logits_per_text).sum(dim=-1).mean()


def routing_weights(
    metadata_embeds: torch.Tensor,
    centers: torch.Tensor,
    expert_of_center: torch.Tensor,
    num_experts: int,
    temperature: float = 0.2,
    nearest_center_only: bool = True,
    routing: str = DEFAULT_ROUTING,
) -> torch.Tensor:
    """
    How much each data expert counts for a task, with L pieces of metadata.

    `routing="paper"` (MoDE eq. 5 to 7, with the temperatures of appendix E): the similarity of metadata l and center s
    is A = exp(-|e_l - e_s|^2 / lambda), and an expert's weight the softmax of the sum of A over its centers and all
    metadata. With fewer than 10 pieces of metadata, A is multiplied by exp(0.5 - sqrt(L)), which makes weights more
    equal; with more than 200, lambda is divided by log(L), which makes them less so.

    `routing="released"` (the authors' code, facebookresearch/MetaCLIP, mode/post_report_ensemble.py):
    A = exp((a - |e_l - e_s|) * f) of the distance that is not squared, with f = log10(max(10, L - 200)) / lambda and
    a = exp(0.5 - sqrt(L)) below 10 pieces of metadata, else 0; the weights are the softmax of an eighth of the sums.
    The authors take for e_l the mean over the prompts of a class, of length 1 (mode/prep_feature.py). Their code routes
    classifications alone; tasks of other kinds are routed by the same formula here.

    Args:
        metadata_embeds: (..., L, d), the metadata of one task or of several: all class names of a classification
            (eq. 6), all captions of text retrieval (eq. 7), or each query of image retrieval by itself (queries, 1, d).
            Zeros, as TF-IDF gives for unknown words, are similar to no center.
        centers: (m, d), the fine-grained cluster centers.
        expert_of_center: (m,), the expert that each belongs to.
        temperature: lambda.
        nearest_center_only: whether A counts for the center nearest to l alone, and is 0 for the others.
        routing: `"paper"` or `"released"`.

    Returns:
        (..., n) weights that sum to 1, in float32.

    Raises:
        ValueError: a task without metadata, embeddings of another size than the centers', or an unknown routing.
    """
    if routing not in ROUTINGS:
        raise ValueError(f"routing must be {' or '.join(ROUTINGS)}, got {routing!r}.")
    if metadata_embeds.dim() < 2 or metadata_embeds.shape[-2] == 0:
        raise ValueError(
            "A task needs at least one piece of metadata, as embeddings (..., L, d), got "
            f"{tuple(metadata_embeds.shape)}."
        )
    length, size = metadata_embeds.shape[-2:]
    if size != centers.shape[1]:
        raise ValueError(
            f"The metadata's embeddings have size {size}, the centers {centers.shape[1]}: embed the metadata with the "
            "encoder that the centers were made with."
        )
    rows = metadata_embeds.reshape(-1, size)
    # In float64, where the matrix product of squared distances does not cancel
    centers, expert_of_center = centers.to(rows.device, torch.float64), expert_of_center.to(rows.device)
    per_row = []
    for chunk in rows.double().split(8192):  # bounds memory
        distances = chunk.square().sum(-1, keepdim=True) + centers.square().sum(-1) - 2 * chunk @ centers.T
        distances = distances.clamp_min(0)
        similarity = _similarity(distances, length, temperature, routing)
        if nearest_center_only:
            nearest = distances.argmin(-1, keepdim=True)
            similarity = torch.zeros_like(similarity).scatter(-1, nearest, similarity.gather(-1, nearest))
        similarity = similarity * (chunk != 0).any(-1, keepdim=True)
        per_row.append(similarity.new_zeros(len(chunk), num_experts).index_add(-1, expert_of_center, similarity))
    sums = torch.cat(per_row).reshape(*metadata_embeds.shape[:-1], num_experts).sum(-2)
    return (sums / 8 if routing == "released" else sums).softmax(-1).float()


def _similarity(squared_distances: torch.Tensor, length: int, temperature: float, routing: str) -> torch.Tensor:
    """A of `routing_weights`, for a task with `length` pieces of metadata."""
    few = math.exp(0.5 - math.sqrt(length))
    if routing == "released":
        factor = math.log10(max(10, length - 200)) / temperature
        return (((few if length < 10 else 0.0) - squared_distances.sqrt()) * factor).exp()
    if length > 200:
        temperature = temperature / math.log(length)
    similarity = (-squared_distances / temperature).exp()
    return similarity * few if length < 10 else similarity


def side_by_side(embeds: Sequence[torch.Tensor], weights: torch.Tensor | None = None) -> torch.Tensor:
    """
    (..., n * D), the embeddings (..., D) of n experts one after the other, each times its weight (..., n) if there are
    weights. The product of a row with weights and one without is the weighted sum of the experts' similarities
    (MoDE eq. 4).
    """
    if weights is not None:
        embeds = [weights[..., number, None] * part for number, part in enumerate(embeds)]
    return torch.cat(tuple(embeds), dim=-1)


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

    loss: torch.Tensor | None = None
    logits_per_image: torch.Tensor | None = None
    logits_per_text: torch.Tensor | None = None
    routing_weights: torch.Tensor | None = None
    expert_outputs: tuple[ModelOutput | None, ...] | None = None


class CLIPMoDEModel(EncodeMixin, PreTrainedModel):
    """
    Data experts, and the weights that a task gives them.

    Every expert is a whole model in a folder of its own, and `model.expert(i)` here.

    A task is set once, from embeddings of its metadata, and holds until another is set:

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
    config_class = CLIPMoDEConfig
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
        self.centers: torch.Tensor | None = None
        self.expert_of_center: torch.Tensor | None = None
        self.task_weights: torch.Tensor | None = None
        self.post_init()

    @classmethod
    def from_experts(
        cls,
        experts: Sequence[PreTrainedModel],
        centers: torch.Tensor | None = None,
        expert_of_center: torch.Tensor | None = None,
        metadata_encoder: str | None = None,
        **config,
    ) -> "CLIPMoDEModel":
        """
        Makes one model of data experts.

        Args:
            centers: (m, d), the fine-grained cluster centers. None: all experts always have the same weight.
            expert_of_center: (m,), the expert that each belongs to.
            metadata_encoder: name of the encoder that made the centers.
            config: other fields of `CLIPMoDEConfig`.
        """
        sizes = {embedding_size(expert.config) for expert in experts}
        config = {"projection_dim": sizes.pop() if len(sizes) == 1 else None, **config}
        model = cls(CLIPMoDEConfig(**config))
        for expert in experts:
            model.add_expert(expert)
        if centers is not None:
            model.set_centers(centers, expert_of_center, metadata_encoder)
        return model

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike,
        *model_args,
        config: CLIPMoDEConfig | None = None,
        output_loading_info: bool = False,
        **kwargs,
    ):
        """
        Loads a model from a folder or hub name. Other arguments go to `from_pretrained` of every expert.
        """
        source, folder = str(pretrained_model_name_or_path), kwargs.pop("subfolder", "")
        hub = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
        if config is None:
            changes = {name: kwargs.pop(name) for name in cls.config_class.__annotations__ if name in kwargs}
            config = cls.config_class.from_pretrained(source, subfolder=folder, **hub, **changes)
            config.validate_routing()  # with the changes
        model = cls(config)
        if config.num_centers:
            routing = load_file(cached_file(source, ROUTING_FILE, subfolder=folder, **hub))
            model.set_centers(routing["centers"], routing["expert_of_center"], config.metadata_encoder)
        if kwargs.get("dtype", "auto") in ("auto", None):
            kwargs["dtype"] = config.dtype or torch.float32
        for name in config.experts:
            expert = model._load(source, f"{folder}/{name}".lstrip("/"), kwargs)
            model._require_expert(expert, name)
            model.experts[name] = expert
        model.eval()
        # Every expert raises for itself
        info = {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set(), "error_msgs": []}
        return (model, info) if output_loading_info else model

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        state_dict: dict[str, torch.Tensor] | None = None,
        push_to_hub: bool = False,
        repo_id: str | None = None,
        **kwargs,
    ):
        """
        Saves every expert in a folder of its own, and the routing beside them.

        The processor in an expert's folder stays. Elsewhere processors and the encoder of the metadata, which are not
        part of the model, have to be copied from where it comes from.

        Args:
            state_dict: weights to save in place of the model's, as `state_dict()` names them.
            kwargs: with `push_to_hub` those of `push_to_hub`, else of the experts' `save_pretrained`.
        """
        if not is_main_process:
            return
        directory = Path(save_directory)
        directory.mkdir(parents=True, exist_ok=True)
        hub = {name: kwargs.pop(name) for name in UPLOAD_ARGUMENTS if name in kwargs}
        for number, name in enumerate(self.config.experts):
            prefix, weights = f"experts.{name}.", None
            if state_dict is not None:
                weights = {key.removeprefix(prefix): t for key, t in state_dict.items() if key.startswith(prefix)}
            self.expert(number).save_pretrained(directory / name, state_dict=weights, **kwargs)
        if self.centers is not None:
            routing = {"centers": self.centers, "expert_of_center": self.expert_of_center}
            save_file(routing, directory / ROUTING_FILE)
        self.config.architectures = [type(self).__name__]
        # Which no expert exceeds
        self.config.dtype = functools.reduce(torch.promote_types, (expert.dtype for expert in self.experts.values()))
        custom_object_save(self, directory, config=self.config)
        self.config.save_pretrained(directory)
        if push_to_hub:
            self.push_to_hub(repo_id or directory.name, **hub)

    @property
    def num_experts(self) -> int:
        return len(self.config.experts)

    def expert(self, number: int) -> PreTrainedModel:
        """A data expert by its number."""
        return self.experts[self.config.experts[number]]

    def add_expert(
        self,
        expert: PreTrainedModel,
        centers: torch.Tensor | None = None,
        name: str | None = None,
    ) -> int:
        """
        Adds a data expert; the others stay as they are.

        Args:
            centers: (centers, d), the fine-grained cluster centers of its data, where the model has centers.
            name: name of its folder; default: `expert_` and its number.

        Returns:
            The number of the expert.
        """
        number = self.num_experts
        name = name or f"expert_{number}"
        if name in self.config.experts:
            raise ValueError(f"There is an expert {name} already.")
        CLIPMoDEConfig(experts=[name])  # refuses what can be no folder
        self._require_expert(expert, name)
        if (centers is None) != (self.centers is None):
            raise ValueError(
                f"The model has {'no centers' if self.centers is None else 'centers'}, so that an expert added to it "
                f"must have {'none' if self.centers is None else 'some, too'}."
            )
        self.experts[name] = expert
        self.config.experts = [*self.config.experts, name]
        self.task_weights = None
        if centers is not None:
            expert_of_center = torch.full((len(centers),), number)
            self.set_centers(
                torch.cat([self.centers, centers.float().cpu()]),
                torch.cat([self.expert_of_center, expert_of_center]),
                self.config.metadata_encoder,
            )
        return number

    def set_centers(self, centers: torch.Tensor, expert_of_center: torch.Tensor, metadata_encoder: str | None) -> None:
        """
        Sets what tasks are routed by.

        Args:
            centers: (m, d), the fine-grained cluster centers.
            expert_of_center: (m,), the expert that each belongs to.
            metadata_encoder: name of the encoder that made them.
        """
        idle = sorted(set(range(self.num_experts)) ^ set(expert_of_center.tolist()))
        if idle:
            raise ValueError(
                f"Each of the {self.num_experts} experts needs a center, and each center one of them: see {idle}."
            )
        self.centers, self.expert_of_center = centers.float().cpu().contiguous(), expert_of_center.long().cpu()
        self.config.metadata_encoder = metadata_encoder
        self.config.num_centers, self.config.metadata_dim = centers.shape
        self.task_weights = None

    def route(self, metadata_embeds: torch.Tensor, metadata_encoder: str | None = None) -> torch.Tensor:
        """
        The weights of the experts for a task, or for each of several.

        Args:
            metadata_embeds: (L, d) of one task, (tasks, L, d) of several, see `routing_weights`.
            metadata_encoder: the encoder that made them, compared with that of the centers. None: not compared.

        Returns:
            (n,) or (tasks, n).
        """
        if self.centers is None:
            raise ValueError("The model has no centers to compare metadata with: call set_equal_weights().")
        if metadata_encoder is not None and metadata_encoder != self.config.metadata_encoder:
            raise ValueError(
                f"The centers were made with the encoder {self.config.metadata_encoder!r}, the metadata's embeddings "
                f"with {metadata_encoder!r}."
            )
        return routing_weights(
            torch.as_tensor(metadata_embeds).cpu(),
            self.centers,
            self.expert_of_center,
            self.num_experts,
            self.config.routing_temperature,
            self.config.nearest_center_only,
            self.config.routing,
        )

    def set_task(self, metadata_embeds: torch.Tensor, metadata_encoder: str | None = None) -> torch.Tensor:
        """Routes all that follows by the metadata (L, d) of a task; see `route`, whose weights (n,) it returns."""
        shape = tuple(getattr(metadata_embeds, "shape", ()))
        if len(shape) != 2:
            raise ValueError(
                f"The metadata of one task are embeddings (L, d), not {shape or type(metadata_embeds).__name__}: embed "
                "them with the encoder that the centers were made with."
            )
        self.task_weights = self.route(metadata_embeds, metadata_encoder)
        return self.task_weights

    def set_equal_weights(self) -> torch.Tensor:
        """Gives all experts the same weight in all that follows; returns the weights (n,)."""
        self.task_weights = torch.full((self.num_experts,), 1 / self.num_experts)
        return self.task_weights

    @can_return_tuple
    def get_text_features(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        expert_inputs: Sequence[Mapping[str, Any]] | None = None,
        **kwargs,
    ) -> tuple | BaseModelOutputWithPooling:
        """`pooler_output` (B, n * D): the embeddings of all experts one after the other, each of length 1; or (B, D),
        their sum, with `feature_ensemble="sum"`. `expert_inputs`: see `forward`."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        return self._features("get_text_features", self._inputs(inputs, expert_inputs), kwargs)

    @can_return_tuple
    def get_image_features(
        self,
        pixel_values: torch.Tensor | None = None,
        expert_inputs: Sequence[Mapping[str, Any]] | None = None,
        **kwargs,
    ) -> tuple | BaseModelOutputWithPooling:
        """`pooler_output` (B, n * D): the embeddings of all experts one after the other, each of length 1, as a linear
        probe takes them (MoDE section 5.4); or (B, D), their sum, with `feature_ensemble="sum"` (appendix D).
        `expert_inputs`: see `forward`."""
        return self._features("get_image_features", self._inputs({"pixel_values": pixel_values}, expert_inputs), kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        return_loss: bool | None = None,
        routing_weights: torch.Tensor | None = None,
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
        weights = self.task_weights if routing_weights is None else routing_weights
        if weights is None and self.centers is None:
            weights = self.set_equal_weights()
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
        logits_per_text, expert_outputs, all_sigmoid = None, [], True
        used = [True] * self.num_experts
        if not (torch.compiler.is_compiling() or is_recorded(weights)):  # a graph cannot depend on values
            used = (weights != 0).reshape(-1, self.num_experts).any(0).tolist()
        for number in range(self.num_experts):
            if not used[number]:
                expert_outputs.append(None)
                continue
            expert = self.expert(number)
            if pooled_token(expert.config.text_config) == "last":
                require_padded(expert_inputs[number]["input_ids"], expert.config.text_config)
            outputs = expert(**{**expert_inputs[number], **kwargs, "return_dict": True})
            all_sigmoid = all_sigmoid and hasattr(expert, "logit_bias")
            weight = weights[..., number].to(outputs.logits_per_text)
            weight = weight.t() if weight.dim() == 2 else weight.reshape(-1, 1)  # (1, images), (texts, 1) or (1, 1)
            logits = weight * outputs.logits_per_text
            if logits_per_text is not None:
                logits = logits_per_text + logits.to(logits_per_text.device)
            logits_per_text = logits
            expert_outputs.append(outputs)
        loss = sigmoid_loss if all_sigmoid else image_text_contrastive_loss
        return CLIPMoDEOutput(
            loss=loss(logits_per_text) if return_loss else None,
            logits_per_image=logits_per_text.t(),
            logits_per_text=logits_per_text,
            routing_weights=weights,
            expert_outputs=tuple(expert_outputs),
        )

    def _inputs(
        self, inputs: Mapping[str, Any], expert_inputs: Sequence[Mapping[str, Any]] | None
    ) -> Sequence[Mapping[str, Any]]:
        """The inputs of each expert."""
        if expert_inputs is None:
            if self.config.own_processors:
                raise ValueError(
                    "The experts read different inputs: pass expert_inputs, a dictionary for each, which the processor "
                    f"in its folder makes ({', '.join(self.config.experts)})."
                )
            return [inputs] * self.num_experts
        if len(expert_inputs) != self.num_experts:
            raise ValueError(
                f"expert_inputs has {len(expert_inputs)} dictionaries, but there are {self.num_experts} experts."
            )
        return expert_inputs

    def _features(
        self, method: str, expert_inputs: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]
    ) -> BaseModelOutputWithPooling:
        parts = []
        for number, inputs in enumerate(expert_inputs):
            expert = self.expert(number)
            if "input_ids" in inputs and pooled_token(expert.config.text_config) == "last":
                require_padded(inputs["input_ids"], expert.config.text_config)
            features = getattr(expert, method)(**{**inputs, **kwargs, "return_dict": True}).pooler_output
            parts.append(F.normalize(features, dim=-1).to(parts[0].device if parts else None))
        return BaseModelOutputWithPooling(pooler_output=self.combine_features(parts))

    def combine_features(self, embeds: Sequence[torch.Tensor]) -> torch.Tensor:
        """One embedding (..., n * D) or (..., D) of those of all experts (..., D), which have length 1, as
        `config.feature_ensemble` says."""
        return sum(embeds) if self.config.feature_ensemble == "sum" else side_by_side(embeds)

    def _set_gradient_checkpointing(self, enable=True, gradient_checkpointing_func=None, **kwargs):
        for expert in self.experts.values():
            expert._set_gradient_checkpointing(enable, gradient_checkpointing_func, **kwargs)

    def _load(self, source: str, folder: str, kwargs: Mapping[str, Any]) -> PreTrainedModel:
        hub = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
        cached_file(source, f"{folder}/config.json", **hub)  # whose error names the file
        # Its auto_map is left aside: the class is one of these
        model_type = self.config_class.get_config_dict(source, subfolder=folder, **hub)[0].get("model_type")
        expert, info = _class_of(model_type, f"{source}, {folder}").from_pretrained(
            source, subfolder=folder, output_loading_info=True, **kwargs
        )
        missing, left_over = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
        if missing or left_over:
            raise ValueError(f"{source}, {folder}: missing weights {missing[:8]}, left over {left_over[:8]}.")
        return expert

    def _require_expert(self, expert: PreTrainedModel, name: str) -> None:
        # By name: the same class from a file beside weights is another one
        model_type = getattr(getattr(expert, "config", None), "model_type", None)
        _class_of(model_type, f"{name} ({type(expert).__name__})")
        for other, loaded in self.experts.items():
            alike = loaded.config.model_type.removesuffix("_moe") == model_type.removesuffix("_moe")
            if not alike and not self.config.own_processors:
                raise ValueError(
                    f"{name} is of type {model_type}, {other} of {loaded.config.model_type}: they read texts and "
                    "images differently. Make the mixture with own_processors=True, and each gets inputs of its own."
                )
        size = self.config.projection_dim
        if size is not None and embedding_size(expert.config) != size:
            raise ValueError(
                f"{name} has embeddings of size {embedding_size(expert.config)}, the other experts of {size}."
            )


def _class_of(model_type: str | None, name: str) -> type[PreTrainedModel]:
    if model_type not in CLASS_OF_TYPE:
        raise ValueError(f"{name}: a data expert is a model of type {', '.join(CLASS_OF_TYPE)}, not {model_type}.")
    return CLASS_OF_TYPE[model_type]
