"""How fast models embed."""

import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from transformers import BatchFeature

from clip_moe.conversion.checkpoints import load_clip
from clip_moe.conversion.verification import sample_inputs

Key = TypeVar("Key", bound=Hashable)
ROUNDS = 7
# A model's turn takes at least so long, so that small ones are not lost in the noise
SECONDS_OF_A_TURN = 0.2


def in_turn(calls: Mapping[Key, Callable[[], Any]], rounds: int, warm_up: int = 0) -> dict[Key, list]:
    """The results of each call in each round, in which every call has its turn, so that other work slows all alike. The
    first `warm_up` rounds do not count."""
    results = {name: [] for name in calls}
    for turn in range(warm_up + rounds):
        for name, call in calls.items():
            result = call()
            if turn >= warm_up:
                results[name].append(result)
    return results


def measure_speed(
    models: Sequence[str], batch_size: int, device: torch.device, dtype: torch.dtype
) -> dict[str, dict[str, float]]:
    """Model -> `images_per_second` and `texts_per_second`, by the clock: medians of rounds in each of which all models
    have their turn. All are in memory at a time."""
    turns = {}
    for name in models:
        calls = _calls(name, batch_size, device, dtype)
        for unit, call in zip(("images_per_second", "texts_per_second"), calls, strict=True):
            _seconds(call, 1, device)
            repeats = math.ceil(SECONDS_OF_A_TURN / _seconds(call, 1, device))
            turns[name, unit] = partial(_seconds, call, repeats, device)
    seconds = in_turn(turns, ROUNDS)
    rates = {key: batch_size / statistics.median(measured) for key, measured in seconds.items()}
    return {name: {unit: rate for (model, unit), rate in rates.items() if model == name} for name in models}


def _calls(name: str, batch_size: int, device: torch.device, dtype: torch.dtype) -> tuple[Callable, Callable]:
    """Functions that embed a batch of images and a batch of texts."""
    model = load_clip(name, dtype=dtype).to(device)
    inputs = sample_inputs(model.config, batch_size=batch_size)
    input_ids = inputs.pop("input_ids").to(device)
    images = BatchFeature(inputs).to(device, dtype)
    embed_images, embed_texts = map(torch.no_grad(), (model.get_image_features, model.get_text_features))
    return partial(embed_images, **images), partial(embed_texts, input_ids=input_ids)


def _seconds(call: Callable[[], None], times: int, device: torch.device) -> float:
    """Mean seconds per call over `times` calls."""
    wait_for(device)
    started = time.perf_counter()
    for _ in range(times):
        call()
    wait_for(device)
    return (time.perf_counter() - started) / times


def wait_for(device: torch.device) -> None:
    """Until an accelerator has computed all."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
