"""Checks of a model that was made: it loads whole, and it computes what its source does."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlavaForConditionalGeneration, PreTrainedConfig, PreTrainedModel

from clip_moe.conversion.checkpoints import has_file, load_config, load_mixture, load_model, load_weights
from clip_moe.conversion.processors import HALVES, load_processor
from modeling_clip_moe import CLIPMoDEConfig
from modeling_clip_moe.families import is_clip, longest_text, model_class, pools_highest

TOLERANCE = 1e-4


def require_loadable(folder: str | Path) -> None:
    """The model in a folder (dense, sparse, mixed, a LLaVA) and its processor, if any, load whole."""
    config = load_config(folder)
    if isinstance(config, CLIPMoDEConfig):
        load_mixture(folder)
    elif config.model_type == "llava":
        load_model(LlavaForConditionalGeneration, folder)
    else:
        load_weights(model_class(config), folder)
    if all(has_file(folder, files) for files in HALVES.values()):
        load_processor(folder)


def sample_inputs(config, batch_size: int = 2) -> dict[str, Tensor]:
    """Random images and token ids for a CLIP of this config, or one of the two for a tower. Each text has the token
    that its family pools at."""
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
    # Patches of images of any shape: those of the second image fill half of the places
    side = int(vision.num_patches**0.5)
    shapes = torch.full((batch_size, 2), side)
    shapes[1:2, 1] //= 2
    mask = torch.arange(side * side) < shapes.prod(dim=1, keepdim=True)
    pixels = torch.randn((batch_size, side * side, vision.num_channels * vision.patch_size**2), generator=generator)
    return {"pixel_values": pixels, "pixel_attention_mask": mask.long(), "spatial_shapes": shapes}


@torch.no_grad()
def model_outputs(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The logits and both towers' hidden states (layer, batch, token, width) of a dense or sparse CLIP; of an image
    tower alone its hidden states and what it pools. Those of padding among patches, which nothing reads, are 0."""
    outputs = model(**inputs, output_hidden_states=True)
    if not is_clip(model.config):
        return {"hidden states": torch.stack(outputs.hidden_states), "pooled": outputs.pooler_output}
    patches = inputs.get("pixel_attention_mask", torch.ones(1))
    return {
        "logits": outputs.logits_per_image,
        "text hidden states": torch.stack(outputs.text_model_output.hidden_states),
        "vision hidden states": torch.stack(outputs.vision_model_output.hidden_states) * patches[..., None],
    }


@torch.no_grad()
def distances(expected: PreTrainedModel, converted: PreTrainedModel, batch_size: int = 8) -> str:
    """How far embeddings of random inputs are from the expected ones, in words."""
    inputs = sample_inputs(converted.config, batch_size)
    outputs = expected(**inputs), converted(**inputs)
    whole = {"image_embeds": "images", "text_embeds": "texts"}
    described = []
    for name, of in (whole if is_clip(converted.config) else {"pooler_output": "images"}).items():
        first, second = (output[name] for output in outputs)
        shares = 100 * (second - first).norm(dim=-1) / first.norm(dim=-1)
        described.append(f"by {shares.mean():.3g} % of their length (at most {shares.max():.3g} %) for {of}")
    return " and ".join(described)


def compare(
    expected: PreTrainedModel, converted: PreTrainedModel, name: str = "", tolerance: float = TOLERANCE
) -> None:
    """Compares the outputs of two models on random inputs; see `check_equal`."""
    inputs = sample_inputs(converted.config)
    outputs = model_outputs(expected, inputs), model_outputs(converted, inputs)
    expected, converted = ({f"{name}{part}": tensor for part, tensor in parts.items()} for parts in outputs)
    check_equal(expected, converted, tolerance)


def check_equal(expected: Mapping[str, Tensor], converted: Mapping[str, Tensor], tolerance: float = TOLERANCE) -> None:
    """Prints the largest absolute difference of each pair of tensors.

    Raises:
        ValueError: one is more than `tolerance` times the largest expected value, or not finite.
    """
    for name, tensor in expected.items():
        difference, largest = (converted[name] - tensor).abs().max().item(), tensor.abs().max().item()
        print(f"largest difference in {name}: {difference:.3g} (largest value {largest:.3g})")
        if not difference <= tolerance * largest:
            raise ValueError(f"the saved model's {name} differ from the source's (see above)")
