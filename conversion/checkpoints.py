"""Folders and hub names of models: which files they have, their configurations, and the models. Errors name them."""

import contextlib
import os
import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    CLIPModel,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import cached_file, logging

from clip_moe.conversion.own_classes import import_handed_on
from clip_moe.engine.hub import hub_options
from clip_moe.engine.messages import join_names, one_line
from modeling_clip_moe import CLIPMoDEConfig, CLIPMoDEModel, CLIPMoETextModel, CLIPMoETextModelWithProjection
from modeling_clip_moe.configuration_clip_moe import SparseMoEConfig
from modeling_clip_moe.families import FAMILY_OF_TYPE, Family, family_of, is_clip, model_class

# Settings of configurations; a value with a slash is a repository of kernels, which runs whether trusted or not
KERNELS = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
# For `cached_file`: no error where there is no file
MISSING_IS_NONE = {f"_raise_exceptions_for_{name}": False for name in ("gated_repo", "missing_entries")}
MISSING_IS_NONE |= {"_raise_exceptions_for_connection_errors": False}
# Those that may be a model of their own, as an image generator's text encoder is
TEXT_TOWERS = (CLIPTextModel, CLIPTextModelWithProjection, CLIPMoETextModel, CLIPMoETextModelWithProjection)
# "auto": the stored one
Dtype = torch.dtype | Literal["auto"]
# Type of a model that is not accepted -> its kind and the way out
DENSE_HINT = " (it is dense: clip-moe upcycle makes it sparse)"
SPARSE_HINT = " (it is already sparse: clip-moe dense takes one expert out)"
HINTS = {
    **{family.model_type: DENSE_HINT for family in FAMILY_OF_TYPE.values()},
    **{family.sparse.config_class.model_type: SPARSE_HINT for family in FAMILY_OF_TYPE.values()},
    "clip_mode": " (it is a mixture of whole models, each in a folder of its own in it, such as expert_0)",
}
import_handed_on()
# Else a thread asks a program on the Hub to convert the weights of a repository that has none as safetensors
os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")


@contextlib.contextmanager
def loading(source: str | Path) -> Iterator[None]:
    """Turns whatever a library raises about files of a user into one error that names them.

    Here alone every `Exception` is caught, since what the libraries raise is up to the damage, from KeyError to
    RecursionError. So nothing but their reading belongs into the block.

    Raises:
        OSError: a file is not there, or the hub cannot be reached.
        ValueError: all else.
    """
    try:
        yield
    except OSError as error:
        missing = "" if Path(source).exists() else "there is no such folder, and from the Hub: "
        raise OSError(f"cannot load {source}: {missing}{error}") from error
    except pickle.UnpicklingError as error:  # torch's own proposes to run what the file holds
        raise ValueError(f"cannot load {source}: a file of weights is damaged or holds more than tensors") from error
    except (ValueError, RuntimeError, ImportError, SafetensorError, StrictDataclassError) as error:
        raise ValueError(f"cannot load {source}: {one_line(error)}") from error
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"cannot load {source}: a file is damaged or has impossible values ({reason})") from error


def kernels(settings: Any) -> list[str]:
    """The repositories of kernels that settings name, which transformers runs where it finds the package `kernels`."""
    if isinstance(settings, list):
        return [name for value in settings for name in kernels(value)]
    if not isinstance(settings, dict):
        return []
    named = [str(value) for key, value in settings.items() if key in KERNELS and "/" in str(value)]
    return named + kernels(list(settings.values()))


def has_file(source: str | Path, names: Iterable[str]) -> bool:
    """Whether a folder or hub name has at least one of the files."""
    options = hub_options(source) | MISSING_IS_NONE
    return any(cached_file(source, name, **options) is not None for name in names)


def load_config(source: str | Path, subfolder: str = "") -> PreTrainedConfig:
    """The configuration of a model in a folder or on the Hub, or in a folder within that."""
    options = {"subfolder": subfolder, **hub_options(source)}
    with loading(source):
        named = kernels(PreTrainedConfig.get_config_dict(source, **options)[0])
        if named:
            raise ValueError(
                f"config.json names the kernel {named[0]!r}, code of others that would run here: remove it from there"
            )
        # Trust that is not given is asked for
        return AutoConfig.from_pretrained(source, trust_remote_code=False, **options)


def model_configs(source: str | Path) -> list[PreTrainedConfig]:
    """The configuration of the model in a folder or on the Hub, or those of all experts of a mixture."""
    config = load_config(source)
    return [load_config(source, name) for name in config.experts] if isinstance(config, CLIPMoDEConfig) else [config]


def load_model(model_class: type[PreTrainedModel], source: str | Path, dtype: Dtype = "auto") -> PreTrainedModel:
    """Loads a model of exactly this class from a folder or hub name, in evaluation mode and its own dtype."""
    config_of(model_class, source)
    return load_weights(model_class, source, dtype)


def config_of(model_class: type[PreTrainedModel], source: str | Path) -> PreTrainedConfig:
    """The configuration of a model of exactly this class."""
    config = load_config(source)
    model_type, expected = config.model_type, model_class.config_class.model_type
    if model_type != expected:
        hint = HINTS.get(model_type, "") if expected in HINTS else ""
        raise ValueError(f"cannot load {source}: a model of type {expected!r} is needed, not {model_type!r}{hint}")
    return config


def load_weights(model_class: type[PreTrainedModel], source: str | Path, dtype: Dtype = "auto") -> PreTrainedModel:
    """As `load_model`, of a class that may be a part of the stored model."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # the library's report of unfit tensors: the error below says it all
    try:
        with loading(source):
            model, info = model_class.from_pretrained(
                source, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **hub_options(source)
            )
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
    return load_model(clip_class(source), source, dtype)


def load_whole_or_tower(source: str | Path, dtype: Dtype = "auto") -> PreTrainedModel:
    """Loads a model of any family, or a CLIP's text tower alone, dense or sparse, see `load_model`."""
    config = load_config(source)
    tower = next((tower for tower in TEXT_TOWERS if tower.__name__ in (config.architectures or [])), None)
    known = config.model_type in FAMILY_OF_TYPE
    return load_model(tower or (model_class(config) if known else CLIPModel), source, dtype)


def clip_class(source: str | Path) -> type[PreTrainedModel]:
    """The class of a dense or a sparse CLIP; of any other model, the class that `load_model` finds it is not of."""
    return model_class(config) if is_clip(config := load_config(source)) else CLIPModel


def is_sparse(config: PreTrainedConfig) -> bool:
    """Whether a whole CLIP has sparse layers; a `SparseMoEConfig` without any describes a dense one."""
    return isinstance(config, SparseMoEConfig) and any(
        tower.moe_layers for tower in (config.text_config, config.vision_config)
    )


def load_dense(source: str | Path, dtype: Dtype = "auto") -> PreTrainedModel:
    """Loads a dense model of any family, see `load_model`; one with a shared encoder is a `CLIPMoEModel`."""
    config, family = _with_family(source)
    shared = isinstance(config, SparseMoEConfig) and not is_sparse(config)
    return load_model(family.sparse if shared else family.dense, source, dtype)


def load_sparse(source: str | Path, dtype: Dtype = "auto") -> PreTrainedModel:
    """Loads a sparse model of any family, see `load_model`."""
    return load_model(_with_family(source)[1].sparse, source, dtype)


def _with_family(source: str | Path) -> tuple[PreTrainedConfig, Family]:
    config = load_config(source)
    with loading(source):
        return config, family_of(config)


def load_mixture(source: str | Path, **kwargs) -> CLIPMoDEModel:
    """Loads a mixture of whole models from a folder or hub name, in evaluation mode and its own dtype."""
    config = load_config(source)
    if not isinstance(config, CLIPMoDEConfig):
        raise ValueError(f"cannot load {source}: a mixture of whole models is needed, not {config.model_type!r}")
    for name in config.experts:
        load_config(source, name)  # refuses kernels
    with loading(source):
        return CLIPMoDEModel.from_pretrained(source, **kwargs, **hub_options(source)).eval()
