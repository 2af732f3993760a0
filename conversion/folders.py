"""Folders and hub names of models: which files they have, and their configurations. Errors name them."""

import contextlib
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError, StrictDataclassError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import cached_file

# Settings of configurations; a value with a slash is a repository of kernels, which runs whether trusted or not
KERNELS = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
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
    except pickle.UnpicklingError as error:  # torch's own proposes to run what the file holds
        raise ValueError(f"cannot load {source}: a file of weights is damaged or holds more than tensors") from error
    except (ValueError, RuntimeError, SafetensorError, StrictDataclassError) as error:
        raise ValueError(f"cannot load {source}: {error}") from error
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
    """The configuration of a model in a folder or on the Hub, or in a folder within that."""
    require_source(source)
    with loading(source):
        named = kernels(PreTrainedConfig.get_config_dict(source, subfolder=subfolder)[0])
        if named:
            raise ValueError(
                f"config.json names the kernel {named[0]!r}, code of others that would run here: remove it from there"
            )
        # Trust that is not given is asked for
        return AutoConfig.from_pretrained(source, subfolder=subfolder, trust_remote_code=False)
