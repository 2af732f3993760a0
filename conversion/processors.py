"""Processors and their halves, tokenizers and image processors: loaded, copied, and held to the model they go with."""

import sys
from pathlib import Path

from PIL import Image
from transformers import (
    AutoProcessor,
    AutoTokenizer,
    BaseImageProcessor,
    CLIPTextConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from conversion.files import save
from conversion.folders import check_json, has_file, load_config, loading
from modeling_clip_moe import CLIPMoDEConfig

# By which a folder or repository is known to have each half of a processor
TOKENIZER_FILES = ("tokenizer.json", "vocab.json")
IMAGE_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
# Settings of a tokenizer that its last call leaves there
LAST_CALL = ("max_length", "pad_to_multiple_of", "pad_token_type_id", "stride", "truncation_strategy")


def forget_last_call(tokenizer: PreTrainedTokenizerBase) -> None:
    """Makes a tokenizer forget what it last cut and padded texts to, which it would save and do from then on."""
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        return  # one without the tokenizers library saves no such thing
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    for key in LAST_CALL:
        tokenizer.init_kwargs.pop(key, None)


def load_tokenizer(source: str | Path, **kwargs) -> PreTrainedTokenizerBase:
    """
    Raises:
        OSError, ValueError: it is not there or damaged; named.
    """
    check_json(source)
    with loading(source):
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
    with loading(source):
        processor = AutoProcessor.from_pretrained(source, trust_remote_code=False)
        processor.tokenizer("a", truncation=True)
        _check_image_processor(processor.image_processor)
    return processor


def load_image_processor(source: str | Path) -> BaseImageProcessor:
    """As `load_processor`, of the half for images."""
    check_json(source)
    with loading(source):
        image_processor = AutoImageProcessor.from_pretrained(source, trust_remote_code=False)
        _check_image_processor(image_processor)
    return image_processor


def _check_image_processor(image_processor) -> None:
    pixels = image_processor(Image.new("RGB", (64, 64)), return_tensors="pt")["pixel_values"]
    if not (pixels.numel() and pixels.isfinite().all()):
        raise ValueError("the image processor makes images that are empty or not finite")


def require_fit(
    config: PreTrainedConfig,
    source: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    image_processor: BaseImageProcessor | None = None,
) -> None:
    """Refuses the halves of a processor that are given, where they do not fit the towers that a model has.

    Args:
        config: of a CLIP, or of a text tower alone.
        source: what the processor was loaded from, for errors.

    Raises:
        ValueError: the tokenizer has tokens that the model does not know, or images get another size than it takes.
    """
    text, vision = config.get_text_config(), getattr(config, "vision_config", None)
    if tokenizer is not None:
        number = max(tokenizer.get_vocab().values(), default=-1) + 1
        if number > text.vocab_size:
            raise ValueError(
                f"the tokenizer of {source} has {number} tokens, but vocab_size is {text.vocab_size}: take the "
                f"tokenizer that belongs to the model, or leave vocab_size out of a new one, which makes it {number}"
            )
    if image_processor is not None and vision is not None:
        # Not square, since no rule tells for all image processors what they make of such an image
        image = Image.new("RGB", (2 * vision.image_size + 1, vision.image_size + 1))
        made = tuple(image_processor(image, return_tensors="pt")["pixel_values"].shape[-3:])
        taken = (vision.num_channels, vision.image_size, vision.image_size)
        if made != taken:
            raise ValueError(
                f"the image processor of {source} makes images of {_size(made)}, but by num_channels and image_size "
                f"the model takes {_size(taken)}: take the image processor that belongs to the model"
            )


def require_context_length(config: CLIPTextConfig, source: str | Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError unless a tokenizer cuts texts at a length that a text tower takes."""
    if not 2 < tokenizer.model_max_length <= config.max_position_embeddings:
        raise ValueError(
            f"the tokenizer of {source} cuts captions at its model_max_length, but model_max_length is "
            f"{tokenizer.model_max_length} and max_position_embeddings is {config.max_position_embeddings}: "
            "model_max_length, in tokenizer_config.json, must be at least 3 and at most max_position_embeddings"
        )


def _size(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def require_fit_to_folder(folder: Path, source: str | Path, tokenizer, image_processor) -> None:
    """`require_fit` to the model in a folder, if there is one; to the first expert of a mixture."""
    if (folder / "config.json").is_file():
        config = load_config(folder)
        if isinstance(config, CLIPMoDEConfig):
            config = load_config(folder / config.experts[0])
        require_fit(config, source, tokenizer, image_processor)


def copy_processor(source: str | Path, folder: Path, required: bool = False) -> None:
    """Saves the processor of `source` (a folder or hub name) into `folder`, or whichever half of it there is.

    Warns on stderr about what is missing. Looks for the files first, since transformers makes up an empty tokenizer
    for a model that has none.

    Raises:
        FileNotFoundError: `source` has neither half, and the processor is `required`.
        ValueError: a file is damaged, or it does not fit the model that is in `folder` already, see `require_fit`.
    """
    has_tokenizer, has_image_processor = has_file(source, *TOKENIZER_FILES), has_file(source, *IMAGE_PROCESSOR_FILES)
    tokenizer = image_processor = None
    if has_tokenizer and has_image_processor:
        copy = load_processor(source)
        tokenizer, image_processor = copy.tokenizer, copy.image_processor
    elif has_tokenizer:
        copy = tokenizer = load_tokenizer(source)
        print(f"warning: {source} has no image processor: only its tokenizer was copied", file=sys.stderr)
    elif has_image_processor:
        copy = image_processor = load_image_processor(source)
        print(f"warning: {source} has no tokenizer: only its image processor was copied", file=sys.stderr)
    elif required:
        raise FileNotFoundError(f"{source} has neither a tokenizer nor an image processor")
    else:
        print(f"warning: {source} has no processor: the result has none either", file=sys.stderr)
        return
    require_fit_to_folder(folder, source, tokenizer, image_processor)
    if tokenizer is not None:
        forget_last_call(tokenizer)
    save(copy, folder)


def set_text_length(folder: str | Path, length: int) -> None:
    """Makes the tokenizer in a folder, if there is one, cut texts at `length` tokens."""
    if has_file(folder, *TOKENIZER_FILES):
        tokenizer = load_tokenizer(folder, model_max_length=length)
        forget_last_call(tokenizer)  # it may have been the old length
        save(tokenizer, folder)
