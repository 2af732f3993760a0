"""Processors and their halves, tokenizers and image processors: loaded, copied, and held to the model they go with."""

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoProcessor,
    AutoTokenizer,
    BaseImageProcessor,
    BatchEncoding,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from conversion.checkpoints import has_file, loading, model_configs
from modeling_clip_moe.families import family_of, longest_text, pooled_token, pools_highest
from records.files import save
from records.messages import warn_once

logger = logging.getLogger(__name__)

# Files that show that a folder or repository has a half of a processor
TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.json",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
)
IMAGE_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
# Settings of a tokenizer that its last call leaves there
LAST_CALL = ("max_length", "pad_to_multiple_of", "pad_token_type_id", "stride", "truncation_strategy")

# Two processors are compared on a text of so many tokens, and on an image of this side
COMPARED_TOKENS, COMPARED_SIDE = 1000, 256


def forget_last_call(tokenizer: PreTrainedTokenizerBase) -> None:
    """Makes a tokenizer forget what it last cut and padded texts to, which it would save and do from then on."""
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        return  # one without the tokenizers library saves no such thing
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    for key in LAST_CALL:
        tokenizer.init_kwargs.pop(key, None)


def load_tokenizer(source: str | Path, **kwargs) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub name."""
    return _load(AutoTokenizer, source, **kwargs)


def load_image_processor(source: str | Path) -> BaseImageProcessor:
    """The image processor of a folder or hub name."""
    return _load(AutoImageProcessor, source)


def _load(auto_class: Any, source: str | Path, **kwargs) -> Any:
    with loading(source):
        return auto_class.from_pretrained(source, trust_remote_code=False, **kwargs)


def load_processor(source: str | Path) -> ProcessorMixin:
    """The processor of a folder or hub name, which fits the model that is there."""
    for what, names in (("tokenizer", TOKENIZER_FILES), ("image processor", IMAGE_PROCESSOR_FILES)):
        if not has_file(source, *names):
            raise FileNotFoundError(f"{source} has no {what}; copy the one it was trained with there")
    processor = _load(AutoProcessor, source)
    if has_file(source, "config.json"):
        for config in model_configs(source):
            require_fit(config, source, source, processor.tokenizer, processor.image_processor)
            mark_padding(config, processor.tokenizer)
            if pooled_token(config.get_text_config()) == "last":
                _warn_of_capitals(processor.tokenizer, str(source))
    return processor


def _warn_of_capitals(tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    """Warn where a SigLIP's tokenizer reads capitals, which its training did not have: those of SigLIP 2 with images of
    one size do."""
    if tokenizer("A DOG")["input_ids"] != tokenizer("a dog")["input_ids"]:
        warn_once(
            logger,
            f"the tokenizer of {source} is case-sensitive, but SigLIP was trained on lower-case text: lower-case yours",
        )


def mark_padding(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Marks the tokenizer of a model whose texts are padded to `max_length`: see `data.tokenizer.tokenize`.

    That is its `model_max_length` then. It also gives no mask, here and where it is saved: to SigLIP padding is text,
    and a mask that other programs pass on would change what it computes. A tokenizer of Chinese-CLIP or AltCLIP that
    has no `model_max_length` gets the model's.
    """
    text = config.get_text_config()
    if pooled_token(text) == "last":
        tokenizer.pads_to_max_length = True
        tokenizer.model_max_length = text.max_position_embeddings
        tokenizer.model_input_names = tokenizer.init_kwargs["model_input_names"] = ["input_ids"]
    elif pooled_token(text) == "first" and tokenizer.model_max_length == VERY_LARGE_INTEGER:  # it says nothing
        tokenizer.model_max_length = longest_text(text)


def require_fit(
    config: PreTrainedConfig,
    model: str | Path,
    source: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    image_processor: BaseImageProcessor | None = None,
) -> None:
    """Refuses the halves of a processor that are given, where they do not fit the towers that a model has.

    Args:
        config: configuration of a CLIP, a tower alone, or a LLaVA.
        model: what the configuration was loaded from, for errors.
        source: what the processor was loaded from, for errors.

    Raises:
        ValueError: the tokenizer has tokens that the model does not know, cuts texts at a length that it does not take,
            or a text is not pooled at its own end token; or images, or their patches, get another size than the model
            takes.
    """
    text, vision = config.get_text_config(), getattr(config, "vision_config", config)
    if tokenizer is not None:
        number = max(tokenizer.get_vocab().values(), default=-1) + 1
        if number > text.vocab_size:
            raise ValueError(
                f"the tokenizer of {source} has {number} tokens, but vocab_size is {text.vocab_size} in {model}: "
                f"take the tokenizer that belongs to the model, or leave vocab_size out of a new one, to be {number}"
            )
        pooled = pooled_token(text)
        if pooled in ("end", "first"):
            for fault in _text_faults(text, model, source, tokenizer):
                raise ValueError(f"the tokenizer of {source} {fault}")
        elif pooled == "last" and tokenizer.model_max_length not in (
            text.max_position_embeddings,
            VERY_LARGE_INTEGER,  # it says nothing, as SigLIP 2's: see `mark_padding`
        ):
            raise ValueError(
                f"the tokenizer of {source} cuts texts at its model_max_length, {tokenizer.model_max_length}, but "
                f"{model} takes texts padded to {text.max_position_embeddings}: set model_max_length to that in "
                "tokenizer_config.json"
            )
        elif pooled == "last" and tokenizer.padding_side != "right":
            raise ValueError(
                f"the tokenizer of {source} pads texts on the left, but {model} was trained on padding behind them: "
                "set padding_side to right in tokenizer_config.json"
            )
    if image_processor is not None and hasattr(vision, "patch_size"):  # no text tower alone
        size = getattr(vision, "image_size", None)  # None: patches of images of any shape (NaFlex)
        # Not square, since no rule tells for all image processors what they make of such an image
        shape = tuple(_pixels(image_processor, size or COMPARED_SIDE).shape)
        if size is None:
            what, field, made, taken = "patches", "patch_size", shape[2:], (vision.num_channels * vision.patch_size**2,)
        else:
            what, field, made, taken = "images", "image_size", shape[-3:], (vision.num_channels, size, size)
        if made != taken:
            made, taken = (" x ".join(map(str, shape)) for shape in (made, taken))
            raise ValueError(
                f"the image processor of {source} makes {what} of {made}, but by num_channels and {field} {model} "
                f"takes {taken}: take the image processor that belongs to the model"
            )


def _text_faults(
    text: PreTrainedConfig,
    model: str | Path,
    source: str | Path,
    tokenizer: PreTrainedTokenizerBase,
) -> Iterator[str]:
    """Why a short and a long text, tokenized together, are not both pooled at their last token whatever their words, or
    at their first one."""
    longest, length, pools_first = longest_text(text), tokenizer.model_max_length, pooled_token(text) == "first"
    # VERY_LARGE_INTEGER says nothing, see `mark_padding`
    if not 2 < length <= longest and not (pools_first and length == VERY_LARGE_INTEGER):
        yield (
            f"cuts texts at its model_max_length, but model_max_length is {length} and "
            f"max_position_embeddings is {text.max_position_embeddings} in {model}: model_max_length, in "
            f"tokenizer_config.json, must be at least 3 and at most {longest}"
        )
    with loading(source):
        batch = _short_and_long(tokenizer, longest)
    ids, last = batch["input_ids"], batch["attention_mask"].sum(dim=1) - 1
    # As the models pool: CLIP takes the highest token where eos_token_id is 2, MetaCLIP 2 never does
    end, highest_is_end = ids[0, last[0]].item(), pools_highest(text)
    pooled = (ids if highest_is_end else ids == text.eos_token_id).int().argmax(dim=1)
    pools = f"pools a text at {'its highest token' if highest_is_end else 'the first such token'}"
    if not batch["attention_mask"][:, 0].all():
        yield (
            f"pads texts on the left, but {model} numbers the tokens of a text from its first: set padding_side to "
            "right in tokenizer_config.json"
        )
    if pools_first:
        return
    if (pooled != last).any():
        yield (
            f"ends texts with {end} and pads them with {tokenizer.pad_token_id}, but eos_token_id is "
            f"{text.eos_token_id} in {model}, which {pools}: take the tokenizer that belongs to the model, or leave "
            "eos_token_id out of a new one"
        )
    vocabulary = tokenizer.get_vocab()
    highest = max(vocabulary, key=vocabulary.get)
    if highest_is_end and vocabulary[highest] > end:
        yield (
            f"has {highest!r} with the number {vocabulary[highest]}, above its end token, {end}, but eos_token_id is 2 "
            f"in {model}, which {pools}: set eos_token_id to {end}"
        )


def _short_and_long(tokenizer: PreTrainedTokenizerBase, longest: int) -> BatchEncoding:
    texts = ["a", " ".join(["a"] * longest)]
    return tokenizer(texts, padding=True, truncation=True, return_tensors="pt")


def _pixels(image_processor: BaseImageProcessor, size: int) -> torch.Tensor:
    """The pixel values of an image of random colors, about twice as wide and as high as `size`, and not square."""
    colors = np.random.default_rng(0).integers(0, 256, (size + 1, 2 * size + 1, 3), dtype=np.uint8)
    return torch.as_tensor(image_processor(Image.fromarray(colors), return_tensors="pt")["pixel_values"])


def require_same(sources: Sequence[str | Path]) -> None:
    """The processors of several models, as far as they have some, make the same of texts and images."""
    first: dict[str, tuple[str | Path, Any]] = {}
    for source in sources:
        _, tokenizer, image_processor = load_halves(source)
        made: dict[str, Any] = {}
        if tokenizer is not None:
            words = " ".join(sorted(tokenizer.get_vocab()))
            cut = _short_and_long(tokenizer, min(tokenizer.model_max_length, COMPARED_TOKENS))["input_ids"].tolist()
            made["tokenizer"] = tokenizer.get_vocab(), tokenizer(words, verbose=False)["input_ids"], cut
        if image_processor is not None:
            made["image processor"] = _pixels(image_processor, COMPARED_SIDE).tolist()
        for half, of_half in made.items():
            other, expected = first.setdefault(half, (source, of_half))
            if of_half != expected:
                what = "texts" if half == "tokenizer" else "images"
                raise ValueError(
                    f"the {half} of {source} makes something else of {what} than that of {other}, but what is put "
                    "together needs one processor: take models that were trained with the same one"
                )


def most_patches(config: PreTrainedConfig, source: str | Path) -> int | None:
    """The patches that the image processor of a folder or hub name pads an image to, for a model of images of any shape
    (NaFlex); None: the model's images have one size, or there is no image processor."""
    if not family_of(config).naflex:
        return None
    return getattr(load_halves(source)[2], "max_num_patches", None)


def load_halves(source: str | Path) -> tuple[Any, PreTrainedTokenizerBase | None, BaseImageProcessor | None]:
    """The processor of a folder or hub name, or the half that there is, then its tokenizer and its image processor.

    Looks for the files first, since transformers makes up an empty tokenizer for a model that has none.
    """
    has_tokenizer, has_image_processor = has_file(source, *TOKENIZER_FILES), has_file(source, *IMAGE_PROCESSOR_FILES)
    if has_tokenizer and has_image_processor:
        processor = _load(AutoProcessor, source)
        return processor, processor.tokenizer, processor.image_processor
    tokenizer = load_tokenizer(source) if has_tokenizer else None
    image_processor = load_image_processor(source) if has_image_processor else None
    return tokenizer or image_processor, tokenizer, image_processor


def copy_processor(
    source: str | Path,
    folder: Path,
    required: bool = False,
    length: int | None = None,
    model: str | Path | None = None,
    images: Mapping[str, Any] | None = None,
) -> None:
    """Saves the processor of `source` (a folder or hub name) into `folder`, or whichever half of it there is.

    Warns on stderr about what is missing.

    Args:
        length: at which the copy cuts texts; None: where the source does.
        model: what the model in `folder` was made of, for errors; None: `source`.
        images: settings that the image processor of the copy has in place of its own.
    """
    copy, tokenizer, image_processor = load_halves(source)
    if images and image_processor is not None:
        image_processor = image_processor.from_dict(image_processor.to_dict() | images)
        if tokenizer is None:
            copy = image_processor
        else:
            copy.image_processor = image_processor
    if copy is None:
        if required:
            raise FileNotFoundError(f"{source} has neither a tokenizer nor an image processor")
        print(f"warning: {source} has no processor: the result has none either", file=sys.stderr)
        return
    halves = (tokenizer, "tokenizer", TOKENIZER_FILES), (image_processor, "image processor", IMAGE_PROCESSOR_FILES)
    for half, what, names in halves:
        if half is None:
            print(f"warning: {source} has no {what} ({' or '.join(names)}), nor has the result", file=sys.stderr)
    if tokenizer is not None:
        tokenizer.model_max_length = length or tokenizer.model_max_length
    if (folder / "config.json").is_file():
        for config in model_configs(folder):
            require_fit(config, model or source, source, tokenizer, image_processor)
            if tokenizer is not None:
                mark_padding(config, tokenizer)
    if tokenizer is not None:
        forget_last_call(tokenizer)
    save(copy, folder)
