"""What is known of models and data before anything is computed: configurations and numbers of pairs."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import datasets
import pyarrow.parquet
import torch
from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder
from huggingface_hub import hf_hub_download, try_to_load_from_cache
from transformers import (
    AutoModel,
    CLIPConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedModel,
)

from conversion.checkpoints import load_config
from conversion.local_names import is_hub_name
from data import annotations
from data.sources import DataArguments, is_here, is_saved, split_files
from data.worlds import WORLDS
from evaluation.costs import count_parameters, meta_model
from modeling_clip_moe import CLIPMoDEConfig, CLIPMoEConfig
from training.freezing import set_trainable

SECONDS_FOR_THE_HUB = 5


class Unknown(Exception):
    """Something that cannot be told now: its message says why."""


class AtMost(int):
    """A number that may turn out smaller."""


def bound_as(given: int, computed: int) -> int:
    """A number that was computed with another one, and is an upper bound if that is one."""
    return AtMost(computed) if isinstance(given, AtMost) else computed


@dataclass(frozen=True)
class Expected:
    """What is known of an input before it is there, or of what a stage will make.

    Args:
        configs: that of a model or an encoder, or those of all experts of a mixture; a text: why they are not known.
        pairs: of data, or those that a stage's output is of; a text: why their number is not known.
    """

    configs: tuple[PreTrainedConfig, ...] | str = "it is no model"
    pairs: int | str = "it is of no data"

    @classmethod
    def unknown(cls, why: str) -> "Expected":
        return cls(why, why)

    @property
    def known_configs(self) -> tuple[PreTrainedConfig, ...]:
        """Raises Unknown."""
        if isinstance(self.configs, str):
            raise Unknown(self.configs)
        return self.configs

    @property
    def known_pairs(self) -> int:
        """Raises Unknown."""
        if isinstance(self.pairs, str):
            raise Unknown(self.pairs)
        return self.pairs

    @property
    def clip(self) -> CLIPConfig | CLIPMoEConfig:
        """The configuration of a dense or a sparse CLIP.

        Raises:
            Unknown
            ValueError: it is another model.
        """
        config, *others = self.known_configs
        if others or not isinstance(config, CLIPConfig | CLIPMoEConfig):
            kind = "a mixture of whole models" if others else f"a model of type {config.model_type!r}"
            raise ValueError(f"a dense or sparse CLIP is needed, not {kind}")
        return config


def model_configs(source: str, ask_hub: bool = False) -> tuple[PreTrainedConfig, ...]:
    """The configuration of a model in a folder or on the Hub, or those of all experts of a mixture.

    Args:
        ask_hub: whether to ask the Hub for one that is not in its cache here.

    Raises:
        Unknown: it is a hub name, and cannot be had now.
        OSError, ValueError: see `load_config`.
    """
    folder = source if Path(source).is_dir() else _snapshot(source, ask_hub)
    config = load_config(folder)
    if isinstance(config, CLIPMoDEConfig):
        return tuple(load_config(folder, name) for name in config.experts)
    return (config,)


def is_cached(name: str) -> bool:
    """Whether it is the hub name of a model in the Hub's cache here."""
    return is_hub_name(name) and isinstance(try_to_load_from_cache(name, "config.json"), str)


def _snapshot(name: str, ask_hub: bool) -> Path:
    """The folder of the cache with the configuration of a hub name."""
    path = try_to_load_from_cache(name, "config.json") if is_hub_name(name) else None
    if not isinstance(path, str) and ask_hub and is_hub_name(name):
        try:
            path = hf_hub_download(name, "config.json", etag_timeout=SECONDS_FOR_THE_HUB)
        except (OSError, ValueError) as error:
            raise Unknown(f"{name} is not here, and cannot be had from the Hub now") from error
    if not isinstance(path, str):
        raise Unknown(f"{name} is not here")
    return Path(path).parent


def count_pairs(arguments: DataArguments, read_json: bool = False) -> int:
    """The pairs of a source, with those that cannot be read, whose number only reading them all tells.

    Args:
        read_json: whether to read a whole .json to count its entries.

    Raises:
        Unknown: they are not here, or only loading them tells.
        OSError, ValueError: a file is damaged, or there is no such split.
    """
    if arguments.source in WORLDS:
        return arguments.num_samples
    if arguments.streaming:
        raise Unknown(f"{arguments.source} is a stream")
    if not is_here(arguments.source) and arguments.num_samples is not None:
        return AtMost(arguments.num_samples)
    return AtMost(arguments.taken(_count_rows(arguments, read_json)))


def _count_rows(arguments: DataArguments, read_json: bool) -> int:
    source = arguments.source
    if not is_here(source):
        raise Unknown(f"{source} is not here")
    if source.endswith(".json") and read_json:
        content = annotations.read_json(Path(source))
        if isinstance(content, list):
            return len(content)
        return len(annotations.read_annotations(Path(source), arguments.split)[0])
    if is_saved(source):
        saved = datasets.load_from_disk(source)
        return len(saved[arguments.split] if isinstance(saved, dict) else saved)
    if source.endswith(".json") or "[" in arguments.split:
        raise Unknown(f"only loading {source} tells how many pairs it has")
    builder, by_split = split_files(arguments)
    files = [file for of_split in by_split.values() for file in of_split]
    if builder == "parquet":
        return sum(pyarrow.parquet.read_metadata(file).num_rows for file in files)
    if builder == "imagefolder":
        return sum(file.lower().endswith(tuple(ImageFolder.EXTENSIONS)) for file in files)
    raise Unknown(f"only loading {source} tells how many pairs it has")


def described(config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a configuration, without its weights."""
    return _described(type(config), config.to_json_string(use_diff=False))


@functools.lru_cache(maxsize=16)
def _described(kind: type[PreTrainedConfig], settings: str) -> PreTrainedModel:
    config = kind.from_dict(json.loads(settings))
    if isinstance(config, CLIPConfig | CLIPMoEConfig):
        return meta_model(config)
    with torch.device("meta"):
        if isinstance(config, LlavaConfig):
            return LlavaForConditionalGeneration(config)
        return AutoModel.from_config(config)


def parameters(configs: tuple[PreTrainedConfig, ...]) -> dict[str, int]:
    """`total`, and `activated`: those that a pair meets, K of the E experts of each sparse layer. All of a mixture."""
    sums = {"total": 0, "activated": 0}
    for config in configs:
        model = described(config)
        if isinstance(config, CLIPConfig | CLIPMoEConfig):
            counts = count_parameters(model)
        else:
            total = sum(parameter.numel() for parameter in model.parameters())
            counts = {"total": total, "activated": total}
        sums = {name: sums[name] + counts[name] for name in sums}
    return sums


def trainable_parameters(config: PreTrainedConfig, pattern: str) -> int:
    """The number of those that train, see `set_trainable`."""
    model = described(config)
    set_trainable(model, pattern)
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def size_of_weights(configs: tuple[PreTrainedConfig, ...]) -> int:
    """Bytes of a saved model."""
    return sum(_stored(config) * (config.dtype or torch.float32).itemsize for config in configs)


def _stored(config: PreTrainedConfig) -> int:
    """Numbers in a saved model, which has a shared encoder twice."""
    once = not getattr(config, "shared_encoder", False)
    return sum(parameter.numel() for _, parameter in described(config).named_parameters(remove_duplicate=once))
