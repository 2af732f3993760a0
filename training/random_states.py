"""The states of the random generators of Python, NumPy and torch."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def random_states(device: torch.device) -> dict[str, Any]:
    """The states of all generators, as JSON can hold them."""
    kind, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [kind, keys.tolist(), *rest],
        "torch": torch.get_rng_state().tolist(),
        "device": None if device.type == "cpu" else torch.get_device_module(device).get_rng_state().tolist(),
    }


@contextmanager
def kept_random_states(device: torch.device) -> Iterator[None]:
    """Whatever is drawn in the block, what is drawn after it is what would have been drawn without it."""
    states = random_states(device)
    try:
        yield
    finally:
        set_random_states(states, device)


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    version, keys, gauss = states["python"]
    random.setstate((version, tuple(keys), gauss))
    np.random.set_state(tuple(states["numpy"]))
    torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))
    if states["device"] is not None and device.type != "cpu":
        state = torch.tensor(states["device"], dtype=torch.uint8)
        torch.get_device_module(device).set_rng_state(state)
