"""
Time of a whole vision tower over the dense one's, beside what multiply-adds say, and how well both use the device.

    python -m benchmarks.towers --size ViT-L/14 --images 256 --dtype bfloat16 --output benchmarks/results/towers_gpu.md
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import CLIPVisionModel

from benchmarks.devices import described, synchronize
from evaluation.costs import SIZES, count_multiply_adds, meta_model, paper_config
from modeling_clip_moe import CLIPMoEVisionModel
from records.files import write_text

SYSTEMS = ("clip_up", "clip_moe", "clip_fmoe")


def tower(name: str, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The vision tower of a CLIP at a paper's size, with random weights."""
    config = paper_config(name).vision_config
    torch.manual_seed(0)
    with torch.device(device):
        model = (CLIPMoEVisionModel if ":" in name else CLIPVisionModel)(config)
    for parameter_name, parameter in model.named_parameters():
        if ".experts." in parameter_name or "router" in parameter_name:  # chosen evenly, and not alike
            nn.init.normal_(parameter, std=0.02)
    return model.to(dtype).eval()


def seconds(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Of one call, by the clock."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    synchronize(device)
    return (time.perf_counter() - start) / repeats


def forward(model: nn.Module, images: torch.Tensor) -> None:
    with torch.no_grad():
        model(images)


def forward_backward(model: nn.Module, images: torch.Tensor) -> None:
    model(images).pooler_output.float().square().mean().backward()
    model.zero_grad()


def product_rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Multiply-adds a second of a plain matrix product of `size` tokens by the FFN of an L/14."""
    left = torch.randn(size, 1024, device=device, dtype=dtype)
    right = torch.randn(1024, 4096, device=device, dtype=dtype)
    left @ right
    return left.shape[0] * right.numel() / seconds(lambda: left @ right, 10, device)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.towers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="ViT-B/16")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--images", type=int, default=8, help="in a batch (default: 8)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="by torch.compile, without graph breaks")
    parser.add_argument("--repeats", type=int, default=5, help="alternating runs, of which the median counts")
    parser.add_argument("--output", type=Path, help="markdown file to write besides printing")
    options = parser.parse_args(argv)
    try:
        table = "\n".join(measured(options))
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    print(table)
    if options.output is not None:
        write_text(options.output, table + "\n")


def measured(options: argparse.Namespace) -> list[str]:
    """Lines of the page."""
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    names = [options.size, *(f"{options.size}:{system}" for system in options.systems)]
    products = {name: count_multiply_adds(meta_model(paper_config(name)))["image"] * options.images for name in names}
    image_size = paper_config(options.size).vision_config.image_size
    images = torch.randn(options.images, 3, image_size, image_size, device=device, dtype=dtype)
    towers = {name: tower(name, device, dtype) for name in names}
    if options.compile:
        towers = {name: torch.compile(model, fullgraph=True) for name, model in towers.items()}
    rows, peak = [], product_rate(device, dtype, options.images * 257)
    for title, call in (("forward", forward), ("forward and backward", forward_backward)):
        times = {name: [] for name in names}
        for repeat in range(options.repeats + 1):
            for name, model in towers.items():
                time_of_call = seconds(partial(call, model, images), 1, device)
                if repeat > 0:  # the first round warms up
                    times[name].append(time_of_call)
        rounds = 1 if call is forward else 3
        for name in names:
            ratio = statistics.median(a / b for a, b in zip(times[name], times[options.size], strict=True))
            arithmetic = products[name] / products[options.size]
            median = statistics.median(times[name])
            rows.append(
                f"| {name} | {title} | {options.images / median:,.0f} | {ratio:.2f} | {arithmetic:.2f} | "
                f"{ratio / arithmetic:.2f} | {rounds * products[name] / median / peak:.0%} |"
            )
    return [
        "# Vision towers",
        "",
        f"{options.images} images, {options.dtype}{', compiled' if options.compile else ''}, medians of "
        f"{options.repeats} alternating runs. {described(device)}. A plain matrix product of as many tokens by an FFN "
        f"of an L/14 does {peak / 1e12:.3g} T multiply-adds a second: 100 % of the last column.",
        "",
        "| tower | | images/s | time over dense | multiply-adds over dense | ratio | of the plain product |",
        "|---|---|---|---|---|---|---|",
        *rows,
    ]


if __name__ == "__main__":
    main()
