"""Folders and hub names of models: which files they have, and their configurations. Errors name them."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError, StrictDataclassError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError
from transformers import AutoConfig, CLIPTextConfig, CLIPVisionConfig, PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME, cached_file

from modeling_clip_moe import CLIPMoDEConfig
from modeling_clip_moe.configuration_clip_moe import check_tower
from records.files import read_json

# What a folder of a model may hold as JSON, all of it objects
JSON_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "processor_config.json",
    "preprocessor_config.json",
    SAFE_WEIGHTS_INDEX_NAME,
    WEIGHTS_INDEX_NAME,
)
# Of configurations; a value with a slash is a repository of kernels, which runs whether trusted or not
KERNELS = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
MOST_LAYERS = 1000  # a damaged number of them is not tried out
# For `cached_file`: no error where there is no file
MISSING_IS_NONE = {
    "_raise_exceptions_for_gated_repo": False,
    "_raise_exceptions_for_missing_entries": False,
    "_raise_exceptions_for_connection_errors": False,
}


@contextlib.contextmanager
def loading(source: str | Path) -> Iterator[None]:
    """Turns whatever a library raises about files of a user into one error that names them.

    Here alone every `Exception` is caught: what transformers, tokenizers and torch raise at a damaged file is up to the
    damage, from KeyError and ZeroDivisionError to RecursionError. So nothing but their reading belongs into the block.

    Raises:
        OSError: a file is not there, or the hub cannot be reached.
        ValueError: all else.
    """
    try:
        yield
    except OSError as error:
        missing = "" if Path(source).exists() else "there is no such folder, and from the Hub: "
        raise OSError(f"cannot load {source}: {missing}{error}") from error
    except (ValueError, RuntimeError, SafetensorError, StrictDataclassError) as error:
        raise ValueError(f"cannot load {source}: {error}") from error
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"cannot load {source}: a file is damaged or has impossible values ({reason})") from error


def check_json(source: str | Path) -> None:
    """Refuses damaged JSON in a folder by its name, which the libraries that read it do not always give."""
    for path in (Path(source) / name for name in JSON_FILES):
        if path.is_file():
            try:
                content = read_json(path)
            except ValueError as error:
                reason = str(error).removeprefix(f"{path} ")
                raise ValueError(f"cannot load {source}: {path.name} {reason}") from error
            if not isinstance(content, dict):
                raise ValueError(
                    f"cannot load {source}: {path.name} holds no JSON object but a {type(content).__name__}"
                )


def kernels(settings: Any) -> list[str]:
    """The repositories of kernels that settings name, which transformers runs where it finds the package `kernels`."""
    if isinstance(settings, list):
        return [name for value in settings for name in kernels(value)]
    if not isinstance(settings, dict):
        return []
    named = [str(value) for key, value in settings.items() if key in KERNELS and "/" in str(value)]
    return named + kernels(list(settings.values()))


def require_source(source: str | Path) -> None:
    """A path that is not there is said to be missing before anything asks the Hub for it."""
    if not Path(source).is_dir() or not str(source):
        try:
            validate_repo_id(str(source))
        except HFValidationError:
            raise FileNotFoundError(f"no such folder: {source} is neither a folder nor a hub name") from None


def has_file(source: str | Path, *names: str) -> bool:
    """Whether a folder or hub name has at least one of the files."""
    return any(cached_file(source, name, **MISSING_IS_NONE) is not None for name in names)


def load_config(source: str | Path, subfolder: str = "") -> PreTrainedConfig:
    """The configuration of a model in a folder or on the Hub, or in a folder within that.

    Raises:
        FileNotFoundError: `source` is neither a folder nor a hub name.
        OSError: there is no model, or the hub cannot be reached.
        ValueError: a damaged configuration, or one of an unknown model; one that names kernels, which transformers
            would run unasked, or a file of weights, or that peft would load another model for.
    """
    require_source(source)
    check_json(Path(source) / subfolder)
    with loading(source):
        if cached_file(source, "adapter_config.json", subfolder=subfolder, **MISSING_IS_NONE) is not None:
            raise ValueError(
                "adapter_config.json makes it an adapter of another model: merge it into that one (peft's "
                "merge_and_unload), and save the whole"
            )
        settings = PreTrainedConfig.get_config_dict(source, subfolder=subfolder)[0]
        if "transformers_weights" in settings:  # loaded in place of the files that are checked
            raise ValueError(
                f"transformers_weights names a file of its own for the weights ({settings['transformers_weights']!r}): "
                "remove it from config.json, and call that file model.safetensors"
            )
        named = kernels(settings)
        if named:
            raise ValueError(
                f"config.json names the kernel {named[0]!r}, code of others that would run here: remove it from there"
            )
        config = AutoConfig.from_pretrained(  # trust that is not given is asked for
            source, subfolder=subfolder, trust_remote_code=False
        )
        if not isinstance(config.architectures or [], list):
            raise ValueError(f"architectures must be a list of names, got {config.architectures!r}")
        if isinstance(config, CLIPMoDEConfig) and not config.experts:
            raise ValueError("experts must name the folders of a mixture's experts, got []")
        for tower in (config, getattr(config, "text_config", None), getattr(config, "vision_config", None)):
            if isinstance(tower, PreTrainedConfig) and not tower.return_dict:
                raise ValueError("return_dict must be true: the outputs of a model have names here")
            layers = getattr(tower, "num_hidden_layers", None) or 0
            if layers > MOST_LAYERS:
                raise ValueError(f"num_hidden_layers must be at most {MOST_LAYERS}, got {layers}")
            if isinstance(tower, (CLIPTextConfig, CLIPVisionConfig)):
                check_tower(tower)
            if isinstance(tower, CLIPTextConfig) and not (
                isinstance(tower.eos_token_id, int) and 0 <= tower.eos_token_id < tower.vocab_size
            ):
                raise ValueError(
                    f"eos_token_id, which texts are pooled at, must be below vocab_size ({tower.vocab_size}), got "
                    f"{tower.eos_token_id}"
                )
    return config
