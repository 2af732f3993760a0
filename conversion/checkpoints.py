"""Folders and hub names of models: which files they have, their configurations, and the models. Errors name them."""

import contextlib
import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, CLIPModel, PreTrainedConfig, PreTrainedModel
from transformers.utils import cached_file, logging

from clip_moe.conversion.own_classes import import_handed_on
from clip_moe.engine.hub import hub_options
from clip_moe.engine.messages import join_names, one_line
from modeling_clip_moe import CLIPMoDEConfig, CLIPMoDEModel
from modeling_clip_moe.configuration_clip_moe import SparseMoEConfig
from modeling_clip_moe.families import FAMILY_OF_TYPE, family_of, is_clip, model_class, sparse_towers

# Settings of configurations; a value with a slash is a repository of kernels, which runs whether trusted or not
KERNELS = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
# For `cached_file`: no error where there is no file
MISSING_IS_NONE = {f"_raise_exceptions_for_{name}": False for name in ("gated_repo", "missing_entries")}
MISSING_IS_NONE |= {"_raise_exceptions_for_connection_errors": False}
# "auto": the stored one
Dtype = torch.dtype | Literal["auto"]
# Type of a model that is not accepted -> its kind and the way out
HINTS = {"clip_mode": " (it is a mixture of whole models, each in a folder of its own in it, such as expert_0)"}
DENSE = " (it is dense: clip-moe upcycle makes it sparse)"
SPARSE = " (it is already sparse: clip-moe train trains it as it is, and clip-moe dense takes one expert out)"
HINTS |= {name: DENSE if name == family.model_type else SPARSE for name, family in FAMILY_OF_TYPE.items()}
import_handed_on()


@contextlib.contextmanager
def loading(source: str | Path) -> Iterator[None]:
    """Turns any error of a library about a user's files into one line that names them: an OSError if one is missing or
    the Hub cannot be reached, else a ValueError. The block must only read: which exceptions damaged files raise, from
    KeyError to RecursionError, is up to the libraries.
    """
    try:
        yield
    except OSError as error:
        missing = "" if Path(source).exists() else "there is no such folder, and from the Hub: "
        raise OSError(f"cannot load {source}: {missing}{error}") from error
    except Exception as error:
        if isinstance(error, pickle.UnpicklingError):  # torch's own proposes to run what the file holds
            reason = "a weight file is damaged or holds more than tensors"
        elif isinstance(error, (ValueError, RuntimeError, ImportError, SafetensorError, StrictDataclassError)):
            reason = one_line(error)
        else:
            reason = f"a file is damaged or has impossible values ({type(error).__name__}: {error})"
        raise ValueError(f"cannot load {source}: {reason}") from error


def load(loader: Callable[..., Any], source: str | Path, **options) -> Any:
    """Calls a loader of transformers, for a Hub name at the commit that this process reads. Errors: see `loading`."""
    options |= hub_options(source)
    # Else a thread asks a program on the Hub to convert the weights of a repository that has none as safetensors
    os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")
    with loading(source):
        return loader(source, **options)


def kernels(settings: Any) -> list[str]:
    """The repositories of kernels in settings, which transformers runs if the package `kernels` is installed."""
    if isinstance(settings, list):
        return [name for value in settings for name in kernels(value)]
    if not isinstance(settings, dict):
        return []
    named = [str(value) for key, value in settings.items() if key in KERNELS and "/" in str(value)]
    return named + kernels(list(settings.values()))


def has_file(source: str | Path, names: Iterable[str]) -> bool:
    """Whether a folder or hub name has at least one of the files."""
    return any(load(cached_file, source, filename=name, **MISSING_IS_NONE) is not None for name in names)


def load_config(source: str | Path, subfolder: str = "") -> PreTrainedConfig:
    """The configuration of a model in a folder or on the Hub, or in a folder within that."""
    settings, _ = load(PreTrainedConfig.get_config_dict, source, subfolder=subfolder)
    with loading(source):
        if named := kernels(settings):
            raise ValueError(
                f"config.json names the kernel {named[0]!r}, third-party code that would run here: remove it"
            )
    # Without an answer on trust, transformers asks for one
    return load(AutoConfig.from_pretrained, source, subfolder=subfolder, trust_remote_code=False)


def model_configs(source: str | Path) -> list[PreTrainedConfig]:
    """The configuration of the model in a folder or on the Hub, or those of all experts of a mixture."""
    config = load_config(source)
    return [load_config(source, name) for name in config.experts] if isinstance(config, CLIPMoDEConfig) else [config]


def load_model(model_class: type[PreTrainedModel], source: str | Path, dtype: Dtype = "auto") -> PreTrainedModel:
    """Loads a model of exactly this class from a folder or hub name, in evaluation mode and its own dtype."""
    require_type(load_config(source), model_class, source)
    return load_weights(model_class, source, dtype)


def require_type(config: PreTrainedConfig, model_class: type[PreTrainedModel], source: str | Path) -> None:
    """Refuses the configuration of a model of another class."""
    model_type, expected = config.model_type, model_class.config_class.model_type
    if model_type != expected:
        hint = HINTS.get(model_type, "") if expected in HINTS else ""
        raise ValueError(f"cannot load {source}: expected a model of type {expected!r}, got {model_type!r}{hint}")


def load_weights(model_class: type[PreTrainedModel], source: str | Path, dtype: Dtype = "auto") -> PreTrainedModel:
    """As `load_model`, of a class that may be a part of the stored model."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # the library's report of unfit tensors: the error below says it all
    options = {"dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        model, info = load(model_class.from_pretrained, source, **options)
    finally:
        logging.set_verbosity(verbosity)
    problems = {
        "missing": info["missing_keys"],
        "left over": info["unexpected_keys"],
        "of the wrong shape": [f"{key} {tuple(old)}, not {tuple(new)}" for key, old, new in info["mismatched_keys"]],
        "not finite": [name for name, parameter in model.named_parameters() if not parameter.isfinite().all()],
    }
    if faults := [f"{fault}: {join_names(sorted(names))}" for fault, names in problems.items() if names]:
        raise ValueError(f"{source} does not fit: {'; '.join(faults)}")
    return model.eval()


def load_clip(source: str | Path, dtype: Dtype = "auto") -> PreTrainedModel:
    """Loads a dense or a sparse CLIP of any family, see `load_model`."""
    config = load_clip_config(source)
    return load_weights(model_class(config), source, dtype)


def load_clip_config(source: str | Path) -> PreTrainedConfig:
    """The configuration of a dense or a sparse CLIP of any family."""
    config = load_config(source)
    if not is_clip(config):
        require_type(config, CLIPModel, source)
    return config


def load_dense(source: str | Path, dtype: Dtype = "auto") -> PreTrainedModel:
    """Loads a dense model of any family, see `load_model`; one with a shared encoder is a `CLIPMoEModel`."""
    config = load_config(source)
    is_dense = isinstance(config, SparseMoEConfig) and not sparse_towers(config)
    return load_model(model_class(config) if is_dense else family_of(config).dense, source, dtype)


def load_sparse(source: str | Path, dtype: Dtype = "auto") -> PreTrainedModel:
    """Loads a sparse model of any family, see `load_model`."""
    return load_model(family_of(load_config(source)).sparse, source, dtype)


def load_mixture(source: str | Path, **kwargs) -> CLIPMoDEModel:
    """Loads a mixture of whole models from a folder or hub name, in evaluation mode and its own dtype."""
    config = load_config(source)
    require_type(config, CLIPMoDEModel, source)
    for name in config.experts:
        load_config(source, name)  # refuses kernels
    return load(CLIPMoDEModel.from_pretrained, source, **kwargs).eval()
