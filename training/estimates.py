"""What is known of models and data before anything is computed, and whether what two stages make goes together, as far
as their settings and configurations tell."""

import functools
import itertools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow.parquet
import torch
from huggingface_hub import hf_hub_download, try_to_load_from_cache
from transformers import (
    AutoModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedModel,
)

from conversion import checkpoints, processors
from data.annotations import TABLES, holds_list
from data.pairs import all_captions, load_pairs, select_columns
from data.sources import DataArguments, Rows, is_here, is_saved, once, open_rows, read_entries, split_files
from data.worlds import WORLDS
from evaluation.costs import count_largest_layer, count_parameters, meta_model
from modeling_clip_moe.families import is_clip
from records.local_names import is_hub_name

SECONDS_FOR_THE_HUB = 5
# Pairs whose captions tell how long texts are
LOOKED_AT = 256


class Unknown(Exception):
    """Something that cannot be told now: its message says why."""


def unknown(why: str) -> Callable[[], int]:
    """A number of `Stage.cost` that raises `Unknown`."""

    def ask() -> int:
        raise Unknown(why)

    return ask


class AtMost(int):
    """A number that may turn out smaller, as then may its sums, products and quotients."""

    def __add__(self, other: int) -> "AtMost":
        return AtMost(int(self) + int(other))

    def __mul__(self, other: int) -> "AtMost":
        return AtMost(int(self) * int(other))

    def __floordiv__(self, other: int) -> "AtMost":
        return AtMost(int(self) // int(other))

    def __sub__(self, other: int) -> "AtMost":
        return AtMost(int(self) - int(other))

    __radd__, __rmul__ = __add__, __mul__


@dataclass(frozen=True)
class Expected:
    """What is known of an input before it is there, or of what a stage will make.

    Args:
        configs: that of a model or an encoder, or those of all experts of a mixture; a text: why they are not known.
        pairs: of data, or those that a stage's output is of; a text: why their number is not known.
        folder: where it lies, if it is there.
        processor: the folder that has the processor of a model, or the one by which a stage read its data, if that is
            there already.
        readable: the settings of data that can be read already.
        weights: where a model comes from, and each training since: the stage, and the names of the parameters that it
            changes. Empty: not known.
    """

    configs: tuple[PreTrainedConfig, ...] | str = "it is no model"
    pairs: int | str = "it is of no data"
    folder: Path | None = None
    processor: Path | None = None
    readable: DataArguments | None = None
    weights: tuple[tuple[str, frozenset[str]], ...] = ()

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
    def clip(self) -> PreTrainedConfig:
        """The configuration of a dense or a sparse CLIP.

        Raises:
            Unknown
            ValueError: it is another model.
        """
        config, *others = self.known_configs
        problem = "a dense or sparse CLIP is needed, not a mixture of whole models" if others else self.no_clip
        if problem:
            raise ValueError(problem)
        return config

    @property
    def no_clip(self) -> str:
        """What tells that it is neither a CLIP nor a mixture of CLIPs, or nothing."""
        configs = () if isinstance(self.configs, str) else self.configs
        kinds = [config.model_type for config in configs if not is_clip(config)]
        return f"a dense or sparse CLIP is needed, not a model of type {kinds[0]!r}" if kinds else ""


def model_configs(source: str) -> tuple[PreTrainedConfig, ...]:
    """The configuration of a model in a folder or on the Hub, or those of all experts of a mixture.

    Raises:
        Unknown: it is a hub name, and cannot be had now.
        OSError, ValueError: see `load_config`; or the processor that is there does not fit, see `require_fit`.
    """
    folder = source if Path(source).is_dir() else _snapshot(source)
    configs = tuple(checkpoints.model_configs(folder))
    if all(is_clip(config) for config in configs):
        _, tokenizer, image_processor = processors.load_halves(folder)
        for config in configs:
            processors.require_fit(config, source, source, tokenizer, image_processor)
    return configs


def is_cached(name: str) -> bool:
    """Whether it is the hub name of a model in the Hub's cache here."""
    return is_hub_name(name) and isinstance(try_to_load_from_cache(name, "config.json"), str)


def _snapshot(name: str) -> Path:
    """The folder of the cache with the configuration of a hub name."""
    if not is_hub_name(name):
        raise Unknown(f"{name} is not here")
    try:
        return Path(hf_hub_download(name, "config.json", etag_timeout=SECONDS_FOR_THE_HUB)).parent
    except (OSError, ValueError) as error:
        raise Unknown(f"{name} is not here, and cannot be had from the Hub now") from error


def count_pairs(arguments: DataArguments) -> int:
    """The pairs of a source, with those that cannot be read, whose number only reading them all tells; where nothing
    else tells, `num_samples`.

    Raises:
        Unknown: they are not here, or only loading them tells.
        OSError, ValueError: a file is damaged, or there is no such split.
    """
    if arguments.source in WORLDS:
        return arguments.num_samples
    if arguments.streaming:
        raise Unknown(f"{arguments.source} is a stream")
    try:
        return AtMost(arguments.taken(_count_rows(arguments)))
    except Unknown:
        if arguments.num_samples is None:
            raise
        return AtMost(arguments.num_samples)


def _count_rows(arguments: DataArguments) -> int:
    source = arguments.source
    if not is_here(source):
        raise Unknown(f"{source} is not here")
    if source.endswith(".json") and holds_list(source):  # of pairs or of conversations
        return len(read_entries(arguments))
    if source.endswith((".json", *TABLES)) or is_saved(source):
        return len(open_rows(replace(arguments, skip=None, num_samples=None)))
    if "[" in arguments.split:
        raise Unknown(f"only loading {source} tells how many pairs it has")
    builder, by_split = split_files(arguments)
    files = [file for of_split in by_split.values() for file in of_split]
    if builder == "parquet":
        return sum(pyarrow.parquet.read_metadata(file).num_rows for file in files)
    if builder == "pictures":
        return len(open_rows(replace(arguments, skip=None, num_samples=None)))
    raise Unknown(f"only loading {source} tells how many pairs it has")


def as_stream(arguments: DataArguments) -> DataArguments:
    """How data are opened to see their columns: of `train[:10%]` and `train+test`, a stream takes the first name."""
    split = arguments.split.partition("+")[0].partition("[")[0].strip()
    changes = {"streaming": True, "indexed": False, "in_memory": False, "skip": None, "num_samples": None}
    changes["split"] = arguments.split if is_saved(arguments.source) else split
    return replace(arguments, **changes)


def text_length(model: Expected, data: Expected) -> int:
    """Tokens of the longest of the first captions; where these or the tokenizer are not here, and at most, what the
    model reads. Raises Unknown."""
    most = model.clip.text_config.max_position_embeddings
    if model.processor is None or data.readable is None:
        return AtMost(most)
    return min(most, _longest_caption(data.readable, model.processor))


def bytes_at_a_time(model: Expected, text_tokens: int, pairs: int) -> int:
    """Bytes of the largest layer's activations for a batch, without training. Raises Unknown."""
    whole = weightless_model(model.clip).requires_grad_(True)
    return 4 * pairs * count_largest_layer(whole, text_tokens, most_patches(model))


def bytes_of_images(model: Expected, images: int) -> int:
    """As a CLIP takes them, in float32. Raises Unknown."""
    vision = model.clip.vision_config
    if hasattr(vision, "image_size"):
        pixels = vision.image_size**2
    else:
        pixels = (most_patches(model) or vision.num_patches) * vision.patch_size**2
    return images * 4 * vision.num_channels * pixels


def most_patches(model: Expected) -> int | None:
    """As `conversion.processors.most_patches`; None where the processor is not there yet, too. Raises Unknown."""
    return None if model.processor is None else processors.most_patches(model.clip, model.processor)


def bytes_of_rows(data: Expected) -> int:
    """What the drawn pictures of a built-in world take in memory; other data are mapped from files. Raises Unknown."""
    if data.readable is None or data.readable.source not in WORLDS:
        return 0
    first = _first_pairs(data.readable)
    return first.data.nbytes * data.known_pairs // len(first)


def _longest_caption(data: DataArguments, processor: Path) -> int:
    """Tokens of the longest of the first captions."""

    def look() -> int:
        captions = [*itertools.islice(all_captions(_first_pairs(data)), LOOKED_AT)]
        tokenizer = processors.load_processor(processor).tokenizer
        return max(len(tokenizer(caption, verbose=False)["input_ids"]) for caption in captions or [""])

    return once(f"longest caption {data} {processor}", look)


def _first_pairs(data: DataArguments) -> Rows:
    """The first pairs; other data than worlds are read as a stream."""

    def look() -> Rows:
        number = min(data.num_samples or LOOKED_AT, LOOKED_AT)
        if data.source in WORLDS:
            return load_pairs(replace(data, num_samples=number))
        return select_columns(open_rows(replace(as_stream(data), num_samples=number)), data)

    return once(f"first pairs {data}", look)


def weightless_model(config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a configuration, without its weights."""
    return _weightless_model(type(config), config.to_json_string(use_diff=False))


@functools.lru_cache(maxsize=16)
def _weightless_model(kind: type[PreTrainedConfig], settings: str) -> PreTrainedModel:
    config = kind.from_dict(json.loads(settings))
    if is_clip(config):
        return meta_model(config)
    with torch.device("meta"):
        if isinstance(config, LlavaConfig):
            return LlavaForConditionalGeneration(config)
        return AutoModel.from_config(config)


def parameters(configs: tuple[PreTrainedConfig, ...]) -> dict[str, int]:
    """`total`, and `activated`: those that a pair meets, K of the E experts of each sparse layer. All of a mixture."""
    sums = {"total": 0, "activated": 0}
    for config in configs:
        model = weightless_model(config)
        if is_clip(config):
            counts = count_parameters(model)
        else:
            total = sum(parameter.numel() for parameter in model.parameters())
            counts = {"total": total, "activated": total}
        sums = {name: sums[name] + counts[name] for name in sums}
    return sums


def bytes_in_memory(configs: tuple[PreTrainedConfig, ...]) -> int:
    """Bytes of the weights of a model in float32, or of all experts of a mixture."""
    return 4 * parameters(configs)["total"]


def size_of_weights(configs: tuple[PreTrainedConfig, ...]) -> int:
    """Bytes of a saved model."""
    return sum(_stored(config) * (config.dtype or torch.float32).itemsize for config in configs)


def _stored(config: PreTrainedConfig) -> int:
    """Numbers in a saved model, which has a shared encoder twice."""
    once = not getattr(config, "shared_encoder", False)
    return sum(parameter.numel() for _, parameter in weightless_model(config).named_parameters(remove_duplicate=once))


def read_otherwise(models: Iterable[Expected]) -> str:
    """Why models cannot become one that has one processor, as far as theirs are known, or nothing."""
    folders = dict.fromkeys(folder for model in models if model.processor and (folder := _processor(model)))
    try:
        processors.require_same(list(folders) if len(folders) > 1 else [])
    except ValueError as error:
        return str(error)
    return ""


def _processor(model: Expected) -> Path | None:
    """The folder with the processor of a model; None where that is not known, or the model got longer texts since."""
    try:
        configs = model.clip, *checkpoints.model_configs(model.processor)
        lengths = {config.get_text_config().max_position_embeddings for config in configs}
    except (Unknown, ValueError, OSError):
        return None
    return model.processor if len(lengths) == 1 else None


def trained_apart(one: Expected, other: Expected) -> frozenset[str]:
    """Parameters trained since both models had the same weights; empty if that is not known."""
    both = zip(one.weights, other.weights, strict=False)
    shared = next((at for at, (a, b) in enumerate(both) if a != b), min(len(one.weights), len(other.weights)))
    since = (*one.weights[shared:], *other.weights[shared:]) if shared else ()
    return frozenset().union(*(names for _, names in since))
