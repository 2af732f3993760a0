"""What a benchmark ran on."""

import platform
from pathlib import Path

import torch
import transformers


def described(device: torch.device) -> str:
    """The device and the versions, for the head of a page of results."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"
    threads = "" if device.type == "cuda" else f", {torch.get_num_threads()} threads"
    return f"{name}{threads}, torch {torch.__version__}, transformers {transformers.__version__}"


def peak_memory() -> int:
    """The most bytes that this process held at a time (Linux). What `getrusage` tells is that of its parent, too."""
    return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])


def synchronize(device: torch.device) -> None:
    """Wait for the device to finish."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
