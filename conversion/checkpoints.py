"""What every converter needs: loading whole models, copying processors, comparing two models."""

import contextlib
import json
import pickle
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path

import torch
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from huggingface_hub.utils import validate_repo_id
from PIL import Image
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoProcessor,
    AutoTokenizer,
    BaseImageProcessor,
    CLIPModel,
    CLIPTextConfig,
    CLIPVisionConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
    logging,
)

from conversion.files import save
from conversion.messages import cut
from conversion.own_code import kernels
from modeling_clip_moe import CLIPMoDEConfig, CLIPMoDEModel, CLIPMoEConfig, CLIPMoEModel
from modeling_clip_moe.configuration_clip_moe import check_tower

TOLERANCE = 1e-4
# Of a tokenizer's settings, what its last call left there
LAST_USE = ("max_length", "pad_to_multiple_of", "pad_token_type_id", "stride", "truncation_strategy")
WAY_OUT = {
    "clip": " (it is dense: conversion.upcycle makes it sparse)",
    "clip_moe": " (it is already sparse: conversion.dense takes one expert out)",
    "clip_mode": " (it is a mixture of whole models, each in a folder of its own in it, such as expert_0)",
}


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
# By which a folder or repository is known to have each half of a processor
TOKENIZER_FILES = ("tokenizer.json", "vocab.json")
IMAGE_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
MOST_LAYERS = 1000  # a damaged number of them is not tried out
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MODELS = {"clip": CLIPModel, CLIPMoEConfig.model_type: CLIPMoEModel}


@contextlib.contextmanager
def reading(source: str | Path) -> Iterator[None]:
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
        place = "" if Path(source).exists() else "there is no such folder, and from the Hub: "
        raise OSError(f"cannot load {source}: {place}{error}") from error
    except (ValueError, RuntimeError, SafetensorError, StrictDataclassError) as error:
        raise ValueError(f"cannot load {source}: {error}") from error
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"cannot load {source}: a file is damaged or has impossible values ({reason})") from error


def check_json(source: str | Path) -> None:
    """Refuses damaged JSON in a folder by its name, which the libraries that read it do not always give.

    Raises:
        ValueError: a file is no JSON, or holds something else than an object.
    """
    for path in (Path(source) / name for name in JSON_FILES):
        if path.is_file():
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"cannot load {source}: {path.name} is no JSON: {error}") from error
            if not isinstance(content, dict):
                raise ValueError(
                    f"cannot load {source}: {path.name} holds no JSON object but a {type(content).__name__}"
                )


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
    with reading(source):
        if cached_file(source, "adapter_config.json", subfolder=subfolder, **QUIET) is not None:
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
        for tower in (config, getattr(config, "text_config", None), getattr(config, "vision_config", None)):
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


def load_pickle(path: str | Path):
    """What `torch.save` wrote, as far as it is tensors and plain containers.

    Raises:
        ValueError: the file is damaged, or holds anything else, which could run code and is not loaded.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path} is damaged or holds more than tensors, and was not loaded") from error


def check_weights(tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Refuses weights, each with its name, that nothing can be computed with; returns how many numbers they are.

    Raises:
        ValueError: one is not of floating point, or not finite.
    """
    numbers = 0
    for name, tensor in tensors:
        numbers += tensor.numel()
        if name.endswith("position_ids"):
            continue  # old files have them, and nothing reads them
        if tensor.dtype not in FLOATS:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ValueError(
                f"{name} is of {kind}, not of floating point: take the model as it was before it was quantized"
            )
        finite = tensor.isfinite()
        if not finite.all():
            what, finite = ("rows", finite.flatten(1).all(dim=1)) if tensor.dim() > 1 else ("values", finite.flatten())
            raise ValueError(f"{name} has {(~finite).sum()} of {len(finite)} {what} that are not finite")
    return numbers


def stored_weights(source: str | Path, subfolder: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a folder or hub name by their names, one at a time, from the files that transformers reads."""
    for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME):
        path = cached_file(source, name, subfolder=subfolder, **QUIET)
        if path is None:
            continue
        paths = [path]
        if path.endswith(".index.json"):
            shards = set(json.loads(Path(path).read_text(encoding="utf-8"))["weight_map"].values())
            if outside := sorted(shard for shard in shards if Path(shard).name != shard):
                raise ValueError(f"{name} names {cut(outside)}, which is not a file beside it")
            paths = [cached_file(source, shard, subfolder=subfolder) for shard in sorted(shards)]
        for path in paths:
            if path.endswith(".safetensors"):
                with safe_open(path, "pt") as file:
                    yield from ((key, file.get_tensor(key)) for key in file.keys())  # noqa: SIM118, it is no dict
            else:
                yield from load_pickle(path).items()
        return


def load_model(model_class: type[PreTrainedModel], source: str | Path, **kwargs) -> PreTrainedModel:
    """Loads a model of exactly this class from a folder or hub name, in evaluation mode and its own dtype.

    Raises:
        FileNotFoundError: `source` is neither a folder nor a hub name.
        OSError: there is no model, or the hub cannot be reached.
        ValueError: another kind of model, a damaged file, weights that are not finite or quantized, missing, left-over
            or wrongly shaped tensors (named).
    """
    config = load_config(source)
    model_type, expected = config.model_type, model_class.config_class.model_type
    if model_type != expected:
        way_out = WAY_OUT.get(model_type, "") if expected in WAY_OUT else ""
        raise ValueError(f"cannot load {source}: a model of type {expected!r} is needed, not {model_type!r}{way_out}")
    return load_weights(model_class, source, config, **kwargs)


def _check_size(model_class: type[PreTrainedModel], config: PreTrainedConfig, stored: int) -> None:
    """Refuses a configuration that says far more than the numbers stored, before memory is taken for it.

    Raises:
        ValueError: as said. What differs less is named tensor by tensor when it is loaded.
    """
    if not isinstance(config, model_class.config_class):
        config = next(part for part in vars(config).values() if isinstance(part, model_class.config_class))
    with torch.device("meta"):
        described = sum(parameter.numel() for parameter in model_class(config).parameters())
    if described > 2 * stored + 10**6:
        raise ValueError(f"the configuration describes a model of {described} numbers, but the files hold {stored}")


def load_weights(
    model_class: type[PreTrainedModel], source: str | Path, stored: PreTrainedConfig, **kwargs
) -> PreTrainedModel:
    """As `load_model`, of a class that may be a part of the stored model, whose configuration is `stored`."""
    if getattr(stored, "quantization_config", None) is not None:
        raise ValueError(f"cannot load {source}: it is quantized: take the model as it was before")
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # the library's report of unfit tensors: the error below says it all
    try:
        with reading(source):
            numbers = check_weights(stored_weights(source))
            _check_size(model_class, kwargs.get("config", stored), numbers)
            model, info = model_class.from_pretrained(
                source, **{"dtype": "auto"} | kwargs, output_loading_info=True, ignore_mismatched_sizes=True
            )
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
    return load_model(MODELS.get(load_config(source).model_type, CLIPModel), source, **kwargs)


def load_mixture(source: str | Path, **kwargs) -> CLIPMoDEModel:
    """Loads a mixture of whole models from a folder or hub name, in evaluation mode and its own dtype.

    Raises: as `load_model`, for every expert, those that are loaded later included.
    """
    config = load_config(source)
    if not isinstance(config, CLIPMoDEConfig):
        raise ValueError(f"cannot load {source}: a mixture of whole models is needed, not {config.model_type!r}")
    with reading(source):
        for name in config.experts:
            if Path(source).is_dir() and not (Path(source) / name / "config.json").is_file():
                raise FileNotFoundError(f"{Path(source) / name}, one of its experts, holds no model")
            expert = load_config(source, name)
            if expert.model_type not in MODELS:
                raise ValueError(f"{name} is of type {expert.model_type!r}, no CLIP")
            numbers = check_weights((f"{name}: {key}", tensor) for key, tensor in stored_weights(source, name))
            _check_size(MODELS[expert.model_type], expert, numbers)
        return CLIPMoDEModel.from_pretrained(source, **kwargs).eval()


def require_loadable(folder: str | Path) -> None:
    """The model in a folder, dense, sparse or mixed, loads whole, and so does the processor if there is one.

    Of a mixture, one expert is in memory at a time.

    Raises:
        OSError, ValueError: see `load_model`; or the processor does not load.
    """
    if load_config(folder).model_type == CLIPMoDEConfig.model_type:
        mixture = load_mixture(folder, max_loaded_experts=1)
        for number in range(mixture.num_experts):
            mixture.expert(number)
    else:
        load_clip(folder)
    if has_file(folder, *TOKENIZER_FILES) and has_file(folder, *IMAGE_PROCESSOR_FILES):
        load_processor(folder)


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


def load_tokenizer(source: str | Path, **kwargs) -> PreTrainedTokenizerBase:
    """
    Raises:
        OSError, ValueError: it is not there or damaged; named.
    """
    check_json(source)
    with reading(source):
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False, **kwargs)


def load_processor(source: str | Path) -> ProcessorMixin:
    """The processor of a folder or hub name, which has prepared an image and a text once.

    Raises:
        FileNotFoundError: it has no tokenizer or no image processor, which transformers would make up.
        OSError, ValueError: a file is not there or damaged; named.
    """
    for what, names in (("tokenizer", TOKENIZER_FILES), ("image processor", IMAGE_PROCESSOR_FILES)):
        if not has_file(source, *names):
            raise FileNotFoundError(f"{source} has no {what}; copy the one it was trained with there")
    check_json(source)
    with reading(source):
        processor = AutoProcessor.from_pretrained(source, trust_remote_code=False)
        processor.tokenizer("a", truncation=True)
        _check_image_processor(processor.image_processor)
    return processor


def load_image_processor(source: str | Path) -> BaseImageProcessor:
    """As `load_processor`, of the half for images."""
    check_json(source)
    with reading(source):
        image_processor = AutoImageProcessor.from_pretrained(source, trust_remote_code=False)
        _check_image_processor(image_processor)
    return image_processor


def _check_image_processor(image_processor) -> None:
    pixels = image_processor(Image.new("RGB", (64, 64)), return_tensors="pt")["pixel_values"]
    if not (pixels.numel() and pixels.isfinite().all()):
        raise ValueError("the image processor makes images that are empty or not finite")


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, source: str | Path, folder: Path) -> None:
    """Refuses a tokenizer with tokens that the model in a folder, if there is one, does not know.

    Raises:
        ValueError: its largest token id is beyond the model's table of tokens.
    """
    if not (folder / "config.json").is_file():
        return
    config = load_config(folder)
    if isinstance(config, CLIPMoDEConfig):
        config = load_config(folder / config.experts[0])
    largest, rows = max(tokenizer.get_vocab().values(), default=-1), config.get_text_config().vocab_size
    if largest >= rows:
        raise ValueError(f"the tokenizer of {source} has token ids up to {largest}, but the model {rows} tokens alone")


def copy_processor(source: str | Path, folder: Path, required: bool = False) -> None:
    """Saves the processor of `source` (a folder or hub name) into `folder`, or whichever half of it there is.

    Warns on stderr about what is missing. Looks for the files first, since transformers makes up an empty tokenizer
    for a model that has none.

    Raises:
        FileNotFoundError: `source` has neither half, and the processor is `required`.
        ValueError: a file is damaged, or the model that is in `folder` already lacks some of its tokens.
    """
    has_tokenizer, has_image_processor = has_file(source, *TOKENIZER_FILES), has_file(source, *IMAGE_PROCESSOR_FILES)
    if has_tokenizer and has_image_processor:
        copy = load_processor(source)
        tokenizer = copy.tokenizer
    elif has_tokenizer:
        copy = tokenizer = load_tokenizer(source)
        print(f"warning: {source} has no image processor: only its tokenizer was copied", file=sys.stderr)
    elif has_image_processor:
        copy, tokenizer = load_image_processor(source), None
        print(f"warning: {source} has no tokenizer: only its image processor was copied", file=sys.stderr)
    elif required:
        raise FileNotFoundError(f"{source} has neither a tokenizer nor an image processor")
    else:
        print(f"warning: {source} has no processor: the result has none either", file=sys.stderr)
        return
    if tokenizer is not None:
        check_vocabulary(tokenizer, source, folder)
        forget_last_use(tokenizer)
    save(copy, folder)


# For `cached_file`: no error where there is no file
QUIET = {
    "_raise_exceptions_for_gated_repo": False,
    "_raise_exceptions_for_missing_entries": False,
    "_raise_exceptions_for_connection_errors": False,
}


def has_file(source: str | Path, *names: str) -> bool:
    """Whether a folder or hub name has at least one of the files."""
    return any(cached_file(source, name, **QUIET) is not None for name in names)


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
