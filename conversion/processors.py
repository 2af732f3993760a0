"""Processors and their halves, tokenizers and image processors: loaded, copied, and held to the model they go with."""

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

from clip_moe.conversion.checkpoints import has_file, load, model_configs
from clip_moe.engine.files import save
from clip_moe.engine.messages import warn_once
from modeling_clip_moe.families import family_of, longest_text, pooled_token, pools_highest

# The halves of a processor -> files that show that a folder or repository has it
HALVES = {
    "tokenizer": "tokenizer.json vocab.json vocab.txt tokenizer.model spiece.model sentencepiece.bpe.model".split(),
    "image processor": ["processor_config.json", "preprocessor_config.json"],
}
# Two processors are compared on a text of COMPARED_TOKENS tokens, and on an image of COMPARED_SIDE pixels a side
COMPARED_TOKENS, COMPARED_SIDE = 1000, 256


def own_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """The text with a {} for a label that a model was trained on: the `hypothesis_template` of `tokenizer_config.json`,
    named like the argument of transformers' pipeline, else "a photo of a {}."."""
    return tokenizer.init_kwargs.get("hypothesis_template", "a photo of a {}.")


def forget_last_call(tokenizer: PreTrainedTokenizerBase) -> None:
    """Resets the truncation and padding of a tokenizer's last call, which it would save and do from then on."""
    if getattr(tokenizer, "backend_tokenizer", None) is not None:  # others save no such thing
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
        for key in ("max_length", "pad_to_multiple_of", "pad_token_type_id", "stride", "truncation_strategy"):
            tokenizer.init_kwargs.pop(key, None)


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub name."""
    require_half(source, "tokenizer")
    return _load(AutoTokenizer, source)


def load_image_processor(source: str | Path) -> BaseImageProcessor:
    """The image processor of a folder or hub name."""
    require_half(source, "image processor")
    return _load(AutoImageProcessor, source)


def _load(auto_class: Any, source: str | Path) -> Any:
    loaded = load(auto_class.from_pretrained, source, trust_remote_code=False)
    for key in ("is_local", "local_files_only"):  # which would be saved, and differ online and offline
        getattr(getattr(loaded, "tokenizer", loaded), "init_kwargs", {}).pop(key, None)
    return loaded


def require_half(source: str | Path, half: str) -> None:
    """Raises FileNotFoundError if a folder or hub name lacks this half of a processor, which transformers would make
    up."""
    if not has_file(source, HALVES[half]):
        files = " or ".join(HALVES[half])
        raise FileNotFoundError(f"{source} has no {half} ({files}): copy the one it was trained with into it")


def load_processor(source: str | Path) -> ProcessorMixin:
    """The processor of a folder or hub name, which fits the model that is there."""
    for half in HALVES:
        require_half(source, half)
    processor = _load(AutoProcessor, source)
    tokenizer = processor.tokenizer
    for config in model_configs(source) if has_file(source, ["config.json"]) else []:
        require_fit(config, source, source, tokenizer, processor.image_processor)
        mark_padding(config, tokenizer)
        is_siglip = pooled_token(config.get_text_config()) == "last"
        if is_siglip and tokenizer("A DOG")["input_ids"] != tokenizer("a dog")["input_ids"]:  # as SigLIP 2's
            message = f"the tokenizer of {source} is case-sensitive, but SigLIP was trained on lower-case text"
            warn_once(f"{message}: lowercase yours")
    return processor


def mark_padding(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Marks the tokenizer of a SigLIP, whose texts are padded to `max_length`: see `clip_moe.data.tokenizer.tokenize`.
    It gives no mask, here and where it is saved: SigLIP reads padding as text, and a mask would change the result. If a
    tokenizer of Chinese-CLIP or AltCLIP has no `model_max_length`, it gets the model's."""
    text = config.get_text_config()
    if pooled_token(text) == "last":
        tokenizer.pads_to_max_length = True
        tokenizer.model_max_length = text.max_position_embeddings
        tokenizer.model_input_names = tokenizer.init_kwargs["model_input_names"] = ["input_ids"]
    elif pooled_token(text) == "first" and tokenizer.model_max_length == VERY_LARGE_INTEGER:  # it has none
        tokenizer.model_max_length = longest_text(text)


def require_fit(
    config: PreTrainedConfig,
    model: str | Path,
    source: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    image_processor: BaseImageProcessor | None = None,
) -> None:
    """Refuses a tokenizer or image processor that does not fit the towers of a model.

    Args:
        config: configuration of a CLIP, a tower alone, or a LLaVA.
        model, source: sources of the configuration and of the processor, for errors.

    Raises:
        ValueError: the tokenizer has unknown tokens, cuts texts at another length, or a text is not pooled at its own
            end token; or images, or their patches, have another size than the model takes.
    """
    text, vision = config.get_text_config(), getattr(config, "vision_config", config)
    if tokenizer is not None and (fault := next(_text_faults(text, model, tokenizer), None)):
        raise ValueError(f"the tokenizer of {source} {fault}")
    if image_processor is not None and (fault := next(_image_faults(vision, model, image_processor), None)):
        raise ValueError(f"the image processor of {source} {fault}")


def _image_faults(vision: PreTrainedConfig, model: str | Path, image_processor: BaseImageProcessor) -> Iterator[str]:
    if not hasattr(vision, "patch_size"):  # a text tower alone
        return
    size = getattr(vision, "image_size", None)  # None: patches of images of any shape (NaFlex)
    # Not square, since no rule tells for all image processors what they make of such an image
    shape = tuple(_pixels(image_processor, size or COMPARED_SIDE).shape)
    if size is None:
        unit, field, shape = "patches", "patch_size", shape[2:]
        expected = (vision.num_channels * vision.patch_size**2,)
    else:
        unit, field, shape = "images", "image_size", shape[-3:]
        expected = (vision.num_channels, size, size)
    if shape != expected:
        shape, expected = (" x ".join(map(str, sizes)) for sizes in (shape, expected))
        yield (
            f"makes {unit} of {shape}, but by num_channels and {field} {model} takes {expected}: take the image "
            "processor that belongs to the model"
        )


def _text_faults(text: PreTrainedConfig, model: str | Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Faults of a tokenizer for a text tower, shown by a short and a long text, tokenized together."""
    number, pooled = max(tokenizer.get_vocab().values(), default=-1) + 1, pooled_token(text)
    longest, length = longest_text(text), tokenizer.model_max_length
    if number > text.vocab_size:
        yield (
            f"has {number} tokens, but vocab_size is {text.vocab_size} in {model}: take the tokenizer that belongs to "
            f"the model, or leave vocab_size out of a new one, to be {number}"
        )
    if pooled is None:
        return
    says_nothing = length == VERY_LARGE_INTEGER and pooled != "end"  # see `mark_padding`
    if not says_nothing and not (length == longest if pooled == "last" else 2 < length <= longest):
        yield (
            f"cuts texts at its model_max_length, but model_max_length is {length} and max_position_embeddings is "
            f"{text.max_position_embeddings} in {model}: in tokenizer_config.json, set model_max_length to {longest}"
        )
    batch = _short_and_long(tokenizer, longest)
    if not batch["attention_mask"][:, 0].all():
        yield f"pads texts on the left, but {model} needs padding on the right: set padding_side to right"
    if pooled != "end":
        return
    ids, last = batch["input_ids"], batch["attention_mask"].sum(dim=1) - 1
    # As the models pool: CLIP takes the highest token where eos_token_id is 2, MetaCLIP 2 never does
    end, highest_is_end = ids[0, last[0]].item(), pools_highest(text)
    pools = f"pools a text at {'its highest token' if highest_is_end else 'the first such token'}"
    if ((ids if highest_is_end else ids == text.eos_token_id).int().argmax(dim=1) != last).any():
        yield (
            f"ends texts with {end} and pads them with {tokenizer.pad_token_id}, but eos_token_id is "
            f"{text.eos_token_id} in {model}, which {pools}: use the tokenizer that belongs to the model, or leave "
            "eos_token_id out of a new one"
        )
    highest, number = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if highest_is_end and number > end:
        yield (
            f"has {highest!r} with the number {number}, above its end token, {end}, but eos_token_id is 2 in {model}, "
            f"which {pools}: set eos_token_id to {end}"
        )


def _short_and_long(tokenizer: PreTrainedTokenizerBase, longest: int) -> BatchEncoding:
    texts, options = ["a", " ".join(["a"] * longest)], {"return_tensors": "pt", "return_attention_mask": True}
    return tokenizer(
        texts, padding=True, truncation=True, max_length=min(tokenizer.model_max_length, longest), **options
    )


def _pixels(image_processor: BaseImageProcessor, size: int) -> torch.Tensor:
    """The pixel values of an image of random colors, about twice as wide and as high as `size`, and not square."""
    colors = np.random.default_rng(0).integers(0, 256, (size + 1, 2 * size + 1, 3), dtype=np.uint8)
    return torch.as_tensor(image_processor(Image.fromarray(colors), return_tensors="pt")["pixel_values"])


def require_same(sources: Sequence[str | Path]) -> None:
    """Refuses models whose processors, as far as they have some, give other tokens or pixels than the first."""
    first: dict[str, tuple[str | Path, Any]] = {}
    for source in sources:
        _, tokenizer, image_processor = load_halves(source)
        outputs: dict[str, Any] = {}
        if tokenizer is not None:
            words = " ".join(sorted(tokenizer.get_vocab()))
            cut = _short_and_long(tokenizer, min(tokenizer.model_max_length, COMPARED_TOKENS))["input_ids"].tolist()
            outputs["tokenizer"] = tokenizer.get_vocab(), tokenizer(words, verbose=False)["input_ids"], cut
        if image_processor is not None:
            outputs["image processor"] = _pixels(image_processor, COMPARED_SIDE).tolist()
        for half, output in outputs.items():
            other, expected = first.setdefault(half, (source, output))
            if output != expected:
                raise ValueError(
                    f"{source} and {other} have different {half}s: use models that were trained with the same one"
                )


def most_patches(config: PreTrainedConfig, source: str | Path) -> int | None:
    """Number of patches to which a NaFlex model's image processor pads an image; None without either."""
    return getattr(load_halves(source)[2], "max_num_patches", None) if family_of(config).naflex else None


def load_halves(source: str | Path) -> tuple[Any, PreTrainedTokenizerBase | None, BaseImageProcessor | None]:
    """The processor of a folder or hub name, or the half that there is, then its tokenizer and its image processor."""
    has_tokenizer, has_image_processor = (has_file(source, files) for files in HALVES.values())
    if has_tokenizer and has_image_processor:
        processor = _load(AutoProcessor, source)
        return processor, processor.tokenizer, processor.image_processor
    tokenizer = load_tokenizer(source) if has_tokenizer else None
    image_processor = load_image_processor(source) if has_image_processor else None
    return tokenizer or image_processor, tokenizer, image_processor


def copy_processor(
    source: str | Path, folder: Path, length: int | None = None, images: Mapping[str, Any] | None = None
) -> None:
    """Saves the processor of `source` (a folder or hub name), or the half that it has, into the folder of a model.
    Warns on stderr about what is missing.

    Args:
        length: tokens at which the copy cuts texts; None: as the source does.
        images: settings of the image processor that differ in the copy.
    """
    copy, tokenizer, image_processor = load_halves(source)
    halves = {"tokenizer": tokenizer, "image processor": image_processor}
    if missing := " and no ".join(name for name, half in halves.items() if half is None):
        print(f"warning: {source} has no {missing}: the result has none either", file=sys.stderr)
    if copy is None:
        return
    if images and image_processor is not None:
        image_processor = image_processor.from_dict(image_processor.to_dict() | images)
        if tokenizer is None:
            copy = image_processor
        else:
            copy.image_processor = image_processor
    if tokenizer is not None:
        tokenizer.model_max_length = length or tokenizer.model_max_length
    for config in model_configs(folder):
        require_fit(config, "the model", source, tokenizer, image_processor)
        if tokenizer is not None:
            mark_padding(config, tokenizer)
    if tokenizer is not None:
        forget_last_call(tokenizer)
    save(copy, folder)
