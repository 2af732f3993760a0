"""
Time of one sparse FFN layer over K dense FFNs on the same tokens, for each experts implementation.

    python -m benchmarks.experts --sizes b16 l14 --output benchmarks/results/experts_cpu.md
"""

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable
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


def benchmark(size: str, options: argparse.Namespace) -> list[str]:
    """Rows of the table for one model size: medians of alternating runs, as ratios over the dense FFNs."""
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    top_k = options.num_experts_per_tok
    config = CLIPMoEVisionConfig(**SIZES[size], num_experts=options.num_experts, num_experts_per_tok=top_k)
    num_tokens = options.images * ((config.image_size // config.patch_size) ** 2 + 1)

    torch.manual_seed(0)
    hidden_states = torch.randn(num_tokens, config.hidden_size, device=device, dtype=dtype)
    weights, ids = torch.rand(num_tokens, config.num_experts, device=device).softmax(dim=-1).topk(top_k)
    experts = CLIPMoEExperts(config).to(device, dtype)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    dense = [CLIPMLP(config).to(device, dtype) for _ in range(top_k)]

    # batched_mm copies the weights of an expert for every choice
    copies = num_tokens * top_k * config.hidden_size * config.intermediate_size * dtype.itemsize / 2**30
    candidates = [name for name in IMPLEMENTATIONS if name != "batched_mm" or copies <= options.max_copies]

    def call(name: str, backward: bool) -> float:
        inputs = hidden_states.clone().requires_grad_(backward)
        if name == "dense":
            return measure(lambda: run(dense, [inputs], backward), device)
        config._experts_implementation = name
        return measure(lambda: run([experts], [inputs, ids, weights], backward), device)

    ratios = {}
    for backward in (False, True):
        times = {name: [] for name in ("dense", *candidates)}
        for repeat in range(options.repeats + 1):
            for name in times:
                seconds = call(name, backward)
                if repeat > 0:  # the first round warms up
                    times[name].append(seconds)
        for name in candidates:
            ratios[name, backward] = statistics.median(
                sparse / dense_time for sparse, dense_time in zip(times[name], times["dense"], strict=True)
            )

    title = f"{size.upper()[0]}/{size[1:]}, {options.images} images"
    rows = [f"| {title} | {name} | {ratios[name, False]:.2f} | {ratios[name, True]:.2f} |" for name in candidates]
    if "batched_mm" not in candidates:
        rows.append(f"| {title} | batched_mm | copies {copies:.0f} GiB of weights | |")
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
                "| layer | implementation | forward | forward and backward |",
                "|---|---|---|---|",
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
