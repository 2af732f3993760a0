"""Several processes that share the work of an evaluation."""

import os
from datetime import timedelta

import torch
from accelerate import PartialState


def joined_processes(device: str | None = None) -> PartialState | None:
    """What a launcher's processes know of each other, where it started several; each gets a device of its own.

    Args:
        device: what the user asked for. Only `cpu` can be asked for.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return None
    if device not in (None, "cpu"):
        raise ValueError(f"--device {device}: of several processes each takes an accelerator of its own, or all cpu")
    use_cpu = device == "cpu" or not torch.accelerator.is_available()
    # One process may have kept all that it has to embed, and waits for another one that has not
    return PartialState(cpu=use_cpu, timeout=timedelta(days=1))
