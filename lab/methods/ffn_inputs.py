"""Inputs of the FFNs of a dense CLIP."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from accelerate.utils import send_to_device
from transformers import PreTrainedModel

# The entries of a batch for an image tower
IMAGES = ("pixel_values", "pixel_attention_mask", "spatial_shapes")


@torch.no_grad()
def ffn_inputs(
    model: PreTrainedModel, batch: Mapping[str, torch.Tensor], layers: Mapping[str, Sequence[int]]
) -> dict[str, list[torch.Tensor]]:
    """Tower, "text" or "vision" -> (B, S, D) of each of its `layers`, in their order, of a batch of a `PairLoader`."""
    inputs = {}
    if layers.get("text"):
        with _recorded(model.text_model, layers["text"]) as inputs["text"]:
            model.get_text_features(batch["input_ids"], batch["attention_mask"])
    if layers.get("vision"):
        with _recorded(model.vision_model, layers["vision"]) as inputs["vision"]:
            model.get_image_features(**{name: batch[name] for name in IMAGES if name in batch})
    return inputs


@contextmanager
def _recorded(tower: torch.nn.Module, layers: Sequence[int]) -> Iterator[list[torch.Tensor]]:
    recorded, ffns = [], [tower.encoder.layers[layer].mlp for layer in layers]
    hooks = [ffn.register_forward_pre_hook(lambda _, inputs: recorded.append(inputs[0])) for ffn in ffns]
    try:
        yield recorded
    finally:
        for hook in hooks:
            hook.remove()


# Tokens of a layer that are kept: 268 MB at a width of 1,024
MOST_TOKENS = 2**16


def ffn_inputs_of_tokens(
    model: PreTrainedModel, batches: Sequence[Mapping[str, torch.Tensor]], layers: Mapping[str, Sequence[int]]
) -> dict[tuple[str, int], torch.Tensor]:
    """Tower and layer -> (T, D) on the CPU, of the tokens of the batches but padding; every n-th where these are more
    than `MOST_TOKENS`."""
    parts: dict[tuple[str, int], list[torch.Tensor]] = {}
    for number in range(len(batches)):
        batch = send_to_device(batches[number], model.device)
        masks = {"text": batch["attention_mask"], "vision": batch.get("pixel_attention_mask")}
        for tower, layer_inputs in ffn_inputs(model, batch, layers).items():
            for layer, values in zip(layers[tower], layer_inputs, strict=True):
                mask = masks[tower]
                tokens = values.flatten(0, 1) if mask is None else values[mask.bool()]
                every = -(-len(tokens) * len(batches) // MOST_TOKENS)
                parts.setdefault((tower, layer), []).append(tokens[::every].cpu())
    return {place: torch.cat(tokens) for place, tokens in parts.items()}
