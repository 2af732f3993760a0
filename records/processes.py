"""What several processes that a launcher started know of each other."""

import os
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accelerate import PartialState


def num_processes() -> int:
    """The processes that a launcher started."""
    return int(os.environ.get("WORLD_SIZE", 1))


def is_first_process() -> bool:
    """Whether this is the first of the processes that a launcher started, or the only one."""
    return int(os.environ.get("RANK", 0)) == 0


def joined_processes(device: str | None = None) -> "PartialState | None":
    """What a launcher's processes know of each other, where it started several; each gets a device of its own.

    Args:
        device: what the user asked for. Only `cpu` can be asked for.
    """
    import torch
    from accelerate import PartialState

    if num_processes() == 1:
        return None
    if device not in (None, "cpu"):
        raise ValueError(f"--device {device}: of several processes each takes an accelerator of its own, or all cpu")
    use_cpu = device == "cpu" or not torch.accelerator.is_available()
    # One process may have kept all that it has to embed, and waits for another one that has not
    return PartialState(cpu=use_cpu, timeout=timedelta(days=1))
