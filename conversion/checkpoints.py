"""What every converter needs: loading whole models, copying processors, comparing two models."""

import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import torch
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoProcessor,
    AutoTokenizer,
    CLIPModel,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.utils import cached_file, logging

from conversion.rules import cut
from modeling_clip_moe import CLIPMoDEConfig, CLIPMoDEModel, CLIPMoEConfig, CLIPMoEModel

TOLERANCE = 1e-4
# By which a folder or repository is known to have each half of a processor
TOKENIZER_FILES = ("tokenizer.json", "vocab.json")
IMAGE_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
# Of a tokenizer's settings, what its last call left there
LAST_USE = ("max_length", "pad_to_multiple_of", "pad_token_type_id", "stride", "truncation_strategy")
WAY_OUT = {
    "clip": " (it is dense: conversion.upcycle makes it sparse)",
    "clip_moe": " (it is already sparse: conversion.dense takes one expert out)",
    "clip_mode": " (it is a mixture of whole models, each in a folder of its own in it, such as expert_0)",
}


def require_source(source: str | Path) -> None:
    """A path that is not there is said to be missing before anything asks the Hub for it.

    Raises:
        FileNotFoundError: `source` is neither a folder nor a hub name.
    """
    if not Path(source).is_dir() or not str(source):
        try:
            validate_repo_id(str(source))
        except HFValidationError:
            raise FileNotFoundError(f"no such folder: {source} is neither a folder nor a hub name") from None


def load_config(source: str | Path) -> PreTrainedConfig:
    """The configuration of a model in a folder or on the Hub.

    Raises:
        FileNotFoundError: `source` is neither a folder nor a hub name.
        OSError: there is no model, or the hub cannot be reached.
        ValueError: a damaged configuration, or one of an unknown model.
    """
    require_source(source)
    try:
        return AutoConfig.from_pretrained(source)
    except OSError as error:
        raise _unreachable(source, error) from error
    except (ValueError, StrictDataclassError) as error:
        raise ValueError(f"cannot load {source}: {error}") from error


def _unreachable(source: str | Path, error: OSError) -> OSError:
    place = "" if Path(source).is_dir() else "there is no such folder, and from the Hub: "
    return OSError(f"cannot load {source}: {place}{error}")


def load_model(model_class: type[PreTrainedModel], source: str | Path, **kwargs) -> PreTrainedModel:
    """Loads a model of exactly this class from a folder or hub name, in evaluation mode and its own dtype.

    Raises:
        FileNotFoundError: `source` is neither a folder nor a hub name.
        OSError: there is no model, or the hub cannot be reached.
        ValueError: another kind of model, a damaged file, missing, left-over or wrongly shaped tensors (named).
    """
    model_type, expected = load_config(source).model_type, model_class.config_class.model_type
    if model_type != expected:
        way_out = WAY_OUT.get(model_type, "") if expected in WAY_OUT else ""
        raise ValueError(f"cannot load {source}: a model of type {expected!r} is needed, not {model_type!r}{way_out}")
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # the library's report of unfit tensors: the error below says it all
    try:
        model, info = model_class.from_pretrained(
            source, **{"dtype": "auto"} | kwargs, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except OSError as error:
        raise _unreachable(source, error) from error
    except (ValueError, RuntimeError, SafetensorError, StrictDataclassError) as error:
        raise ValueError(f"cannot load {source}: {error}") from error
    finally:
        logging.set_verbosity(verbosity)
    mismatched = [f"{key} {tuple(found)}, not {tuple(wanted)}" for key, found, wanted in info["mismatched_keys"]]
    problems = {
        "missing": sorted(info["missing_keys"]),
        "left over": sorted(info["unexpected_keys"]),
        "of the wrong shape": sorted(mismatched),
    }
    if any(problems.values()):
        raise ValueError(f"{source} does not fit: " + "; ".join(f"{k}: {cut(v)}" for k, v in problems.items() if v))
    return model.eval()


def load_clip(source: str | Path, **kwargs) -> CLIPModel | CLIPMoEModel:
    """Loads a dense or a sparse CLIP, see `load_model`."""
    sparse = load_config(source).model_type == CLIPMoEConfig.model_type
    return load_model(CLIPMoEModel if sparse else CLIPModel, source, **kwargs)


def require_loadable(folder: str | Path) -> None:
    """The model in a folder, dense, sparse or mixed, loads whole, and so does the processor if there is one.

    Of a mixture, one expert is in memory at a time.

    Raises:
        OSError, ValueError: see `load_model`; or the processor does not load.
    """
    config = load_config(folder)
    if config.model_type == CLIPMoDEConfig.model_type:
        CLIPMoDEModel.from_pretrained(folder, max_loaded_experts=1)  # the routing
        for name in config.experts:
            load_clip(Path(folder) / name)
    else:
        load_clip(folder)
    if has_file(folder, *TOKENIZER_FILES) and has_file(folder, *IMAGE_PROCESSOR_FILES):
        try:
            AutoProcessor.from_pretrained(folder)
        except Exception as error:  # of damaged files, the tokenizers library raises nothing more special
            raise ValueError(f"cannot load the processor of {folder}: {type(error).__name__}: {error}") from error


def architecture(config: PreTrainedConfig, config_class: type[PreTrainedConfig]) -> dict:
    """What a config, where not at its default, says about the model in the fields of another config class.

    Leaves out how the model was stored, and the generation settings that old files carry.
    """
    known = {field.name for field in fields(config_class)} - {"architectures", "dtype", "transformers_version"}
    return {name: value for name, value in config.to_diff_dict().items() if name in known}


def forget_last_use(tokenizer: PreTrainedTokenizerBase) -> None:
    """Makes a tokenizer forget what it last cut and padded texts to, which it would save and do from then on."""
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        return  # one without the tokenizers library saves no such thing
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    for key in LAST_USE:
        tokenizer.init_kwargs.pop(key, None)


def copy_processor(source: str | Path, folder: Path, required: bool = False) -> None:
    """Saves the processor of `source` (a folder or hub name) into `folder`, or whichever half of it there is.

    Warns on stderr about what is missing. Looks for the files first, since transformers makes up an empty tokenizer
    for a model that has none.

    Raises:
        FileNotFoundError: `source` has neither half, and the processor is `required`.
    """
    has_tokenizer, has_image_processor = has_file(source, *TOKENIZER_FILES), has_file(source, *IMAGE_PROCESSOR_FILES)
    if has_tokenizer and has_image_processor:
        processor = AutoProcessor.from_pretrained(source)
        forget_last_use(processor.tokenizer)
        processor.save_pretrained(folder)
    elif has_tokenizer:
        tokenizer = AutoTokenizer.from_pretrained(source)
        forget_last_use(tokenizer)
        tokenizer.save_pretrained(folder)
        print(f"warning: {source} has no image processor: only its tokenizer was copied", file=sys.stderr)
    elif has_image_processor:
        AutoImageProcessor.from_pretrained(source).save_pretrained(folder)
        print(f"warning: {source} has no tokenizer: only its image processor was copied", file=sys.stderr)
    elif required:
        raise FileNotFoundError(f"{source} has neither a tokenizer nor an image processor")
    else:
        print(f"warning: {source} has no processor: the result has none either", file=sys.stderr)


def has_file(source: str | Path, *names: str) -> bool:
    """Whether a folder or hub name has at least one of the files."""
    quiet = {
        "_raise_exceptions_for_gated_repo": False,
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_connection_errors": False,
    }
    return any(cached_file(source, name, **quiet) is not None for name in names)


def sample_inputs(config, seed: int = 0) -> dict[str, Tensor]:
    """Random images and token ids for a CLIP of this config, each text with the token CLIP pools at.

    For the config of a text tower, token ids alone.
    """
    generator = torch.Generator().manual_seed(seed)
    text, inputs = config.get_text_config(), {}
    if text is not config:
        vision = config.vision_config
        shape = (2, vision.num_channels, vision.image_size, vision.image_size)
        inputs["pixel_values"] = torch.randn(shape, generator=generator)
    last = text.vocab_size - 1
    input_ids = torch.randint(last, (2, text.max_position_embeddings), generator=generator)
    # transformers pools at the highest token id where eos_token_id is 2, else at the first eos_token_id
    input_ids[:, -1] = last if text.eos_token_id == 2 else min(text.eos_token_id, last)
    return inputs | {"input_ids": input_ids}


@torch.no_grad()
def model_outputs(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The logits and both towers' hidden states (layer, batch, token, width) of a dense or sparse CLIP."""
    outputs = model(**inputs, output_hidden_states=True)
    return {
        "logits": outputs.logits_per_image,
        "text hidden states": torch.stack(outputs.text_model_output.hidden_states),
        "vision hidden states": torch.stack(outputs.vision_model_output.hidden_states),
    }


def check_equal(
    expected: Mapping[str, Tensor], found: Mapping[str, Tensor], tolerance: float = TOLERANCE
) -> dict[str, float]:
    """Prints and returns the largest absolute difference of each pair of tensors.

    Raises:
        ValueError: a difference is more than `tolerance` of the expected tensor's largest value, or not a number.
    """
    differences = {}
    for name, tensor in expected.items():
        differences[name] = (found[name] - tensor).abs().max().item()
        print(f"largest difference in {name}: {differences[name]:.3g} (largest value {tensor.abs().max().item():.3g})")
        if not differences[name] <= tolerance * tensor.abs().max().item():
            raise ValueError(f"the converted model does not compute what the source does: see {name} above")
    return differences
