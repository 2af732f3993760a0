"""Tools of all converters: loading whole models, comparing two of them."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor
from transformers import CLIPModel, LlavaForConditionalGeneration, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from conversion.families import family_of, is_clip, model_class
from conversion.folders import has_file, load_config, loading
from conversion.processors import IMAGE_PROCESSOR_FILES, TOKENIZER_FILES, load_processor, pools_highest
from modeling_clip_moe import CLIPMoDEConfig, CLIPMoDEModel
from modeling_clip_moe.configuration_clip_moe import SparseMoEConfig
from modeling_clip_moe.families import FAMILY_OF_TYPE, longest_text
from records.messages import cut

TOLERANCE = 1e-4
# By the type of a model that is not taken: what it is, and what to do
DENSE_HINT = " (it is dense: conversion.upcycle makes it sparse)"
SPARSE_HINT = " (it is already sparse: conversion.dense takes one expert out)"
HINTS = {
    **{family.model_type: DENSE_HINT for family in FAMILY_OF_TYPE.values()},
    **{family.sparse.config_class.model_type: SPARSE_HINT for family in FAMILY_OF_TYPE.values()},
    "clip_mode": " (it is a mixture of whole models, each in a folder of its own in it, such as expert_0)",
}


def load_model(model_class: type[PreTrainedModel], source: str | Path, **kwargs) -> PreTrainedModel:
    """Loads a model of exactly this class from a folder or hub name, in evaluation mode and its own dtype."""
    config_of(model_class, source)
    return load_weights(model_class, source, **kwargs)


def config_of(model_class: type[PreTrainedModel], source: str | Path) -> PreTrainedConfig:
    """The configuration of a model of exactly this class."""
    config = load_config(source)
    model_type, expected = config.model_type, model_class.config_class.model_type
    if model_type != expected:
        hint = HINTS.get(model_type, "") if expected in HINTS else ""
        if isinstance(config, SparseMoEConfig) and not is_sparse(config):
            hint = " (it is dense, and both of its towers have one encoder)"
        raise ValueError(f"cannot load {source}: a model of type {expected!r} is needed, not {model_type!r}{hint}")
    return config


def load_weights(model_class: type[PreTrainedModel], source: str | Path, **kwargs) -> PreTrainedModel:
    """As `load_model`, of a class that may be a part of the stored model."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # the library's report of unfit tensors: the error below says it all
    try:
        with loading(source):
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
        "not finite": [name for name, parameter in model.named_parameters() if not parameter.isfinite().all()],
    }
    if any(problems.values()):
        raise ValueError(f"{source} does not fit: " + "; ".join(f"{k}: {cut(v)}" for k, v in problems.items() if v))
    return model.eval()


def load_clip(source: str | Path, **kwargs) -> PreTrainedModel:
    """Loads a dense or a sparse CLIP of any family, see `load_model`."""
    return load_model(clip_class(source), source, **kwargs)


def clip_class(source: str | Path) -> type[PreTrainedModel]:
    """The class of a dense or a sparse CLIP; of any other model, the class that `load_model` finds it is not of."""
    return model_class(config) if is_clip(config := load_config(source)) else CLIPModel


def is_sparse(config: PreTrainedConfig) -> bool:
    """Whether a whole CLIP has sparse layers; a `SparseMoEConfig` without any describes a dense one."""
    return isinstance(config, SparseMoEConfig) and any(
        tower.moe_layers for tower in (config.text_config, config.vision_config)
    )


def load_dense(source: str | Path, **kwargs) -> PreTrainedModel:
    """Loads a dense model of any family, see `load_model`; one with a shared encoder is a `CLIPMoEModel`."""
    config = load_config(source)
    with loading(source):
        family = family_of(config)
    shared = isinstance(config, SparseMoEConfig) and not is_sparse(config)
    return load_model(family.sparse if shared else family.dense, source, **kwargs)


def load_sparse(source: str | Path, **kwargs) -> PreTrainedModel:
    """Loads a sparse model of any family, see `load_model`."""
    config = load_config(source)
    with loading(source):
        family = family_of(config)
    return load_model(family.sparse, source, **kwargs)


def load_mixture(source: str | Path, **kwargs) -> CLIPMoDEModel:
    """Loads a mixture of whole models from a folder or hub name, in evaluation mode and its own dtype."""
    config = load_config(source)
    if not isinstance(config, CLIPMoDEConfig):
        raise ValueError(f"cannot load {source}: a mixture of whole models is needed, not {config.model_type!r}")
    for name in config.experts:
        load_config(source, name)  # refuses kernels
    with loading(source):
        return CLIPMoDEModel.from_pretrained(source, **kwargs).eval()


def require_loadable(folder: str | Path) -> None:
    """The model in a folder, dense, sparse, mixed or a LLaVA, loads whole, and so does the processor if there is one.

    One expert of a mixture is in memory at a time.
    """
    if load_config(folder).model_type == CLIPMoDEConfig.model_type:
        mixture = load_mixture(folder, max_loaded_experts=1)
        for number in range(mixture.num_experts):
            mixture.expert(number)
    elif load_config(folder).model_type == "llava":
        load_model(LlavaForConditionalGeneration, folder)
    else:
        load_clip(folder)
    if has_file(folder, *TOKENIZER_FILES) and has_file(folder, *IMAGE_PROCESSOR_FILES):
        load_processor(folder)


def architecture(config: PreTrainedConfig, config_class: type[PreTrainedConfig]) -> dict:
    """The fields of a config that differ from their defaults and that another config class has.

    Leaves out how the model was stored, and the generation settings that old files carry.
    """
    known = {field.name for field in fields(config_class)} - {"architectures", "dtype", "transformers_version"}
    return {name: value for name, value in config.to_diff_dict().items() if name in known}


def sample_inputs(config, batch_size: int = 2) -> dict[str, Tensor]:
    """Random images and token ids for a CLIP of this config, each text with the token that its family pools at.

    For the config of a text tower, token ids alone; for that of an image tower, images.
    """
    generator = torch.Generator().manual_seed(0)
    text, inputs = config.get_text_config(), {}
    if not hasattr(text, "vocab_size"):
        return _sample_images(config, batch_size, generator)
    if text is not config:
        inputs = _sample_images(config.vision_config, batch_size, generator)
    last = text.vocab_size - 1
    input_ids = torch.randint(last, (batch_size, longest_text(text)), generator=generator)
    input_ids[:, -1] = last if pools_highest(text) or text.eos_token_id is None else min(text.eos_token_id, last)
    return inputs | {"input_ids": input_ids}


def _sample_images(vision: PreTrainedConfig, batch_size: int, generator: torch.Generator) -> dict[str, Tensor]:
    if hasattr(vision, "image_size"):
        shape = (batch_size, vision.num_channels, vision.image_size, vision.image_size)
        return {"pixel_values": torch.randn(shape, generator=generator)}
    # Patches of images of any shape: those of the last image fill half of the places
    side = int(vision.num_patches**0.5)
    shapes = torch.tensor([[side, side]] * (batch_size - 1) + [[side, side // 2]])
    mask = torch.arange(side * side) < shapes.prod(dim=1, keepdim=True)
    pixels = torch.randn((batch_size, side * side, vision.num_channels * vision.patch_size**2), generator=generator)
    return {"pixel_values": pixels, "pixel_attention_mask": mask.long(), "spatial_shapes": shapes}


@torch.no_grad()
def model_outputs(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The logits and both towers' hidden states (layer, batch, token, width) of a dense or sparse CLIP; of an image
    tower alone its hidden states and what it pools.

    Those of padding among patches are 0: no expert computes it, and nothing reads it.
    """
    outputs = model(**inputs, output_hidden_states=True)
    if not is_clip(model.config):
        return {"hidden states": torch.stack(outputs.hidden_states), "pooled": outputs.pooler_output}
    patches = inputs.get("pixel_attention_mask", torch.ones(1))
    return {
        "logits": outputs.logits_per_image,
        "text hidden states": torch.stack(outputs.text_model_output.hidden_states),
        "vision hidden states": torch.stack(outputs.vision_model_output.hidden_states) * patches[..., None],
    }


def check_equal(
    expected: Mapping[str, Tensor], converted: Mapping[str, Tensor], tolerance: float = TOLERANCE
) -> dict[str, float]:
    """Prints and returns the largest absolute difference of each pair of tensors."""
    differences = {}
    for name, tensor in expected.items():
        differences[name] = (converted[name] - tensor).abs().max().item()
        print(f"largest difference in {name}: {differences[name]:.3g} (largest value {tensor.abs().max().item():.3g})")
        if not differences[name] <= tolerance * tensor.abs().max().item():
            raise ValueError(f"the converted model does not compute what the source does: see {name} above")
    return differences
