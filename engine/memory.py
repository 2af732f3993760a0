"""The most memory that this process has held."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def peak_memory(device: "torch.device") -> int:
    """Bytes: on an accelerator, of its tensors; on a CPU, of the whole process."""
    import torch

    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():  # that of `resource` may be of the process that started this one
        lines = status.read_text(encoding="utf-8").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    import psutil

    return psutil.Process().memory_info().rss


def reset_peak_memory(device: "torch.device") -> None:
    """Reset the peak. On a CPU, this has no effect if the system does not support it."""
    import torch

    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
    elif Path("/proc/self/clear_refs").exists():
        with suppress(OSError):  # not every system lets it
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def in_words(size: int) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"
