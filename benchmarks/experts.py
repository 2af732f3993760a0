"""
Time of one sparse FFN layer over K dense FFNs on the same tokens, for each experts implementation.

    python -m benchmarks.experts --sizes b16 l14 --output benchmarks/results/experts_cpu.md
"""

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import transformers
from transformers.models.clip.modeling_clip import CLIPMLP

from conversion.files import write_text
from modeling_clip_moe import CLIPMoEVisionConfig
from modeling_clip_moe.modeling_clip_moe import CLIPMoEExperts

SIZES = {
    "b16": {"hidden_size": 768, "intermediate_size": 3072, "image_size": 224, "patch_size": 16},
    "l14": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "image_size": 224,
        "patch_size": 14,
    },
}
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
# forward and backward, of which only the input has a gradient, or also the weights
MODES = ("forward", "frozen", "trained")


def measure(function: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call: of the clock on a GPU, of the processor on a CPU, where other programs would disturb."""
    if device.type == "cpu":
        start = time.process_time()
        function()
        return time.process_time() - start
    torch.accelerator.synchronize(device)
    start = time.perf_counter()
    function()
    torch.accelerator.synchronize(device)
    return time.perf_counter() - start


def run(modules: list[torch.nn.Module], arguments: list[torch.Tensor], backward: bool):
    """Sum of the modules' outputs, and with `backward` the gradient of everything."""
    with torch.set_grad_enabled(backward):
        output = sum(module(*arguments) for module in modules)
        if backward:
            output.float().square().mean().backward()
    for module in modules:
        module.zero_grad()


def ratios(
    size: str,
    images: int,
    num_experts: int,
    top_k: int = 2,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    repeats: int = 5,
    implementations: Sequence[str] = IMPLEMENTATIONS,
) -> dict[tuple[str, str], float]:
    """(implementation, mode) -> time over K dense FFNs on the same tokens, medians of alternating runs."""
    device = torch.device(device)
    config = CLIPMoEVisionConfig(**SIZES[size], num_experts=num_experts, num_experts_per_tok=top_k)
    num_tokens = images * ((config.image_size // config.patch_size) ** 2 + 1)
    torch.manual_seed(0)
    hidden_states = torch.randn(num_tokens, config.hidden_size, device=device, dtype=dtype)
    weights, ids = torch.rand(num_tokens, num_experts, device=device).softmax(dim=-1).topk(top_k)
    experts = CLIPMoEExperts(config).to(device, dtype)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    dense = [CLIPMLP(config).to(device, dtype) for _ in range(top_k)]

    def call(name: str, mode: str) -> float:
        inputs = hidden_states.clone().requires_grad_(mode != "forward")
        if name == "dense":
            return measure(lambda: run(dense, [inputs], mode != "forward"), device)
        config._experts_implementation = name
        return measure(lambda: run([experts], [inputs, ids, weights], mode != "forward"), device)

    found = {}
    for mode in MODES:
        for module in (experts, *dense):
            module.requires_grad_(mode != "frozen")
        times = {name: [] for name in ("dense", *implementations)}
        for repeat in range(repeats + 1):
            for name in times:
                seconds = call(name, mode)
                if repeat > 0:  # the first round warms up
                    times[name].append(seconds)
        for name in implementations:
            pairs = zip(times[name], times["dense"], strict=True)
            found[name, mode] = statistics.median(sparse / dense_time for sparse, dense_time in pairs)
    return found


def benchmark(size: str, options: argparse.Namespace) -> list[str]:
    """Rows of the table for one model size."""
    config, top_k = CLIPMoEVisionConfig(**SIZES[size]), options.num_experts_per_tok
    dtype = getattr(torch, options.dtype)
    # batched_mm copies the weights of an expert for every choice
    num_tokens = options.images * ((config.image_size // config.patch_size) ** 2 + 1)
    copies = num_tokens * top_k * config.hidden_size * config.intermediate_size * dtype.itemsize / 2**30
    candidates = [name for name in IMPLEMENTATIONS if name != "batched_mm" or copies <= options.max_copies]
    device = torch.device(options.device)
    arguments = (options.images, options.num_experts, top_k, dtype, device, options.repeats, candidates)
    found = ratios(size, *arguments)
    title = f"{size.upper()[0]}/{size[1:]}, {options.images} images"
    rows = [
        f"| {title} | {name} | " + " | ".join(f"{found[name, mode]:.2f}" for mode in MODES) + " |"
        for name in candidates
    ]
    if "batched_mm" not in candidates:
        rows.append(f"| {title} | batched_mm | copies {copies:.0f} GiB of weights | | |")
    return rows


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="model sizes")
    parser.add_argument("--images", type=int, default=8, help="images in the batch (default: 8)")
    parser.add_argument("--num-experts", type=int, default=8, help="E (default: 8)")
    parser.add_argument("--num-experts-per-tok", type=int, default=2, help="K (default: 2)")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda, cuda:1 ..."
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each, of which the median counts")
    parser.add_argument(
        "--max-copies", type=float, default=4, help="skip batched_mm where it copies more GiB of weights (default: 4)"
    )
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    options = parser.parse_args(argv)
    if min(options.images, options.repeats) < 1:
        parser.error("--images and --repeats must be at least 1")

    try:
        device = torch.device(options.device)
        hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"
        rows = [row for size in options.sizes for row in benchmark(size, options)]
        table = "\n".join(
            [
                "# Experts implementations",
                "",
                f"Time over {options.num_experts_per_tok} dense FFNs on the same tokens (1.00: no overhead). "
                f"{options.num_experts} experts, medians of {options.repeats} alternating runs, {options.dtype}, "
                f"{hardware}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
                f"transformers {transformers.__version__}.",
                "",
                "| layer | implementation | forward | forward and backward, frozen | forward and backward |",
                "|---|---|---|---|---|",
                *rows,
            ]
        )
        print(table)
        if options.output is not None:
            options.output.parent.mkdir(parents=True, exist_ok=True)
            write_text(options.output, table)
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
