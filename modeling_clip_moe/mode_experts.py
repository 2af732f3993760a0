"""The data experts of a MoDE: a mixture is made of them, loaded and saved, each in a folder of its own."""

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import cached_file

from .configuration_clip_mode import CLIPMoDEConfig
from .configuration_clip_moe import embedding_size
from .families import CLASS_OF_TYPE
from .transformers_internals import custom_object_save

# The file of the centers and the expert of each, beside config.json
ROUTING_FILE = "routing.safetensors"
# Arguments of `push_to_hub`, and those of `from_pretrained` that say where files come from
UPLOAD_ARGUMENTS = ("token", "private", "revision", "create_pr", "commit_message", "commit_description", "tags")
HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "token", "revision")


class DataExperts:
    """The part of `CLIPMoDEModel` that holds its experts and centers."""

    @classmethod
    def from_experts(
        cls,
        experts: Sequence[PreTrainedModel],
        centers: Tensor | None = None,
        expert_of_center: Tensor | None = None,
        metadata_encoder: str | None = None,
        **config,
    ) -> "DataExperts":
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
        """Loads a model from a folder or hub name. Other arguments go to `from_pretrained` of every expert."""
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
        state_dict: dict[str, Tensor] | None = None,
        push_to_hub: bool = False,
        repo_id: str | None = None,
        **kwargs,
    ):
        """
        Saves every expert in a folder of its own, and the routing beside them. Processors and the encoder of the
        metadata are not part of the model: copy them from where it comes from.

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
        # The highest precision of an expert
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

    def add_expert(self, expert: PreTrainedModel, centers: Tensor | None = None, name: str | None = None) -> int:
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
        CLIPMoDEConfig(experts=[*self.config.experts, name])  # refuses a name that is there or can be no folder
        self._require_expert(expert, name)
        if (centers is None) != (self.centers is None):
            raise ValueError("Give the expert centers if and only if the model has centers.")
        self.experts[name] = expert
        self.config.experts = [*self.config.experts, name]
        self.task_weights = None
        if centers is not None:
            all_centers = torch.cat([self.centers, centers.float().cpu()])
            expert_of_center = torch.cat([self.expert_of_center, torch.full((len(centers),), number)])
            self.set_centers(all_centers, expert_of_center, self.config.metadata_encoder)
        return number

    def set_centers(self, centers: Tensor, expert_of_center: Tensor, metadata_encoder: str | None) -> None:
        """Sets the centers that tasks are routed by; see `from_experts`."""
        idle = sorted(set(range(self.num_experts)) ^ set(expert_of_center.tolist()))
        if idle:
            raise ValueError(f"Each of {self.num_experts} experts needs a center, and each center one: see {idle}.")
        self.centers, self.expert_of_center = centers.float().cpu().contiguous(), expert_of_center.long().cpu()
        self.config.metadata_encoder = metadata_encoder
        self.config.num_centers, self.config.metadata_dim = centers.shape
        self.task_weights = None

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
            found = embedding_size(expert.config)
            raise ValueError(f"{name} has embeddings of size {found}, the other experts of {size}.")


def _class_of(model_type: str | None, name: str) -> type[PreTrainedModel]:
    if model_type not in CLASS_OF_TYPE:
        raise ValueError(f"{name}: a data expert is a model of type {', '.join(CLASS_OF_TYPE)}, not {model_type}.")
    return CLASS_OF_TYPE[model_type]
